"""SwiGLU experts on Hopper, by quack's grouped GEMMs: what can ride in a GEMM rides there.

    forward    h = x[row] @ W1ᵀ and a = silu(gate) * up      one GEMM: gathers x, writes both
               out = a @ W2ᵀ                                  one GEMM
               y = sum over k of weight * out[pos]            one pass
    backward   da = dy[row] @ W2, dh, weight * a, <a, da>     one GEMM: gathers dy, writes the last three
               dW2 = dy[row]ᵀ @ (weight * a)                  one GEMM: gathers dy
               dx = sum over k of (dh @ W1)[pos]              one GEMM, one pass
               dW1 = dhᵀ @ x[row]                             one GEMM: gathers x

The router's gradient is <a, da>: the weight scales the result, so its gradient is <out, dy> = <a @ W2ᵀ, dy>, and no
result has to be kept for it; x, h and the indices are all that is. No gathered copy of x or dy is ever made, nor is a
weight moved: quack reads gate and up as two halves (`concat_layout`) and keeps h with their columns interleaved.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from ..kernels.gather_sum import gather_sum
from ..kernels.pairs import Pairs, sort_pairs
from . import compute_dtype
from . import torch as plain


def unsupported(experts: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend can't compute `experts` on `device` in `dtype`, or `None` if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU (compute capability 9.0)"
    if dtype != torch.bfloat16:
        return "it computes in torch.bfloat16 alone"
    return _unsupported_layout(experts)


def _unsupported_layout(experts: Any) -> str | None:
    if not experts.has_gate:
        return "it has no experts without a gate"
    if experts.has_bias:
        return "it has no biases"
    if experts.is_transposed or not experts.is_concatenated:
        return "it reads [E, 2I, H] weights with gate and up one after the other, not transposed or interleaved ones"
    if experts.has_post_expert_norm:
        return "it has no norm after the experts"
    if type(experts)._apply_gate is not _default_apply_gate or not isinstance(
        experts.act_fn, (nn.SiLU, SiLUActivation)
    ):
        return "its gate is silu(gate) * up, and this module has another"
    H, I = experts.down_proj.shape[1:]  # noqa: E741
    if H % 8 or I % 8:
        return f"rows must be multiples of 16 bytes: hidden size {H} and intermediate size {I} must be multiples of 8"
    return None


# Under torch.compile quack takes another road, which knows no `config`; a graph break costs less.
@torch.compiler.disable
def forward(experts: Any, x_RH: Tensor, idx_RK: Tensor, weights_RK: Tensor, *, n_pairs: int | None = None) -> Tensor:
    """The experts' weighted sum of each row; the contract is in [`automodel_moe.experts`]."""
    if idx_RK.numel() == 0 or n_pairs == 0:
        # Nothing to compute: only the zero gradients are wanted, and a GEMM without rows is no GEMM.
        return plain.forward(experts, x_RH, idx_RK, weights_RK, n_pairs=0)
    dtype = compute_dtype(experts, x_RH.device)
    if reason := unsupported(experts, x_RH.device, dtype):
        raise ValueError(f"experts='quack' can't run {type(experts).__name__} on {x_RH.device} in {dtype}: {reason}.")
    up_eJH, down_eHI = experts.gate_up_proj.to(dtype), experts.down_proj.to(dtype)
    R = x_RH.shape[0]
    if more := _round_up(R) - R:
        x_RH, weights_RK = (pad(tensor, (0, 0, 0, more)) for tensor in (x_RH, weights_RK))
        idx_RK = pad(idx_RK, (0, 0, 0, more), value=-1)
    if n_pairs is not None:
        n_pairs = min(_round_up(n_pairs), idx_RK.numel())
    pairs = sort_pairs(idx_RK, up_eJH.shape[0], n_pairs)
    y_RH = _SwiGLUExperts.apply(x_RH, up_eJH, down_eHI, weights_RK.float(), pairs, torch.is_grad_enabled())
    return y_RH[:R]


