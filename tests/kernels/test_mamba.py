"""Mamba-2's kernels against plain torch in float64; on a CPU they run in Triton's interpreter."""

import os

import pytest
import torch
from torch.nn.functional import conv1d, silu

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="the kernels are Triton's")

from automodel_moe.dense.sequences import Sequences
from automodel_moe.kernels.causal_conv_triton import causal_conv_silu
from automodel_moe.kernels.gated_norm_triton import gated_rms_norm
from automodel_moe.kernels.mamba_scan_triton import mamba_scan
from tests.dense import torch_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every uninitialised float is NaN, every uninitialised integer the largest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def leaves(dtype, *tensors):
    return [tensor.detach().to(DEVICE, dtype, copy=True).requires_grad_() for tensor in tensors]


def assert_near(got, want, tolerance=2e-6):
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def packed(B, S):
    torch.manual_seed(7)
    return (torch.rand(B, S) < 0.06).int().cumsum(1).int().to(DEVICE)


@pytest.mark.parametrize("several", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize(
    ("B", "S", "h", "g", "n", "p"),
    [(2, 150, 4, 2, 16, 16), (1, 64, 16, 1, 16, 16), (2, 20, 3, 1, 32, 16)],
    ids=["a chunk that is not full", "more heads than a program takes", "shorter than a chunk"],
)
def test_scan(B, S, h, g, n, p, several):
    torch.manual_seed(0)
    tensors = (torch.randn(B, S, h * p + 2 * g * n), torch.rand(B, S, h) / 5, -torch.rand(h) * 3 - 0.2, torch.randn(h))
    dy = torch.randn(B, S, h, p, device=DEVICE)
    seq_BS = packed(B, S) if several else None
    got = leaves(torch.float32, *tensors)
    y, _ = mamba_scan(*got, seq_BS, groups=g, state_size=n)
    y.backward(dy)
    want = leaves(torch.float64, *tensors)
    sequences = Sequences(seq_BS) if several else None
    y_want, _ = torch_kernels.mamba_scan(*want, g, n, None, False, sequences)
    y_want.backward(dy.double())
    assert_near((y, *(t.grad for t in got)), (y_want, *(t.grad for t in want)))


def test_scan_continues_from_the_state_that_it_gave():
    torch.manual_seed(0)
    tensors = torch.randn(2, 100, 96), torch.rand(2, 100, 2) / 5, -torch.rand(2) * 3 - 0.2, torch.randn(2)
    xkq, dt, A, D = (tensor.to(DEVICE) for tensor in tensors)
    whole, last = mamba_scan(xkq, dt, A, D, groups=2, state_size=16, return_state=True)
    first, state = mamba_scan(xkq[:, :37], dt[:, :37], A, D, groups=2, state_size=16, return_state=True)
    rest, end = mamba_scan(xkq[:, 37:], dt[:, 37:], A, D, None, state, groups=2, state_size=16, return_state=True)
    assert_near((torch.cat([first, rest], dim=1), end), (whole, last), 1e-6)
    assert not end.requires_grad


@pytest.mark.parametrize("several", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution(several, with_bias):
    torch.manual_seed(0)
    B, S, C, W = 2, 70, 130, 4
    wide, weight, bias = torch.randn(B, S, C + 9), torch.randn(C, W), torch.randn(C)
    dy = torch.randn(B, S, C, device=DEVICE)
    seq_BS = packed(B, S) if several else None

    def reference(x_BSC, weight_CW, bias_C=None, seq_BS=None):
        def convolve(x_BSC):
            y_BCS = conv1d(x_BSC.mT, weight_CW[:, None], bias_C, padding=W - 1, groups=C)
            return silu(y_BCS[..., : x_BSC.size(1)].mT)

        return torch_kernels._apart(convolve, None if seq_BS is None else Sequences(seq_BS), x_BSC)

    results = []
    for function, dtype in ((causal_conv_silu, torch.float32), (reference, torch.float64)):
        inputs = leaves(dtype, wide, weight, *[bias] * with_bias)
        y = function(inputs[0][..., 5 : 5 + C], *inputs[1:], seq_BS=seq_BS)
        y.backward(dy.to(dtype))
        results.append((y, *(t.grad for t in inputs)))
    assert_near(*results)


@pytest.mark.parametrize(("R", "C", "group"), [(37, 48, 24), (5, 64, 64)])
def test_gated_norm(R, C, group):
    torch.manual_seed(0)
    x, wide, weight = torch.randn(R, C), torch.randn(R, C + 7), torch.randn(C)
    dy = torch.randn(R, C, device=DEVICE)

    def reference(x_RC, gate_RC, weight_C, group, epsilon):
        u = (x_RC * silu(gate_RC)).unflatten(-1, (-1, group))
        return weight_C * (u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + epsilon)).flatten(1)

    results = []
    for function, dtype in ((gated_rms_norm, torch.float32), (reference, torch.float64)):
        inputs = leaves(dtype, x, wide, weight)
        y = function(inputs[0], inputs[1][:, 3 : 3 + C], inputs[2], group, 1e-5)
        y.backward(dy.to(dtype))
        results.append((y, *(t.grad for t in inputs)))
    assert_near(*results)
