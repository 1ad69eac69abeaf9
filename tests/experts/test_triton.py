"""The triton backend in Triton's interpreter: every layout, every known activation, against float64 row by row."""

import copy
import os
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels on the GPU", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="the kernels are Triton's")

from automodel_moe.experts import triton as backend
from automodel_moe.kernels import grouped_gemm_triton as kernels
from automodel_moe.kernels.biases import rows_sum_reference
from automodel_moe.kernels.pairs import sort_pairs
from tests.experts.reference import LAYOUTS, assert_near, batch, dense, filled, run, toy
from tests.experts.test_torch import EVERYTHING, GPT_OSS_LIKE, PLAIN, REAL, name_of

# Relative norm of the error: float32 as it is here, where operands are float32 too.
NEAR = 1e-5


@pytest.fixture
def forward(monkeypatch):
    return with_blocks(monkeypatch, tma=True)


def with_blocks(monkeypatch, tma):
    """The backend with blocks that toy sizes fill unevenly: no expert has a multiple of 16 rows."""
    blocks = {name: kernels.Blocks(16, 16, 16, warps=1, stages=1, tma=tma) for name in kernels._HOPPER}
    monkeypatch.setattr(kernels, "blocks_for", lambda device: blocks)
    monkeypatch.setattr(backend, "unsupported", lambda *args: None)
    return backend.forward


def reference(experts, x_RH, idx_RK, weights_RK):
    return run(dense, copy.deepcopy(experts).double(), x_RH.double(), idx_RK, weights_RK.double())


def check(forward, experts, inputs, tolerance=NEAR):
    got = run(forward, experts, *inputs)
    assert_near(got, reference(experts, *inputs), tolerance)
    return got


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize(
    "layout", [*(one for one in LAYOUTS if not one["has_post_expert_norm"]), EVERYTHING], ids=name_of
)
def test_every_layout(monkeypatch, layout, tma):
    check(with_blocks(monkeypatch, tma), toy(layout), batch(R=20, K=2, E=4, dead=0.3))


@pytest.mark.parametrize("sizes", [(24, 40), (36, 12)], ids=["no multiple of a block", "no multiple of 16 bytes"])
@pytest.mark.parametrize("kind", ["plain", "gpt_oss"])
def test_odd_widths(forward, kind, sizes):
    H, I = sizes  # noqa: E741
    experts = toy(PLAIN, H=H, I=I) if kind == "plain" else clamped(H, I)
    check(forward, experts, batch(R=20, K=2, E=4, H=H))


@pytest.mark.parametrize("name", REAL)
def test_real_classes(forward, name):
    experts_class, config = REAL[name]
    experts = filled(experts_class(SimpleNamespace(_experts_implementation="eager", **config)))
    check(forward, experts, batch(R=24, K=2, E=4))


@pytest.mark.parametrize("layout", [PLAIN, GPT_OSS_LIKE], ids=["plain", "gpt_oss"])
def test_float16(forward, layout):
    """The interpreter has no bfloat16; operands, activations and results are rounded to 11 bits about six times."""
    check(forward, toy(layout, dtype=torch.float16), batch(R=20, K=2, E=4, dtype=torch.float16, dead=0.3), 3e-3)


def clamped(H=32, I=16):  # noqa: E741
    experts_class, config = REAL["gpt_oss"]
    config = config | {"hidden_size": H, "intermediate_size": I, "_experts_implementation": "eager"}
    return filled(experts_class(SimpleNamespace(**config)))


KINDS = {"fused": partial(toy, PLAIN), "fused, all flags": clamped, "called as it is": partial(toy, EVERYTHING)}


@pytest.fixture(params=KINDS)
def experts(request):
    return KINDS[request.param]()


def test_a_count_on_the_host_changes_nothing(forward, experts):
    inputs = batch(R=24, K=2, E=4, dead=0.3)
    plain = run(forward, experts, *inputs)
    counted = run(partial(forward, n_pairs=int((inputs[1] >= 0).sum())), experts, *inputs)
    assert all(torch.equal(plain[name], counted[name]) for name in plain)


def test_computing_h_again_gives_the_same_bits(forward, experts):
    inputs = batch(R=24, K=2, E=4, dead=0.3)
    plain, again = (run(partial(forward, keeps_h=keeps_h), experts, *inputs) for keeps_h in (True, False))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("keeps_h", [True, False])
