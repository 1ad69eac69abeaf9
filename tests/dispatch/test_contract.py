"""What every transport must do, over gloo ranks; DeepEP's adapters run on a fake of the package, which needs GPUs.
`tests/gpu/test_dispatch.py` runs the same functions over NCCL ranks, on the real one. A transport is added to
`TRANSPORTS` and `make`.
"""

import pytest
import torch
import torch.distributed as dist

from automodel_moe import dispatch
from automodel_moe.dispatch.all_to_all import AllToAll
from tests.dispatch import fake_deep_ep

TRANSPORTS = ["all_to_all", "deepep_buffer", "deepep_elastic"]
# What each carries: hidden size a multiple of this, and whether bfloat16 alone.
STEP = {"all_to_all": 1, "deepep_buffer": 16, "deepep_elastic": 256}
E_LOCAL = 2


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def make(name: str, num_local_experts: int = E_LOCAL) -> dispatch.Transport:
    if name == "all_to_all":
        return AllToAll(dist.group.WORLD, num_local_experts)
    if device() == "cpu":
        fake_deep_ep.install()
    from automodel_moe.dispatch.deepep_buffer import DeepEPBuffer
    from automodel_moe.dispatch.deepep_elastic import DeepEPElastic

    cls = {"deepep_buffer": DeepEPBuffer, "deepep_elastic": DeepEPElastic}[name]
    # Enough for all tests: ranks that live long keep their buffer.
    return cls(dist.group.WORLD, num_local_experts, max_tokens=4096)


def carried(name: str, dtype: torch.dtype, hidden: int) -> tuple[torch.dtype, int]:
    """The nearest to `dtype` and `hidden` that this transport carries."""
    if name == "all_to_all":
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
    plan = transport.plan(idx_TK, x_TH, differentiable=rank == 0)
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
    assert torch.equal(_table(x_RH, plan.idx_RK, weights_RK, in_order), want)
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
    assert torch.equal(again_RH, x_RH) and nothing is None
    return x_RH.size(0)


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_round_trip(worlds, name, case, size):
    arguments = {"hidden": 8, "dtype": torch.float32, "holes": False} | CASES[case]
    arguments["counts"] = arguments["counts"][:size]
    worlds(size).run(f"{__name__}:round_trip", timeout=60, name=name, **arguments)


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
        kept.append((plan, x_TH, x_RH))
    for plan, x_TH, x_RH in reversed(kept):
        again_RH, _ = transport.dispatch_finish(transport.dispatch_start(plan, x_TH))
        assert torch.equal(again_RH, x_RH)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_plans_of_many_layers_are_kept_apart(worlds, name):
    worlds(2).run(f"{__name__}:many_layers", timeout=60, name=name)


def mismatch(name: str, what: str) -> str:
    rank = dist.get_rank()
    transport = make(name)
    dtype = torch.bfloat16 if what == "dtype" and rank else torch.float32
    # Sizes that no other test brings: this is what the first step sees.
    dtype, hidden = carried(name, dtype, 1025 if what == "hidden" and rank else 768)
    x_TH, idx_TK, weights_TK = _tokens(rank, 4, 2, dist.get_world_size() * E_LOCAL, hidden, dtype, False)
    with pytest.raises(RuntimeError) as error:
        transport.dispatch_start(transport.plan(idx_TK, x_TH, True), x_TH, weights_TK)
    return str(error.value)


@pytest.mark.parametrize("name, what", [("all_to_all", "dtype"), *[(name, "hidden") for name in TRANSPORTS]])
def test_ranks_that_disagree_are_told_on_every_rank(worlds, name, what):
    for message in worlds(2).run(f"{__name__}:mismatch", timeout=60, name=name, what=what):
        assert "every rank must run the same model in the same dtype" in message


def rows_per_token(name: str, n_experts: int, top_k: int, n_tokens: int) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name, n_experts // world)
    dtype, hidden = carried(name, torch.float32, 1)
    x_TH, idx_TK, weights_TK = _tokens(rank, n_tokens, top_k, n_experts, hidden, dtype, False)
    plan = transport.plan(idx_TK, x_TH, True)
    x_RH, _ = transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))
    return x_RH.size(0) / n_tokens


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_token_travels_once_to_each_rank_that_needs_it(worlds, name):
    got = worlds(4).run(f"{__name__}:rows_per_token", timeout=60, name=name, n_experts=32, top_k=4, n_tokens=4000)
    # A rank holds 8 of 32 experts and is missed by all of 4 draws without replacement with this probability.
    missed = 24 * 23 * 22 * 21 / (32 * 31 * 30 * 29)
    # 16,000 tokens: the mean's standard deviation is under 0.01.
    assert sum(got) / 4 == pytest.approx(4 * (1 - missed), abs=0.03)
