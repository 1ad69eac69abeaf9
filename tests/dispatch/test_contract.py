"""What every transport must do, over gloo ranks; DeepEP's adapters run on a fake of the package, which needs GPUs.
`tests/gpu/test_dispatch.py` runs the same functions over NCCL ranks, on the real one. A transport is added to
`TRANSPORTS` and `make`.
"""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from automodel_moe import dispatch
from automodel_moe.dispatch.all_to_all import AllToAll
from automodel_moe.dispatch.all_to_all_padded import PaddedAllToAll
from tests.dispatch import fake_deep_ep

TRANSPORTS = ["all_to_all", "all_to_all_padded", "deepep_buffer", "deepep_elastic"]
PADDED = "all_to_all_padded"
# What each carries: hidden size a multiple of this, and whether bfloat16 alone.
STEP = {"all_to_all": 1, PADDED: 1, "deepep_buffer": 16, "deepep_elastic": 256}
E_LOCAL = 2


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def make(name: str, num_local_experts: int = E_LOCAL) -> dispatch.Transport:
    if name == "all_to_all":
        return AllToAll(dist.group.WORLD, num_local_experts)
    if name == PADDED:
        return PaddedAllToAll(dist.group.WORLD, num_local_experts, row_capacity=40)
    if device() == "cpu":
        fake_deep_ep.install()
    from automodel_moe.dispatch.deepep_buffer import DeepEPBuffer
    from automodel_moe.dispatch.deepep_elastic import DeepEPElastic

    cls = {"deepep_buffer": DeepEPBuffer, "deepep_elastic": DeepEPElastic}[name]
    # Enough for all tests: ranks that live long keep their buffer.
    return cls(dist.group.WORLD, num_local_experts, max_tokens=4096)


