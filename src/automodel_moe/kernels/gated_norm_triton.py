"""Mamba-2's gated RMSNorm in one pass each way: y = weight * RMSNorm(x * SiLU(gate)), over groups of channels.

A program takes one group of many rows, so that the weight's gradient is summed in registers; the backward computes the
norm again from x and gate, which are all that is kept.

Legend of the shape suffixes: R rows, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS = 16  # of one program


@torch.compiler.disable
def gated_rms_norm(x: Tensor, gate: Tensor, weight_C: Tensor, group_size: int, epsilon: float) -> Tensor:
    """
    Args:
        x, gate (`Tensor`): `[..., C]`; `gate` may be a slice of wider rows.
        weight_C (`Tensor`): of any floating dtype.
        group_size (`int`): channels that are normalised together; divides C.
        epsilon (`float`): added to the mean square.

    Returns:
        `[..., C]` in x's dtype; sums are float32.
    """
    y_RC = _GatedNorm.apply(x.reshape(-1, x.shape[-1]), gate.flatten(0, -2), weight_C, group_size, epsilon)
    return y_RC.view(x.shape)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, gate_RC: Tensor, weight_C: Tensor, group_size: int, epsilon: float) -> Tensor:
        x_RC = x_RC.contiguous()
        if gate_RC.stride(1) != 1:
            gate_RC = gate_RC.contiguous()
        y_RC = torch.empty_like(x_RC)
        ctx.save_for_backward(x_RC, gate_RC, weight_C)
        ctx.constants = {"GROUP": group_size, "BLOCK": triton.next_power_of_2(group_size), "ROWS": _ROWS}
        ctx.epsilon = epsilon
        (R, C), grid = x_RC.shape, _grid(x_RC, group_size)
        _forward_kernel[grid](
            x_RC, gate_RC, weight_C, y_RC, R, C, gate_RC.stride(0), epsilon, **ctx.constants, num_warps=4
        )
        return y_RC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RC: Tensor) -> tuple[Tensor | None, ...]:
        x_RC, gate_RC, weight_C = ctx.saved_tensors
        dx_RC, d_gate_RC = torch.empty_like(x_RC), torch.empty_like(x_RC)
        (R, C), grid = x_RC.shape, _grid(x_RC, ctx.constants["GROUP"])
        d_weight = torch.empty(grid[0], C, dtype=torch.float32, device=x_RC.device)
        _backward_kernel[grid](
            x_RC,
            gate_RC,
            weight_C,
            dy_RC.contiguous(),
            dx_RC,
            d_gate_RC,
            d_weight,
            R,
            C,
            gate_RC.stride(0),
            ctx.epsilon,
            **ctx.constants,
            num_warps=4,
        )
        return dx_RC, d_gate_RC, d_weight.sum(0).to(weight_C.dtype), None, None


def _grid(x_RC: Tensor, group_size: int) -> tuple[int, int]:
    R, C = x_RC.shape
    return triton.cdiv(R, _ROWS), C // group_size


@triton.jit
def _forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    R,
    C,
    gate_stride,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    e = tl.arange(0, BLOCK)
    inside = e < GROUP
    channel = tl.program_id(1) * GROUP + e
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for i in range(ROWS):
        r = tl.program_id(0).to(tl.int64) * ROWS + i
        mask = inside & (r < R)
        x = tl.load(x_ptr + r * C + channel, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + r * gate_stride + channel, mask=mask, other=0.0).to(tl.float32)
        u = x * gate * tl.sigmoid(gate)
        scale = 1 / tl.sqrt(tl.sum(u * u, 0) / GROUP + epsilon)
        tl.store(y_ptr + r * C + channel, weight * u * scale, mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    dy_ptr,
    dx_ptr,
    d_gate_ptr,
    d_weight_ptr,
    R,
    C,
    gate_stride,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    e = tl.arange(0, BLOCK)
    inside = e < GROUP
    channel = tl.program_id(1) * GROUP + e
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        r = tl.program_id(0).to(tl.int64) * ROWS + i
        mask = inside & (r < R)
        x = tl.load(x_ptr + r * C + channel, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + r * gate_stride + channel, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + r * C + channel, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        u = x * gate * sigmoid
        scale = 1 / tl.sqrt(tl.sum(u * u, 0) / GROUP + epsilon)
        d_weight += dy * u * scale
        du = dy * weight
        du = scale * (du - u * (scale * scale * tl.sum(du * u, 0) / GROUP))
        tl.store(dx_ptr + r * C + channel, du * gate * sigmoid, mask=mask)
        tl.store(d_gate_ptr + r * C + channel, du * x * sigmoid * (1 + gate * (1 - sigmoid)), mask=mask)
    tl.store(d_weight_ptr + tl.program_id(0) * C + channel, d_weight, mask=inside)
