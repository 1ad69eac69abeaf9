"""Experts in plain torch: every layout, every dtype, any device.

    sort pairs by expert -> gather x -> up|gate -> activation -> down -> (norm) -> weighted sum over k

bfloat16 on a GPU runs `torch.nn.functional.grouped_mm` and never waits for the device, and a known activation takes
one pass each way; everything else runs one GEMM an expert, for which the host must know how many rows each expert has.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from ..kernels.gather_sum import gather_rows, weighted_sum, zero_tail_
from ..kernels.pairs import Pairs, sort_pairs
from . import compute_dtype
from .again import computed_again
from .gates import known_gate


def unsupported(experts: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend can't compute `experts` on `device` in `dtype`, or `None` if it can."""
    return None if dtype.is_floating_point and dtype.itemsize > 1 else f"it has no arithmetic for {dtype}"


def forward(
    experts: Any,
    x_RH: Tensor,
    idx_RK: Tensor,
    weights_RK: Tensor,
    *,
    n_pairs: int | None = None,
    keeps_h: bool = True,
) -> Tensor:
    """The experts' weighted sum of each row; the contract is in [`automodel_moe.experts`]."""
    if not keeps_h and torch.is_grad_enabled():
        return computed_again(forward, experts, x_RH, idx_RK, weights_RK, n_pairs)
    dtype = compute_dtype(experts, x_RH.device)
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = (getattr(experts, name).to(dtype) for name in (up_name, "down_proj"))
    up_bias = down_bias = None
    if experts.has_bias:
        up_bias, down_bias = (getattr(experts, f"{name}_bias").to(dtype) for name in (up_name, "down_proj"))

    grouped = x_RH.shape[0] > 0 and all(_fits_grouped_mm(weight) for weight in (up, down))
    if n_pairs is None and not grouped:
        n_pairs = int((idx_RK >= 0).sum())
    pairs = sort_pairs(idx_RK, up.shape[0], n_pairs)
    grouped = grouped and pairs.row_N.shape[0] > 0
    ends = None if grouped else pairs.bounds.tolist()[1:]

    x_NH = gather_rows(x_RH, pairs, dtype)
    h_NI = _grouped_linear(x_NH, up, up_bias, pairs, ends, experts.is_transposed)
    h_NI = _activated(experts, h_NI)
    out_NH = _grouped_linear(h_NI.to(dtype), down, down_bias, pairs, ends, experts.is_transposed)
    if experts.has_post_expert_norm:
        out_NH = experts.post_expert_norm(out_NH)
    weights_RK = weights_RK.to(torch.promote_types(dtype, torch.float32))
    return weighted_sum(out_NH, weights_RK, pairs, dtype=x_RH.dtype)


def _activated(experts: Any, h_NJ: Tensor) -> Tensor:
    """The module's activation: in one pass each way where it is of a known family and Triton can have it."""
    gate = None
    # A compiler that is at work here fuses it by itself.
    if h_NJ.is_cuda and h_NJ.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling():
        gate = known_gate(experts)
    if gate is not None:
        from ..kernels.activation_triton import activate

        return activate(h_NJ, gate)
    return experts._apply_gate(h_NJ) if experts.has_gate else experts.act_fn(h_NJ)


def _fits_grouped_mm(weight: Tensor) -> bool:
    # Rows of both operands must start on 16-byte boundaries, in the weight's layout and in its transpose.
    return (
        weight.dtype == torch.bfloat16
        and weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
    )


def _grouped_linear(
    x_NA: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, ends: list[int] | None, is_transposed: bool
) -> Tensor:
    """`x @ weight[expert] + bias[expert]`, the weights [e, A, B] if `is_transposed`, else [e, B, A]."""
    return _GroupedLinear.apply(x_NA, weight, bias, pairs.bounds, ends, is_transposed, pairs.has_tail)