def carried(name: str, dtype: torch.dtype, hidden: int) -> tuple[torch.dtype, int]:
    """The nearest to `dtype` and `hidden` that this transport carries."""
    if STEP[name] == 1:
        return dtype, hidden
    return torch.bfloat16, -(-hidden // STEP[name]) * STEP[name]


def _tokens(rank: int, n_tokens: int, top_k: int, n_experts: int, hidden: int, dtype: torch.dtype, holes: bool):
    generator = torch.Generator().manual_seed(100 + rank)
    x_TH = torch.randn(n_tokens, hidden, generator=generator).to(dtype)
    scores_TE = torch.rand(n_tokens, n_experts, generator=generator)
    idx_TK = scores_TE.topk(top_k).indices if n_tokens else torch.zeros(0, top_k, dtype=torch.long)
    if holes:
        idx_TK = torch.where(torch.rand(idx_TK.shape, generator=generator) < 0.3, -1, idx_TK)
    weights_TK = torch.rand(n_tokens, top_k, generator=generator)
    return tuple(t.to(device()) for t in (x_TH, idx_TK, torch.where(idx_TK < 0, 0.0, weights_TK)))


def _expert(x_RH: torch.Tensor, idx_RK: torch.Tensor, weights_RK: torch.Tensor, first: int) -> torch.Tensor:
    """Expert g maps x to (g + 1) * x: exact in every dtype for small integers, and it tells experts apart."""
    scale_R = (torch.where(idx_RK >= 0, weights_RK * (idx_RK + first + 1), 0.0)).sum(1, keepdim=True)
    return (x_RH.float() * scale_R).to(x_RH.dtype)


def _table(x_RH: torch.Tensor, idx_RK: torch.Tensor, weights_RK: torch.Tensor, in_order: bool) -> torch.Tensor:
    """The rows as one table of float64, which holds all of their dtypes' values; sorted where order is free."""
    table = torch.cat([t.double().cpu() for t in (x_RH, idx_RK, weights_RK)], 1)
    return table if in_order else torch.tensor(sorted(table.tolist())).reshape(table.shape)


def round_trip(name: str, counts: list[int], top_k: int, hidden: int, dtype: torch.dtype, holes: bool) -> int:
    """There and back twice along one plan, against the definition; returns the rows that this rank received."""
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name)
    dtype, hidden = carried(name, dtype, hidden)
    x_TH, idx_TK, weights_TK = _tokens(rank, counts[rank], top_k, world * E_LOCAL, hidden, dtype, holes)
    plan = transport.plan(idx_TK, x_TH, differentiable=rank == 0 or name == PADDED)
    x_RH, weights_RK = transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))
    assert plan.differentiable, "rank 0 runs a backward, so every rank must"
    assert x_RH.dtype == dtype and weights_RK.dtype == torch.float32

    # Each rank gets each token once that has one of its experts; in order of source rank and token, where the
    # transport keeps an order.
    want_x, want_idx, want_weights = [], [], []
    for source in range(world):
        x, idx, weights = _tokens(source, counts[source], top_k, world * E_LOCAL, hidden, dtype, holes)
        local = torch.where(idx // E_LOCAL == rank, idx % E_LOCAL, -1)
        here = (local >= 0).any(1)
        want_x.append(x[here])
        want_idx.append(local[here])
        want_weights.append(torch.where(local >= 0, weights, 0.0)[here])
    in_order = name != "deepep_elastic"
    want = _table(torch.cat(want_x), torch.cat(want_idx), torch.cat(want_weights), in_order)
    real_R = (plan.idx_RK >= 0).any(1)
    assert name == PADDED or real_R.all()
    assert not weights_RK[~real_R].any()
    assert torch.equal(_table(x_RH[real_R], plan.idx_RK[real_R], weights_RK[real_R], in_order), want)
    assert plan.n_pairs in (None, int((plan.idx_RK >= 0).sum()))

    # Two transfers back in flight: each must come home.
    ones_RH = torch.ones_like(x_RH)
    first = transport.combine_start(plan, ones_RH)
    second = transport.combine_start(plan, x_RH, weights_RK)
    copies_TH, _ = transport.combine_finish(first)
    y_TH, back_TK = transport.combine_finish(second)
    ranks_T1 = torch.stack([(idx_TK // E_LOCAL == r).any(1) for r in range(world)]).sum(0)[:, None]
    assert torch.equal(copies_TH, ranks_T1.expand(-1, hidden).to(dtype))
    # A sum of n equal numbers in float32, rounded once: exact for n up to 8 in these dtypes' mantissas.
    assert torch.equal(y_TH, (x_TH.float() * ranks_T1).to(dtype))
    assert torch.equal(back_TK, weights_TK)

    # The mirror of a combine: the same rows go out again, without weights.
    again_RH, nothing = transport.dispatch_finish(transport.dispatch_start(plan, x_TH))
    assert torch.equal(again_RH[real_R], x_RH[real_R]) and nothing is None
    return int(real_R.sum())


CASES = {
    "plain": dict(counts=[9, 9, 9, 9], top_k=2),
    "top_1": dict(counts=[9, 9, 9, 9], top_k=1),
    "every_expert": dict(counts=[5, 5, 5, 5], top_k=4),
    "holes": dict(counts=[9, 9, 9, 9], top_k=3, holes=True),
    "uneven_with_an_empty_rank": dict(counts=[1, 0, 17, 3], top_k=2),
    "one_token_in_all": dict(counts=[0, 1, 0, 0], top_k=2),
    "no_token_at_all": dict(counts=[0, 0, 0, 0], top_k=2),
    "wide": dict(counts=[4, 4, 4, 4], top_k=2, hidden=200),
    "bf16": dict(counts=[9, 3, 9, 9], top_k=2, dtype=torch.bfloat16, hidden=7),
    "fp16": dict(counts=[9, 3, 9, 9], top_k=2, dtype=torch.float16),
}


# Ranks that each is run on; `Buffer` takes these alone.
SIZES = {"all_to_all": [1, 2, 4, 8], PADDED: [1, 2, 4, 8], "deepep_buffer": [2, 4, 8], "deepep_elastic": [1, 2, 4, 8]}
ON = [(name, size) for name, sizes in SIZES.items() for size in sizes]


def round_trips(name: str) -> None:
    """Every case that so many ranks can have; in one job, for a job costs more than a case."""
    world = dist.get_world_size()
    for case, given in CASES.items():
        arguments = {"hidden": 8, "dtype": torch.float32, "holes": False} | given
        if arguments["top_k"] > world * E_LOCAL:
            continue
        arguments["counts"] = (arguments["counts"] * 2)[:world]
        try:
            round_trip(name=name, **arguments)
        except Exception as error:
            raise AssertionError(f"case {case!r}") from error


@pytest.mark.parametrize("name, size", ON)
def test_round_trip(worlds, name, size):
    worlds(size).run(f"{__name__}:round_trips", timeout=150, name=name)


def many_layers(name: str) -> None:
    """Forwards of several layers in flight, their transfers mirrored in reverse order, as backward does it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name)
    dtype, hidden = carried(name, torch.float32, 6)
    kept = []
    for layer in range(5):
        x_TH, idx_TK, weights_TK = _tokens(10 * layer + rank, 3 + layer, 2, world * E_LOCAL, hidden, dtype, False)
        plan = transport.plan(idx_TK, x_TH, True)
        x_RH, weights_RK = transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))
        y_RH = _expert(x_RH, plan.idx_RK, weights_RK, rank * E_LOCAL)
        y_TH, _ = transport.combine_finish(transport.combine_start(plan, y_RH))
        # Products summed over ranks instead of in one row: each part and the sum are rounded to the dtype, and the
        # parts have one sign.
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(y_TH, _expert(x_TH, idx_TK, weights_TK, 0), rtol=tolerance, atol=tolerance)
        kept.append((plan, x_TH, x_RH, (plan.idx_RK >= 0).any(1)))
    for plan, x_TH, x_RH, real_R in reversed(kept):
        again_RH, _ = transport.dispatch_finish(transport.dispatch_start(plan, x_TH))
        assert torch.equal(again_RH[real_R], x_RH[real_R])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_plans_of_many_layers_are_kept_apart(worlds, name):
    worlds(2).run(f"{__name__}:many_layers", timeout=60, name=name)


class _Dispatch(torch.autograd.Function):
    """A dispatch and its mirror, as the contract has them."""

    @staticmethod
    def forward(ctx, x_TH, weights_TK, transport, plan):
        ctx.transport, ctx.plan = transport, plan
        return transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))

    @staticmethod
    def backward(ctx, dx_RH, dweights_RK):
        dx_TH, dweights_TK = ctx.transport.combine_finish(ctx.transport.combine_start(ctx.plan, dx_RH, dweights_RK))
        return dx_TH, dweights_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH, transport, plan):
        ctx.transport, ctx.plan = transport, plan
        return transport.combine_finish(transport.combine_start(plan, y_RH))[0]

    @staticmethod
    def backward(ctx, dy_TH):
        return ctx.transport.dispatch_finish(ctx.transport.dispatch_start(ctx.plan, dy_TH))[0], None, None


def _layer(transport: dispatch.Transport, x_TH, idx_TK, weights_TK) -> torch.Tensor:
    plan = transport.plan(idx_TK, x_TH, True)
    x_RH, weights_RK = _Dispatch.apply(x_TH, weights_TK, transport, plan)
    return _Combine.apply(_expert(x_RH, plan.idx_RK, weights_RK, transport.rank * E_LOCAL), transport, plan)


def gradients(name: str) -> None:
    """Gradients of rows and of weights against the definition, computed without a transport: of one layer, of two
    forwards whose backwards run in either order, and through recompute."""
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name)
    dtype, hidden = carried(name, torch.float32, 16)
    # A rank's sum of products is rounded to the dtype, and so is the sum over ranks; entries are of size 1 to 50.
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}

    def leaves(seed: int):
        n_tokens = (7, 0, 5, 11)[(rank + seed) % 4]
        x_TH, idx_TK, weights_TK = _tokens(10 * seed + rank, n_tokens, 2, world * E_LOCAL, hidden, dtype, True)
        return x_TH.requires_grad_(), idx_TK, weights_TK.requires_grad_()

    def check(x_TH, idx_TK, weights_TK, got_TH, got_TK, cotangent_TH):
        dx_TH = cotangent_TH.float() * torch.where(idx_TK >= 0, weights_TK * (idx_TK + 1), 0.0).sum(1, keepdim=True)
        dots_T1 = (cotangent_TH.float() * x_TH.float()).sum(1, keepdim=True)
        torch.testing.assert_close(got_TH.float(), dx_TH.detach(), **tolerance)
        # A product of two rows: its rounding grows with what is summed, not with the sum.
        scale = (cotangent_TH.float() * x_TH.float()).abs().sum(1, keepdim=True) * world * E_LOCAL
        error_TK = (got_TK - torch.where(idx_TK >= 0, dots_T1 * (idx_TK + 1), 0.0)).abs()
        assert (error_TK <= 2 * torch.finfo(dtype).eps * scale).all()

    for order in ((0, 1), (1, 0)):
        inputs = [leaves(seed) for seed in (0, 1)]
        outputs = [_layer(transport, *given) for given in inputs]
        cotangents = [torch.sin(torch.arange(y.numel(), device=y.device)).view_as(y).to(dtype) for y in outputs]
        for place in order:
            x_TH, idx_TK, weights_TK = inputs[place]
            got = torch.autograd.grad(outputs[place], (x_TH, weights_TK), cotangents[place])
            check(x_TH, idx_TK, weights_TK, *got, cotangents[place])

    x_TH, idx_TK, weights_TK = leaves(2)
    y_TH = checkpoint(_layer, transport, x_TH, idx_TK, weights_TK, use_reentrant=False)
    cotangent_TH = torch.ones_like(y_TH)
    check(x_TH, idx_TK, weights_TK, *torch.autograd.grad(y_TH, (x_TH, weights_TK), cotangent_TH), cotangent_TH)


@pytest.mark.parametrize("name, size", [(name, size) for name, size in ON if size < 8])
def test_gradients(worlds, name, size):
    worlds(size).run(f"{__name__}:gradients", timeout=100, name=name)


def many_steps(name: str, n_steps: int) -> tuple[list[int], list[int]]:
    """Open files and live tensors, counted over steps with batches and routings of all sizes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name)
    dtype, hidden = carried(name, torch.float32, 8)
    generator = torch.Generator().manual_seed(rank)
    files, tensors = [], []
    for step in range(n_steps):
        n_tokens = int(torch.randint(0, 30, (), generator=generator))
        x_TH, idx_TK, weights_TK = _tokens(world * step + rank, n_tokens, 2, world * E_LOCAL, hidden, dtype, True)
        x_TH.requires_grad_()
        _layer(transport, x_TH, idx_TK, weights_TK).sum().backward()
        fake_deep_ep.calls.clear()
        if step % 50 == 49:
            del x_TH, idx_TK, weights_TK
            gc.collect()
            files.append(len(os.listdir("/proc/self/fd")))
            tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    return files, tensors


@pytest.mark.parametrize("name", TRANSPORTS)
def test_steps_leave_nothing_behind(worlds, name):
    for files, tensors in worlds(2).run(f"{__name__}:many_steps", timeout=150, name=name, n_steps=200):
        assert len(set(files[1:])) == len(set(tensors[1:])) == 1, (files, tensors)


def mismatch(name: str, what: str) -> str:
    rank = dist.get_rank()
    transport = make(name)
    dtype = torch.bfloat16 if what == "dtype" and rank else torch.float32
    # Sizes that no other test brings: this is what the first step sees.
    dtype, hidden = carried(name, dtype, 1025 if what == "hidden" and rank else 768)
    top_k = 3 if what == "top_k" and rank else 2
    x_TH, idx_TK, weights_TK = _tokens(rank, 4, top_k, dist.get_world_size() * E_LOCAL, hidden, dtype, False)
    with pytest.raises(RuntimeError) as error:
        transport.dispatch_start(transport.plan(idx_TK, x_TH, True), x_TH, weights_TK)
    return str(error.value)


MISMATCHES = [
    ("all_to_all", "dtype"),
    (PADDED, "dtype"),
    *[(name, what) for name in TRANSPORTS for what in ("hidden", "top_k")],
]


@pytest.mark.parametrize("name, what", MISMATCHES)
def test_ranks_that_disagree_are_told_on_every_rank(worlds, name, what):
    for message in worlds(2).run(f"{__name__}:mismatch", timeout=60, name=name, what=what):
        assert "every rank must run the same model in the same dtype" in message


def out_of_step(name: str) -> str:
    """Both ranks run a layer. Then rank 1, which has met an error of its own, begins the next batch with it, while
    rank 0 comes to the second layer."""
    layers = [make(name), make(name)]
    dtype, hidden = carried(name, torch.float32, 768)
    x_TH, idx_TK, weights_TK = _tokens(0, 4, 2, dist.get_world_size() * E_LOCAL, hidden, dtype, False)

    def run(layer):
        layer.dispatch_finish(layer.dispatch_start(layer.plan(idx_TK, x_TH, True), x_TH, weights_TK))

    run(layers[0])
    with pytest.raises(RuntimeError) as error:
        run(layers[0] if dist.get_rank() else layers[1])
    return str(error.value)


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != PADDED])
def test_a_rank_that_passes_over_an_error_of_its_own_is_found(worlds, name):
    for message in worlds(2).run(f"{__name__}:out_of_step", timeout=60, name=name):
        assert "in another layer, or in another step" in message


def rows_per_token(name: str, n_experts: int, top_k: int, n_tokens: int) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name, n_experts // world)
    dtype, hidden = carried(name, torch.float32, 1)
    x_TH, idx_TK, weights_TK = _tokens(rank, n_tokens, top_k, n_experts, hidden, dtype, False)
    plan = transport.plan(idx_TK, x_TH, True)
    x_RH, _ = transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))
    return x_RH.size(0) / n_tokens


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != PADDED])
def test_a_token_travels_once_to_each_rank_that_needs_it(worlds, name):
    got = worlds(4).run(f"{__name__}:rows_per_token", timeout=60, name=name, n_experts=32, top_k=4, n_tokens=4000)
    # A rank holds 8 of 32 experts and is missed by all of 4 draws without replacement with this probability.
    missed = 24 * 23 * 22 * 21 / (32 * 31 * 30 * 29)
    # 16,000 tokens: the mean's standard deviation is under 0.01.
    assert sum(got) / 4 == pytest.approx(4 * (1 - missed), abs=0.03)
