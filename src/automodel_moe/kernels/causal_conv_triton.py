"""A depthwise causal convolution and its SiLU in one pass, channels last, forward and backward.

    z[t] = sum over w of weight[w] * x[t - W + 1 + w] + bias        y = SiLU(z)

Nothing but x is kept: the backward computes z again for the W positions that each input reaches, from lines of x that
the cache already holds. Inputs of another sequence of a packed row count as zero, like those before the first.

Legend of the shape suffixes: B batch, S positions, C channels, W width of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = {"BLOCK_S": 32, "BLOCK_C": 128}


@torch.compiler.disable
def causal_conv_silu(
    x_BSC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None, seq_BS: Tensor | None = None
) -> Tensor:
    """
    Args:
        x_BSC (`Tensor`): may be a slice of wider rows.
        weight_CW, bias_C (`Tensor`): of any floating dtype.
        seq_BS (`int32` `Tensor`, *optional*): the number of the sequence that each position belongs to.

    Returns:
        `[B, S, C]` in x's dtype; sums are float32.
    """
    return _CausalConv.apply(x_BSC, weight_CW, bias_C, seq_BS)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, seq_BS: Tensor | None) -> Tensor:
        if x_BSC.stride(2) != 1:
            x_BSC = x_BSC.contiguous()
        y_BSC = torch.empty(x_BSC.shape, dtype=x_BSC.dtype, device=x_BSC.device)
        weight_CW = weight_CW.contiguous()
        _forward_kernel[_grid(x_BSC)](
            x_BSC, weight_CW, bias_C, seq_BS, y_BSC, *_sizes(x_BSC, weight_CW), **_BLOCK, num_warps=4, num_stages=1
        )
        ctx.save_for_backward(x_BSC, weight_CW, bias_C, seq_BS)
        return y_BSC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSC: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, weight_CW, bias_C, seq_BS = ctx.saved_tensors
        grid = _grid(x_BSC)
        dx_BSC = torch.empty(x_BSC.shape, dtype=x_BSC.dtype, device=x_BSC.device)
        (C, W), blocks = weight_CW.shape, grid[1] * grid[2]
        d_weight = torch.empty(blocks, W, C, dtype=torch.float32, device=x_BSC.device)
        d_bias = torch.empty(blocks, C, dtype=torch.float32, device=x_BSC.device)
        _backward_kernel[grid](
            x_BSC,
            weight_CW,
            bias_C,
            seq_BS,
            dy_BSC.contiguous(),
            dx_BSC,
            d_weight,
            d_bias,
            *_sizes(x_BSC, weight_CW),
            **_BLOCK,
            num_warps=4,
            num_stages=1,
        )
        d_bias_C = None if bias_C is None else d_bias.sum(0).to(bias_C.dtype)
        return dx_BSC, d_weight.sum(0).mT.to(weight_CW.dtype), d_bias_C, None


def _grid(x_BSC: Tensor) -> tuple[int, int, int]:
    B, S, C = x_BSC.shape
    return triton.cdiv(C, _BLOCK["BLOCK_C"]), triton.cdiv(S, _BLOCK["BLOCK_S"]), B


def _sizes(x_BSC: Tensor, weight_CW: Tensor) -> tuple[int, ...]:
    return x_BSC.stride(0), x_BSC.stride(1), x_BSC.shape[1], x_BSC.shape[2], weight_CW.shape[1]


@triton.jit
def _convolved(
    x_ptr,
    weight_ptr,
    bias_ptr,
    seq_ptr,
    stride_s,
    t,
    seq,
    channel,
    in_c,
    S,
    W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """z at positions t, of the sequences `seq`; t may lie past the end."""
    z = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + channel, mask=in_c, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        source = t - (W - 1) + w
        seen = (source >= 0) & (source < S)
        if seq_ptr is not None:
            seen = seen & (tl.load(seq_ptr + source, mask=seen, other=-1) == seq)
        x = tl.load(
            x_ptr + source[:, None] * stride_s + channel[None, :], mask=seen[:, None] & in_c[None, :], other=0.0
        )
        z += x.to(tl.float32) * tl.load(weight_ptr + channel * W + w, mask=in_c, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    seq_ptr,
    y_ptr,
    stride_b,
    stride_s,
    S,
    C,
    W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = channel < C
    seq = t
    if seq_ptr is not None:
        seq_ptr += b * S
        seq = tl.load(seq_ptr + t, mask=t < S, other=-2)
    x_ptr += b * stride_b
    z = _convolved(x_ptr, weight_ptr, bias_ptr, seq_ptr, stride_s, t, seq, channel, in_c, S, W, BLOCK_S, BLOCK_C)
    mask = (t < S)[:, None] & in_c[None, :]
    tl.store(y_ptr + (b * S + t[:, None]) * C + channel[None, :], z * tl.sigmoid(z), mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    seq_ptr,
    dy_ptr,
    dx_ptr,
    d_weight_ptr,
    d_bias_ptr,
    stride_b,
    stride_s,
    S,
    C,
    W: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    block = b * tl.num_programs(1) + tl.program_id(1)
    t = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = channel < C
    x_ptr += b * stride_b
    dy_ptr += b * S * C
    own = t
    if seq_ptr is not None:
        seq_ptr += b * S
        own = tl.load(seq_ptr + t, mask=t < S, other=-2)
    mask = (t < S)[:, None] & in_c[None, :]
    x = tl.load(x_ptr + t[:, None] * stride_s + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    dx = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    # Output t + ahead has input t under weight W - 1 - ahead.
    for ahead in tl.static_range(W):
        target = t + ahead
        reached = target < S
        seq = target
        if seq_ptr is not None:
            seq = tl.load(seq_ptr + target, mask=reached, other=-3)
            reached = reached & (seq == own)
        z = _convolved(
            x_ptr, weight_ptr, bias_ptr, seq_ptr, stride_s, target, seq, channel, in_c, S, W, BLOCK_S, BLOCK_C
        )
        gate = tl.sigmoid(z)
        mask = reached[:, None] & in_c[None, :]
        dy = tl.load(dy_ptr + target[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        dz = dy * gate * (1 + z * (1 - gate))
        weight = tl.load(weight_ptr + channel * W + (W - 1 - ahead), mask=in_c, other=0.0).to(tl.float32)
        dx += dz * weight[None, :]
        at_weight = d_weight_ptr + (block * W + (W - 1 - ahead)) * C + channel
        tl.store(at_weight, tl.sum(dz * x, 0), mask=in_c)
        if ahead == 0:
            tl.store(d_bias_ptr + block * C + channel, tl.sum(dz, 0), mask=in_c)
    tl.store(dx_ptr + (b * S + t[:, None]) * C + channel[None, :], dx, mask=(t < S)[:, None] & in_c[None, :])
