"""Move rows to their (row, slot) pairs and sum the pairs' results back, in float32 and without atomics.

Both directions read through an index of their own (`row_N` out, `pos_RK` back), so that each output element is written
by one sum in a fixed order: an `index_add_` with repeated rows is neither deterministic on a GPU nor, in bfloat16,
accurate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .pairs import Pairs


def gather_rows(x_RH: Tensor, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """
    `x_RH[pairs.row_N]` in `dtype`, differentiable; [N, H]. The tail holds rows that nothing may read.

    The gradient of a row is the sum over its live slots, in float32 and in the order of k, given in x's dtype.
    """
    return _GatherRows.apply(x_RH, pairs.row_N, pairs.pos_RK, dtype)


def weighted_sum(out_NH: Tensor, weights_RK: Tensor, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """
    `y[r] = sum over live k of weights[r, k] * out[pos[r, k]]`, differentiable; [R, H] in `dtype`, summed in float32.

    Args:
        out_NH (`Tensor`): the experts' results, in the order of `pairs`.
        weights_RK (`float32` `Tensor`): routing weights. Where a slot routes nowhere the gradient is 0.
        pairs ([`Pairs`]): the order.
        dtype (`torch.dtype`): of the result.
    """
    return _WeightedSum.apply(out_NH, weights_RK, pairs, dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, row_N: Tensor, pos_RK: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(pos_RK)
        ctx.x_dtype = x_RH.dtype
        return x_RH.to(dtype)[row_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NH: Tensor) -> tuple[Tensor | None, ...]:
        (pos_RK,) = ctx.saved_tensors
        return gather_sum(d_NH, pos_RK, dtype=ctx.x_dtype), None, None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_NH: Tensor, weights_RK: Tensor, pairs: Pairs, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(out_NH, weights_RK, pairs.slot_N, pairs.pos_RK, pairs.bounds)
        ctx.has_tail = pairs.has_tail
        return gather_sum(out_NH, pairs.pos_RK, weights_RK, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        out_NH, weights_RK, slot_N, pos_RK, bounds = ctx.saved_tensors
        d_out_NH, d_weights_RK = spread(dy_RH, out_NH, weights_RK, slot_N, pos_RK)
        if ctx.has_tail:
            zero_tail_(d_out_NH, bounds)
        return d_out_NH, d_weights_RK, None, None


def gather_sum(src_NH: Tensor, pos_RK: Tensor, weights_RK: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """
    `sum over k of weights[r, k] * src[pos[r, k]]`, [R, H] in `dtype`, summed in float32 and in the order of k.

    A `pos` of -1 adds nothing, whatever is in memory. Without weights each counts 1.
    """
    if src_NH.is_cuda:
        from .gather_sum_triton import gather_sum as kernel

        return kernel(src_NH, pos_RK, weights_RK, dtype=dtype)
    return gather_sum_reference(src_NH, pos_RK, weights_RK, dtype=dtype)


def spread(dy_RH: Tensor, src_NH: Tensor, weights_RK: Tensor, slot_N: Tensor, pos_RK: Tensor) -> tuple[Tensor, Tensor]:
    """
    The gradients of [`gather_sum`]: `d_src[pos[r, k]] = weights[r, k] * dy[r]`, [N, H] in src's dtype, and
    `d_weights[r, k] = dot(src[pos[r, k]], dy[r])`, [R, K] in the weights' dtype, 0 where `pos` is -1.

    `d_src` past the last live pair holds nothing of meaning.
    """
    if src_NH.is_cuda:
        from .gather_sum_triton import spread as kernel

        return kernel(dy_RH, src_NH, weights_RK, pos_RK)
    return spread_reference(dy_RH, src_NH, weights_RK, slot_N, pos_RK)


def gather_dots(dots_PN: Tensor, pos_RK: Tensor) -> Tensor:
    """`sum over p of dots[p, pos[r, k]]`, [R, K], summed in the order of p; 0 where `pos` is -1, whatever is there."""
    if dots_PN.is_cuda:
        from .gather_sum_triton import gather_dots as kernel

        return kernel(dots_PN, pos_RK)
    return gather_dots_reference(dots_PN, pos_RK)


def zero_tail_(x_NH: Tensor, bounds: Tensor) -> Tensor:
    """Zero the rows past the last live pair, in place. By selection: 0 times uninitialised memory may be NaN."""
    if x_NH.is_cuda:
        from .gather_sum_triton import zero_tail_ as kernel

        return kernel(x_NH, bounds)
    return zero_tail_reference_(x_NH, bounds)


def gather_sum_reference(
    src_NH: Tensor, pos_RK: Tensor, weights_RK: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """[`gather_sum`] in plain torch."""
    sum_dtype = torch.promote_types(src_NH.dtype, torch.float32)
    y_RH = src_NH.new_zeros(pos_RK.shape[0], src_NH.shape[1], dtype=sum_dtype)
    if src_NH.shape[0] == 0:
        return y_RH.to(dtype)
    for k in range(pos_RK.shape[1]):
        row_RH = src_NH[pos_RK[:, k].clamp(min=0)].to(sum_dtype)
        if weights_RK is not None:
            row_RH = row_RH * weights_RK[:, k, None]
        y_RH += row_RH.masked_fill(pos_RK[:, k, None] < 0, 0)
    return y_RH.to(dtype)


def spread_reference(
    dy_RH: Tensor, src_NH: Tensor, weights_RK: Tensor, slot_N: Tensor, pos_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """[`spread`] in plain torch."""
    sum_dtype = torch.promote_types(src_NH.dtype, torch.float32)
    R, K = pos_RK.shape
    dy_RH = dy_RH.to(sum_dtype)
    d_src_NH = (dy_RH[slot_N // K] * weights_RK.reshape(-1)[slot_N, None]).to(src_NH.dtype)
    d_weights_RK = weights_RK.new_zeros(R, K)
    if src_NH.shape[0] > 0:
        for k in range(K):
            row_RH = src_NH[pos_RK[:, k].clamp(min=0)].to(sum_dtype)
            d_weights_RK[:, k] = (row_RH * dy_RH).sum(dim=1)
    return d_src_NH, d_weights_RK.masked_fill_(pos_RK < 0, 0)


def gather_dots_reference(dots_PN: Tensor, pos_RK: Tensor) -> Tensor:
    """[`gather_dots`] in plain torch."""
    total_RK = dots_PN.new_zeros(pos_RK.shape)
    for dots_N in dots_PN:
        total_RK += dots_N[pos_RK.clamp(min=0)]
    return total_RK.masked_fill_(pos_RK < 0, 0)


def zero_tail_reference_(x_NH: Tensor, bounds: Tensor) -> Tensor:
    """[`zero_tail_`] in plain torch."""
    place_N = torch.arange(x_NH.shape[0], device=x_NH.device)
    return x_NH.masked_fill_((place_N >= bounds[-1])[:, None], 0)
