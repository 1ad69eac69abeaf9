# ruff: noqa: E741 (I is the width of an expert)
"""An expert's activation and its gradient, each in one pass: h is read once and nothing but the result is written."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .grouped_gemm_triton import _activate, _constants, _d_activate


def activate(h_NJ: Tensor, gate: Any) -> Tensor:
    """
    `act(h)`, differentiable, [N, I] in h's dtype, computed in float32; what [`automodel_moe.experts.gates.apply`] is
    in plain torch.

    Args:
        h_NJ: [N, J], J = 2I with a gate and I without.
        gate ([`~automodel_moe.experts.gates.Gate`]): the activation.
    """
    return _Activate.apply(h_NJ.contiguous(), gate)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_NJ: Tensor, gate: Any) -> Tensor:
        ctx.save_for_backward(h_NJ)
        ctx.gate = gate
        N, J = h_NJ.shape
        act_NI = h_NJ.new_empty(N, J // 2 if gate.has_gate else J)
        _launch(_forward, gate, h_NJ, act_NI)
        return act_NI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_NI: Tensor) -> tuple[Tensor, None]:
        (h_NJ,) = ctx.saved_tensors
        dh_NJ = torch.empty_like(h_NJ)
        _launch(_backward, ctx.gate, h_NJ, da_NI.contiguous(), dh_NJ)
        return dh_NJ, None


def _launch(kernel: Any, gate: Any, h_NJ: Tensor, *others: Tensor) -> None:
    N, J = h_NJ.shape
    I = J // 2 if gate.has_gate else J
    block = min(1024, triton.next_power_of_2(I))
    if N > 0:
        grid = (N, triton.cdiv(I, block))
        kernel[grid](h_NJ, *others, I, J, gate.interleaved, *_constants(gate), block, num_warps=max(1, block // 256))


@triton.jit
def _load(h_ptr, I: tl.constexpr, J: tl.constexpr, interleaved: tl.constexpr, block: tl.constexpr):
    """Where this program's columns are, in act(h) and in h, and h there; u is g again without a gate."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    if interleaved:
        j = 2 * (tl.program_id(1) * block) + tl.arange(0, 2 * block)
        both = tl.load(h_ptr + row * J + j, mask=j < J, other=0).to(tl.float32)
        g, u = tl.split(tl.reshape(both, (block, 2)))
    else:
        j = i
        g = tl.load(h_ptr + row * J + i, mask=i < I, other=0).to(tl.float32)
        u = g
        if J != I:
            u = tl.load(h_ptr + row * J + I + i, mask=i < I, other=0).to(tl.float32)
    return row, i, j, g, u


@triton.jit
def _forward(
    h_ptr, act_ptr, I: tl.constexpr, J: tl.constexpr, interleaved: tl.constexpr,
    kind: tl.constexpr, alpha: tl.constexpr, beta: tl.constexpr, limit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, i, _, g, u = _load(h_ptr, I, J, interleaved, block)
    act = _activate(g, u, kind, alpha, beta, limit)
    tl.store(act_ptr + row * I + i, act.to(act_ptr.dtype.element_ty), mask=i < I)


@triton.jit
def _backward(
    h_ptr, da_ptr, dh_ptr, I: tl.constexpr, J: tl.constexpr, interleaved: tl.constexpr,
    kind: tl.constexpr, alpha: tl.constexpr, beta: tl.constexpr, limit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, i, j, g, u = _load(h_ptr, I, J, interleaved, block)
    da = tl.load(da_ptr + row * I + i, mask=i < I, other=0).to(tl.float32)
    _, by_g, by_u = _d_activate(g, u, kind, alpha, beta, limit)
    dtype = dh_ptr.dtype.element_ty
    if interleaved:
        dh = tl.reshape(tl.join((da * by_g).to(dtype), (da * by_u).to(dtype)), (2 * block,))
        tl.store(dh_ptr + row * J + j, dh, mask=j < J)
    else:
        tl.store(dh_ptr + row * J + i, (da * by_g).to(dtype), mask=i < I)
        if J != I:
            tl.store(dh_ptr + row * J + I + i, (da * by_u).to(dtype), mask=i < I)