class _GroupedLinear(torch.autograd.Function):
    """
    One linear layer an expert, on rows sorted by expert.

    `ends` holds `bounds[1:]` on the host for the loop of GEMMs, or is None for `grouped_mm`. That leaves the rows past
    the last expert unwritten, in the result and in the input's gradient alike; they are zeroed here, so that
    activations and norms with parameters of their own never sum what was in memory there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NA: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bounds: Tensor,
        ends: list[int] | None,
        is_transposed: bool,
        has_tail: bool,
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_NA if needs_dw else None, weight if needs_dx else None, bounds)
        ctx.ends, ctx.is_transposed, ctx.has_tail = ends, is_transposed, has_tail
        weight_eAB = weight if is_transposed else weight.transpose(1, 2)
        if ends is None:
            y_NB = _rows_grouped(x_NA, weight_eAB, bounds, has_tail)
            if bias is not None:
                expert_N = _expert_of_row(bounds, x_NA.shape[0])
                y_NB += bias[expert_N]
            return y_NB
        return _rows_loop(x_NA, weight_eAB, bias, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NB: Tensor) -> tuple[Tensor | None, ...]:
        x_NA, weight, bounds = ctx.saved_tensors
        dy_NB = dy_NB.contiguous()
        dx_NA = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            weight_eBA = weight.transpose(1, 2) if ctx.is_transposed else weight
            if ctx.ends is None:
                dx_NA = _rows_grouped(dy_NB, weight_eBA, bounds, ctx.has_tail)
            else:
                dx_NA = _rows_loop(dy_NB, weight_eBA, None, ctx.ends)
        if ctx.needs_input_grad[1]:
            left_N, right_N = (x_NA, dy_NB) if ctx.is_transposed else (dy_NB, x_NA)
            if ctx.ends is None:
                d_weight = grouped_mm(left_N.t(), right_N, offs=bounds[1:])
            else:
                d_weight = _products_loop(left_N, right_N, ctx.ends)
        if ctx.needs_input_grad[2]:
            if ctx.ends is None:
                # A GEMM with ones sums each expert's rows in float32, in a fixed order and without the tail. Eight
                # of them: rows of 16 bytes.
                ones_N8 = dy_NB.new_ones(dy_NB.shape[0], 8)
                d_bias = grouped_mm(ones_N8.t(), dy_NB, offs=bounds[1:])[:, 0]
            else:
                d_bias = _sums_loop(dy_NB, ctx.ends)
        return dx_NA, d_weight, d_bias, None, None, None, None


def _rows_grouped(x_NA: Tensor, weight_eAB: Tensor, bounds: Tensor, has_tail: bool) -> Tensor:
    y_NB = grouped_mm(x_NA, weight_eAB, offs=bounds[1:])
    return zero_tail_(y_NB, bounds) if has_tail else y_NB


def _expert_of_row(bounds: Tensor, n_rows: int) -> Tensor:
    place_N = torch.arange(n_rows, device=bounds.device, dtype=bounds.dtype)
    # The tail would count as one expert more; it may take any bias, nothing reads it.
    return torch.searchsorted(bounds[1:], place_N, right=True).clamp_(max=bounds.shape[0] - 2)


def _rows_loop(x_NA: Tensor, weight_eAB: Tensor, bias_eB: Tensor | None, ends: list[int]) -> Tensor:
    y_NB = x_NA.new_empty(x_NA.shape[0], weight_eAB.shape[2])
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if start == end:
            continue
        if bias_eB is None:
            torch.mm(x_NA[start:end], weight_eAB[expert], out=y_NB[start:end])
        else:
            torch.addmm(bias_eB[expert], x_NA[start:end], weight_eAB[expert], out=y_NB[start:end])
    return y_NB


def _products_loop(left_NA: Tensor, right_NB: Tensor, ends: list[int]) -> Tensor:
    product_eAB = left_NA.new_zeros(len(ends), left_NA.shape[1], right_NB.shape[1])
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            torch.mm(left_NA[start:end].t(), right_NB[start:end], out=product_eAB[expert])
    return product_eAB


def _sums_loop(x_NB: Tensor, ends: list[int]) -> Tensor:
    sum_dtype = torch.promote_types(x_NB.dtype, torch.float32)
    starts = [0, *ends[:-1]]
    sums = [x_NB[start:end].sum(dim=0, dtype=sum_dtype) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(sums).to(x_NB.dtype)
