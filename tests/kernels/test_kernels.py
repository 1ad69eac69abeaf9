"""Every Triton kernel against the plain-torch reference beside it: on the GPU, else in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="the kernels are Triton's")

from automodel_moe.experts.gates import GLU, RELU2, SILU, Gate, apply
from automodel_moe.kernels import activation_triton, gather_sum_triton, pairs_triton
from automodel_moe.kernels import gather_sum as plain
from automodel_moe.kernels.pairs import sort_slots_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def routing(R, K, E, dead=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    idx_RK = torch.randint(E, (R, K), generator=generator)
    return idx_RK.masked_fill(torch.rand(R, K, generator=generator) < dead, -1).to(DEVICE)


ROUTINGS = {
    "one slot": routing(1, 1, 1),
    "plain": routing(100, 2, 5),
    "some dead": routing(300, 4, 7, dead=0.3),
    "all dead": routing(40, 2, 5, dead=1.1),
    "two blocks": routing(600, 3, 9, dead=0.1),
    "one expert": routing(700, 2, 16) * 0 + 3,
    "no row": routing(0, 2, 5),
    "many experts": routing(200, 8, 300, dead=0.1),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sort_slots_equals_the_reference_exactly(name, dtype):
    idx_RK = ROUTINGS[name].to(dtype)
    n_experts = max(16, int(idx_RK.max()) + 1) if idx_RK.numel() else 16
    got, want = pairs_triton.sort_slots(idx_RK, n_experts), sort_slots_reference(idx_RK, n_experts)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype == torch.int32
        assert torch.equal(one, other)


# Few rows: in the interpreter each of them is a program in Python.
SMALL = {
    "one slot": routing(1, 1, 1),
    "plain": routing(9, 2, 5),
    "some dead": routing(12, 3, 7, dead=0.4),
    "all dead": routing(5, 2, 5, dead=1.1),
    "no row": routing(0, 2, 5),
    "top-8": routing(4, 8, 300, dead=0.1),
}


def operands(name, H, dtype):
    idx_RK = SMALL[name]
    slot, _, pos_RK, bounds = sort_slots_reference(idx_RK, 300)
    generator = torch.Generator().manual_seed(1)
    src_NH = torch.randn(idx_RK.numel(), H, generator=generator).to(DEVICE, dtype)
    src_NH[bounds[-1] :] = torch.nan
    dy_RH = torch.randn(idx_RK.shape[0], H, generator=generator).to(DEVICE, dtype)
    weights_RK = torch.rand(idx_RK.shape, generator=generator).to(DEVICE)
    return src_NH, dy_RH, weights_RK, slot, pos_RK, bounds


# Sums of at most 8 products in float32 in the same order: the rounding to the result's dtype may fall the other way.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("H", [48, 2048 + 8])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_gather_sum(name, H, dtype):
    src_NH, _, weights_RK, _, pos_RK, _ = operands(name, H, dtype)
    for weights in (None, weights_RK):
        got = gather_sum_triton.gather_sum(src_NH, pos_RK, weights, dtype=dtype)
        want = plain.gather_sum_reference(src_NH, pos_RK, weights, dtype=dtype)
        torch.testing.assert_close(got, want, rtol=CLOSE[dtype], atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("H", [48, 2048 + 8])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_spread(name, H, dtype):
    src_NH, dy_RH, weights_RK, slot, pos_RK, bounds = operands(name, H, dtype)
    dy_RH[(pos_RK < 0).all(dim=1)] = torch.nan
    got, got_weights = gather_sum_triton.spread(dy_RH, src_NH, weights_RK, pos_RK)
    want, want_weights = plain.spread_reference(dy_RH, src_NH, weights_RK, slot, pos_RK)
    live = int(bounds[-1])
    torch.testing.assert_close(got[:live], want[:live], rtol=CLOSE[dtype], atol=1e-6)
    assert got_weights[pos_RK < 0].eq(0).all()
    # A sum of H products of unit normals, in another order.
    torch.testing.assert_close(got_weights, want_weights, rtol=1e-5, atol=1e-6 * H)


@pytest.mark.parametrize("name", SMALL)
def test_zero_tail(name):
    src_NH, *_, bounds = operands(name, 2048 + 8, torch.bfloat16)
    want = plain.zero_tail_reference_(src_NH.clone(), bounds)
    assert torch.equal(gather_sum_triton.zero_tail_(src_NH, bounds), want)
    assert not src_NH.isnan().any()


@pytest.mark.parametrize("name", SMALL)
def test_gather_dots(name):
    _, _, _, _, pos_RK, bounds = operands(name, 48, torch.float32)
    dots_PN = torch.randn(3, pos_RK.numel(), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    dots_PN[:, bounds[-1] :] = torch.nan
    got = gather_sum_triton.gather_dots(dots_PN, pos_RK)
    # The same three numbers in the same order.
    assert torch.equal(got, plain.gather_dots_reference(dots_PN, pos_RK))
    assert not got.isnan().any()


GATES = [Gate(GLU), Gate(GLU, 1.702, 1.0, 0.7), Gate(GLU, 1.702, 1.0, 0.7, True), Gate(SILU), Gate(RELU2)]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("N", [0, 5])
def test_activate(gate, N):
    h_NJ = torch.randn(N, 72, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # At a limit itself the gradient passes.
    h_NJ[:, :4] = gate.limit if gate.limit < 1 else 1
    leaves = [h_NJ.clone().requires_grad_() for _ in range(2)]
    results = [activation_triton.activate(leaves[0], gate), apply(gate, leaves[1])]
    for result in results:
        result.backward(torch.linspace(-1, 1, result.shape[1], device=DEVICE).expand_as(result))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