def _round_up(n: int) -> int:
    # quack keeps a launch plan for every exact shape it has met. Where the number of rows changes with each step, 16
    # shapes from one power of two to the next keep them few; no GEMM computes the rows that are added.
    step = max(256, (1 << n.bit_length()) // 32)
    return -(-n // step) * step


class _SwiGLUExperts(torch.autograd.Function):
    """J = 2I: gate and up. `h_NJ` holds them interleaved."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        up_eJH: Tensor,
        down_eHI: Tensor,
        weights_RK: Tensor,
        pairs: Pairs,
        keep_h: bool,
    ) -> Tensor:
        from quack.gemm_interface import gemm, gemm_gated

        slot_N, row_N, pos_RK, bounds = pairs.slot_N, pairs.row_N, pairs.pos_RK, pairs.bounds
        ctx.x_dtype = x_RH.dtype
        x_RH = x_RH.to(up_eJH.dtype).contiguous()
        h_NJ, a_NI = gemm_gated(
            x_RH,
            up_eJH.mT,
            activation="swiglu",
            cu_seqlens_m=bounds,
            A_idx=row_N,
            store_preact=keep_h,
            concat_layout=("B",),
            tuned=False,
        )
        out_NH = gemm(a_NI, down_eHI.mT, cu_seqlens_m=bounds, tuned=False)
        ctx.save_for_backward(x_RH, up_eJH, down_eHI, weights_RK, h_NJ, slot_N, row_N, pos_RK, bounds)
        return gather_sum(out_NH, pos_RK, weights_RK, dtype=ctx.x_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        from quack.gemm_interface import gemm, gemm_dgated

        x_RH, up_eJH, down_eHI, weights_RK, h_NJ, slot_N, row_N, pos_RK, bounds = ctx.saved_tensors
        needs_x, needs_up, needs_down, needs_weights = ctx.needs_input_grad[:4]
        dy_RH = dy_RH.to(up_eJH.dtype).contiguous()
        dx_RH = d_up_eJH = d_down_eHI = d_weights_RK = None

        dh_NJ, scaled_a_NI, dots_N = gemm_dgated(
            dy_RH,
            down_eHI,
            h_NJ,
            activation="swiglu",
            colvec_scale=weights_RK.reshape(-1)[slot_N],
            colvec_reduce=True,
            cu_seqlens_m=bounds,
            A_idx=row_N,
            dynamic_scheduler=False,
            tuned=False,
            config=_dgated_config(),
        )
        if needs_weights:
            d_weights_RK = dots_N[pos_RK.clamp(min=0)].masked_fill_(pos_RK < 0, 0)
        # The row gradients come first: their [N, H] is gone again before the weights' gradients are there.
        if needs_x:
            dx_NH = gemm(dh_NJ, up_eJH, cu_seqlens_m=bounds, concat_layout=("B",), tuned=False)
            dx_RH = gather_sum(dx_NH, pos_RK, dtype=ctx.x_dtype)
            del dx_NH
        if needs_down:
            d_down_eHI = gemm(dy_RH.mT, scaled_a_NI, cu_seqlens_k=bounds, A_idx=row_N, tuned=False)
        del scaled_a_NI
        if needs_up:
            d_up_eJH = torch.empty_like(up_eJH)
            gemm(
                x_RH.mT,
                dh_NJ,
                out=d_up_eJH.mT,
                cu_seqlens_k=bounds,
                A_idx=row_N,
                concat_layout=("out",),
                tuned=False,
            )
        return dx_RH, d_up_eJH, d_down_eHI, d_weights_RK, None, None


@cache
def _dgated_config() -> Any:
    """
    Tiles for the backward's first GEMM, whose epilogue holds h, da and both results: with quack's own choice, 128 x
    192, it takes half as long again (1.48-1.57 against 1.02-1.08 ms for 131,072 pairs, H 2048, I 768 on an H200).

    One object for the whole process: quack finds a plan by its identity.
    """
    from quack.gemm_config import GemmConfig

    return GemmConfig(tile_m=128, tile_n=128, pingpong=True, cluster_m=2, is_dynamic_persistent=False)