def test_what_is_kept_for_backward(forward, experts, keeps_h):
    x_RH, idx_RK, weights_RK = batch(R=24, K=2, E=4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda kept: kept
    ):
        forward(experts, x_RH.requires_grad_(), idx_RK, weights_RK, keeps_h=keeps_h)
    # Of the 48 pairs: h alone, where it is to be kept; and an activation's own tensors where it is called as it is.
    wide = [shape for shape in kept if shape[0] == 48 and len(shape) == 2]
    fused = not experts.has_post_expert_norm
    assert (len(wide) == keeps_h) if fused else bool(wide) == keeps_h


def test_experts_without_rows_and_dead_rows_of_nan(forward, experts):
    x_RH, idx_RK, weights_RK = batch(R=18, K=2, E=4)
    idx_RK = torch.where(idx_RK < 2, 1, 3)
    dead_R = torch.arange(18) % 3 == 0
    idx_RK[dead_R] = -1
    want = reference(experts, x_RH, idx_RK, weights_RK)
    x_RH[dead_R] = torch.nan
    got = run(forward, experts, x_RH, idx_RK, weights_RK)
    assert_near(got, want, NEAR)
    for name in ("gate_up_proj", "down_proj"):
        assert got[name][[0, 2]].eq(0).all()
        assert got[name][[1, 3]].ne(0).any()
    assert got["weights"][dead_R].eq(0).all()


@pytest.mark.parametrize("rows", [0, 8], ids=["no row", "no live slot"])
def test_nothing_to_do_gives_zeros(forward, experts, rows):
    x_RH, idx_RK, weights_RK = batch(R=rows, K=2, E=4)
    got = run(forward, experts, torch.full_like(x_RH, torch.nan), torch.full_like(idx_RK, -1), weights_RK)
    assert all(value.eq(0).all() for value in got.values())


def test_frozen_experts_cost_no_gemm_of_theirs(forward, experts, monkeypatch):
    products = []
    for module in (kernels, backend):
        for name in ("weight_gemm", "rows_sum"):
            monkeypatch.setattr(module, name, lambda *args, **kwargs: products.append(args), raising=False)
    got = check(forward, experts.requires_grad_(False), batch(R=24, K=2, E=4))
    assert got.keys() == {"y", "x", "weights"}
    assert not products


def test_gradients_of_float32_parameters_are_rounded_once(forward):
    """Under autocast what a GEMM summed in float32 is the gradient; through float16 it would have 11 bits."""
    experts, inputs = toy(PLAIN), batch(R=24, K=2, E=4)

    def under_autocast(*args):
        with torch.autocast("cpu", torch.float16):
            return forward(*args)

    got = run(under_autocast, experts, *inputs)
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_near(got, reference(experts, *inputs), 3e-3)
    assert not torch.equal(got["down_proj"], got["down_proj"].half().float())


@pytest.mark.parametrize("n_experts", [1, 5, 130])
def test_row_tiles(n_experts):
    counts = torch.randint(0, 40, (n_experts,), generator=torch.Generator().manual_seed(0))
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    tiles = kernels.row_tiles(bounds, int(bounds[-1]) + 7, 16)
    want = [
        (expert, row) for expert, (start, end) in enumerate(pairwise(bounds.tolist())) for row in range(start, end, 16)
    ]
    got = [tuple(tile) for tile in tiles.tile_T2.tolist()]
    assert got[: len(want)] == want
    assert all(expert == -1 for expert, _ in got[len(want) :])


@pytest.mark.parametrize("gathers", [False, True])
def test_rows_sum(gathers):
    _, idx_RK, weights_RK = batch(R=90, K=2, E=4, dead=0.2)
    pairs = sort_pairs(idx_RK, 5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90 if gathers else 180, 70, generator=generator)
    extra = (pairs.row_N, pairs.slot_N, weights_RK) if gathers else ()
    got = kernels.rows_sum(x, pairs.bounds, torch.float32, *extra)
    want = rows_sum_reference(x, pairs.bounds, torch.float32, *extra)
    # Sums of some 40 products in another order.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got[4].eq(0).all()
