"""Experts in our own Triton kernels: Ampere and newer, bfloat16 and float16, every layout.

    forward    h = x[row] @ W1 + b1 and a = act(h)             one GEMM: gathers x, writes both
               out = a @ W2 + b2                               one GEMM
               y = sum over k of weight * out[pos]             one pass
    backward   da = dy[row] @ W2ᵀ, dh, weight * a, <a, da>     one GEMM: gathers dy, writes the last three
               dx = sum over k of (dh @ W1ᵀ)[pos]              one GEMM, one pass
               dW2 = dy[row]ᵀ @ (weight * a)                   one GEMM: gathers dy
               dW1 = dhᵀ @ x[row]                              one GEMM: gathers x

The router's gradient is <out, dy> = <a, da> + <b2, dy>, so no result has to be kept for it; x, h and the indices are
all that is. An activation of no known family, or a norm after the experts, is called as it is between two GEMMs: then
h, the activation's own tensors and the results are kept, as autograd has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.biases import bias_dots, rows_sum
from ..kernels.gather_sum import gather_dots, gather_sum, weighted_sum, zero_tail_
from ..kernels.pairs import Pairs, sort_pairs
from . import compute_dtype
from . import torch as plain
from .again import computed_again
from .gates import Gate, known_gate


def unsupported(experts: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend can't compute `experts` on `device` in `dtype`, or `None` if it can."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Nvidia GPU of compute capability 8.0 or newer"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in torch.bfloat16 and torch.float16"
    return None


# Tensor maps and the search for a known activation are the host's work; a graph break costs less than tracing them.
@torch.compiler.disable
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
    if idx_RK.numel() == 0 or n_pairs == 0:
        # Nothing to compute: only the zero gradients are wanted, and a GEMM without rows is no GEMM.
        return plain.forward(experts, x_RH, idx_RK, weights_RK, n_pairs=0)
    dtype = compute_dtype(experts, x_RH.device)
    gate = None if experts.has_post_expert_norm else known_gate(experts)
    if gate is None and not keeps_h and torch.is_grad_enabled():
        return computed_again(forward, experts, x_RH, idx_RK, weights_RK, n_pairs)
    if reason := unsupported(experts, x_RH.device, dtype):
        raise ValueError(f"experts='triton' can't run {type(experts).__name__} on {x_RH.device} in {dtype}: {reason}.")
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = getattr(experts, up_name), experts.down_proj
    up_bias = down_bias = None
    if experts.has_bias:
        up_bias, down_bias = getattr(experts, f"{up_name}_bias"), experts.down_proj_bias
    pairs = sort_pairs(idx_RK, up.shape[0], n_pairs)
    weights_RK = weights_RK.float()
    if gate is not None:
        graph = _Graph(gate, experts.is_transposed, dtype, keeps_h and torch.is_grad_enabled(), pairs)
        return _Experts.apply(x_RH, up, down, up_bias, down_bias, weights_RK, idx_RK, graph)
    h_NJ = _Linear.apply(x_RH, up, up_bias, pairs, dtype, experts.is_transposed, True)
    a_NI = experts._apply_gate(h_NJ) if experts.has_gate else experts.act_fn(h_NJ)
    out_NH = _Linear.apply(a_NI, down, down_bias, pairs, dtype, experts.is_transposed, False)
    if experts.has_post_expert_norm:
        out_NH = experts.post_expert_norm(out_NH)
    return weighted_sum(out_NH, weights_RK, pairs, dtype=x_RH.dtype)


@dataclass(frozen=True)
class _Graph:
    """What a call's two directions share that is no tensor of autograd's."""

    gate: Gate
    transposed: bool
    dtype: torch.dtype
    keeps_h: bool
    pairs: Pairs


class _Experts(torch.autograd.Function):
    """
    The whole of an experts layer whose activation is known. J = 2I with a gate, else I.

    Parameters come in their own dtype and get gradients in it: what a GEMM summed in float32 is rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        weights_RK: Tensor,
        idx_RK: Tensor,
        graph: _Graph,
    ) -> Tensor:
        from ..kernels import grouped_gemm_triton as kernels

        pairs, transposed = graph.pairs, graph.transposed
        ctx.gate, ctx.transposed, ctx.dtype, ctx.x_dtype = graph.gate, transposed, graph.dtype, x_RH.dtype
        ctx.grad_dtypes = up.dtype, down.dtype
        x_RH, up, down = (tensor.to(graph.dtype).contiguous() for tensor in (x_RH, up, down))
        N, blocks = pairs.row_N.shape[0], kernels.blocks_for(x_RH.device)
        h_NJ, a_NI = kernels.act_gemm(
            x_RH, up, kernels.row_tiles(pairs.bounds, N, blocks["act"].m), pairs.row_N, blocks["act"],
            gate=graph.gate, transposed=transposed, bias=up_bias, stores_h=graph.keeps_h,
        )  # fmt: skip
        tiles = kernels.row_tiles(pairs.bounds, N, blocks["down"].m)
        out_NH = kernels.rows_gemm(a_NI, down, tiles, N, blocks["down"], transposed=transposed, bias=down_bias)
        needs_x = ctx.needs_input_grad[1] or not graph.keeps_h
        ctx.save_for_backward(
            x_RH if needs_x else None, up, down, up_bias, down_bias, weights_RK, idx_RK, h_NJ,
            pairs.slot_N, pairs.row_N, pairs.pos_RK, pairs.bounds,
        )  # fmt: skip
        return gather_sum(out_NH, pairs.pos_RK, weights_RK, dtype=ctx.x_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        from ..kernels import grouped_gemm_triton as kernels

        x_RH, up, down, up_bias, down_bias, weights_RK, idx_RK, h_NJ, slot_N, row_N, pos_RK, bounds = ctx.saved_tensors
        needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_weights = ctx.needs_input_grad[:6]
        gate, transposed = ctx.gate, ctx.transposed
        dy_RH = dy_RH.to(ctx.dtype).contiguous()
        N, blocks = row_N.shape[0], kernels.blocks_for(dy_RH.device)
        dx_RH = d_up = d_down = d_up_bias = d_down_bias = d_weights_RK = None

        if h_NJ is None:
            tiles = kernels.row_tiles(bounds, N, blocks["act"].m)
            h_NJ, _ = kernels.act_gemm(
                x_RH, up, tiles, row_N, blocks["act"],
                gate=gate, transposed=transposed, bias=up_bias, stores_h=True,
            )  # fmt: skip
        tiles = kernels.row_tiles(bounds, N, blocks["d_act"].m)
        dh_NJ, scaled_a_NI, dots = kernels.d_act_gemm(
            dy_RH, down, h_NJ, weights_RK, tiles, row_N, slot_N, blocks["d_act"],
            gate=gate, transposed=transposed, stores_act=needs_down,
        )  # fmt: skip
        del h_NJ
        if needs_weights:
            d_weights_RK = gather_dots(dots, pos_RK)
            if down_bias is not None:
                d_weights_RK += bias_dots(dy_RH, down_bias, idx_RK)
        # The row gradients come first: their [N, H] is gone again before the weights' gradients are there.
        if needs_x:
            tiles = kernels.row_tiles(bounds, N, blocks["dx"].m)
            dx_NH = kernels.rows_gemm(dh_NJ, up, tiles, N, blocks["dx"], transposed=not transposed)
            dx_RH = gather_sum(dx_NH, pos_RK, dtype=ctx.x_dtype)
            del dx_NH
        if scaled_a_NI is not None:
            d_down = _weight_grad(dy_RH, scaled_a_NI, bounds, row_N, blocks["d_down"], transposed, ctx.grad_dtypes[1])
        del scaled_a_NI
        if needs_down_bias:
            d_down_bias = rows_sum(dy_RH, bounds, row_N, slot_N, weights_RK, dtype=down_bias.dtype)
        if needs_up:
            d_up = _weight_grad(x_RH, dh_NJ, bounds, row_N, blocks["d_up"], not transposed, ctx.grad_dtypes[0])
        if needs_up_bias:
            d_up_bias = rows_sum(dh_NJ, bounds, dtype=up_bias.dtype)
        return dx_RH, d_up, d_down, d_up_bias, d_down_bias, d_weights_RK, None, None


def _weight_grad(
    gathered: Tensor,
    other: Tensor,
    bounds: Tensor,
    row_N: Tensor,
    blocks: Any,
    gathered_last: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`gathered[row]ᵀ @ other` of each expert, or its transpose: whichever the weight's layout is."""
    from ..kernels.grouped_gemm_triton import weight_gemm

    if gathered_last:
        return weight_gemm(other, gathered, bounds, row_N, blocks, gathers="right", dtype=dtype)
    return weight_gemm(gathered, other, bounds, row_N, blocks, gathers="left", dtype=dtype)


class _Linear(torch.autograd.Function):
    """One linear layer an expert on sorted rows, gathered from x where `gathers`; rows past the last pair are zeros,
    so that activations and norms with parameters of their own never sum what was in memory there."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pairs: Pairs,
        dtype: torch.dtype,
        transposed: bool,
        gathers: bool,
    ) -> Tensor:
        from ..kernels import grouped_gemm_triton as kernels

        ctx.pairs, ctx.transposed, ctx.gathers = pairs, transposed, gathers
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, weight = x.to(dtype).contiguous(), weight.to(dtype).contiguous()
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        N, blocks = pairs.row_N.shape[0], kernels.blocks_for(x.device)["up" if gathers else "down"]
        tiles, index_N = kernels.row_tiles(pairs.bounds, N, blocks.m), pairs.row_N if gathers else None
        y_NB = kernels.rows_gemm(x, weight, tiles, N, blocks, transposed=transposed, index_N=index_N, bias=bias)
        return zero_tail_(y_NB, pairs.bounds) if pairs.has_tail else y_NB

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NB: Tensor) -> tuple[Tensor | None, ...]:
        from ..kernels import grouped_gemm_triton as kernels

        (x, weight), pairs, transposed = ctx.saved_tensors, ctx.pairs, ctx.transposed
        dy_NB, blocks = dy_NB.contiguous(), kernels.blocks_for(dy_NB.device)
        dx = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            N = dy_NB.shape[0]
            tiles = kernels.row_tiles(pairs.bounds, N, blocks["dx"].m)
            dx = kernels.rows_gemm(dy_NB, weight, tiles, N, blocks["dx"], transposed=not transposed)
            if ctx.gathers:
                dx = gather_sum(dx, pairs.pos_RK, dtype=ctx.dtypes[0])
            elif pairs.has_tail:
                zero_tail_(dx, pairs.bounds)
        if ctx.needs_input_grad[1]:
            if ctx.gathers:
                d_weight = _weight_grad(
                    x, dy_NB, pairs.bounds, pairs.row_N, blocks["d_up"], not transposed, ctx.dtypes[1]
                )
            else:
                left, right = (x, dy_NB) if transposed else (dy_NB, x)
                d_weight = kernels.weight_gemm(
                    left, right, pairs.bounds, pairs.row_N, blocks["d_down"], gathers="", dtype=ctx.dtypes[1]
                )
        if ctx.needs_input_grad[2]:
            d_bias = rows_sum(dy_NB, pairs.bounds, dtype=ctx.dtypes[2])
        return dx, d_weight, d_bias, None, None, None, None
