"""Experts on Hopper, by quack's grouped GEMMs: what can ride in a GEMM rides there.

    forward    h = x[row] @ W1ᵀ and a = act(h)                one GEMM: gathers x, writes both
               out = a @ W2ᵀ                                  one GEMM
               y = sum over k of weight * out[pos]            one pass
    backward   da = dy[row] @ W2, dh, weight * a, <a, da>     one GEMM: gathers dy, writes the last three
               dx = sum over k of (dh @ W1)[pos]              one GEMM, one pass
               dW2 = dy[row]ᵀ @ (weight * a)                  one GEMM: gathers dy
               dW1 = dhᵀ @ x[row]                             one GEMM: gathers x

The router's gradient is <a, da>: the weight scales the result, so its gradient is <out, dy> = <a @ W2ᵀ, dy>, and no
result has to be kept for it; x, h and the indices are all that is. No gathered copy of x or dy is ever made, nor is a
weight moved: quack reads gate and up as two halves (`concat_layout`) and keeps h with their columns interleaved.

Biases, transposed weights and interleaved gates are left to the triton backend: the models that have them also cut
their activation at a limit, which quack's GEMMs don't know.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..kernels.gather_sum import gather_dots, gather_sum
from ..kernels.pairs import Pairs, sort_pairs
from ..say import say_once
from . import compute_dtype
from . import torch as plain
from .gates import GLU, RELU2, SILU, Gate, known_gate

# quack's name of an activation, by (kind, alpha, beta, limit).
ACTIVATIONS = {
    (GLU, 1.0, 0.0, float("inf")): "swiglu",
    (SILU, 1.0, 0.0, float("inf")): "silu",
    (RELU2, 1.0, 0.0, float("inf")): "relu_sq",
}


def unsupported(experts: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend can't compute `experts` on `device` in `dtype`, or `None` if it can."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU (compute capability 9.0)"
    if dtype != torch.bfloat16:
        return "it computes in torch.bfloat16 alone"
    return _unsupported_layout(experts)


def _unsupported_layout(experts: Any) -> str | None:
    if experts.has_bias:
        return "it has no biases (has_bias)"
    if experts.is_transposed or not experts.is_concatenated:
        return (
            "it reads [E, 2I, H] weights with gate and up one after the other, not transposed (is_transposed) or "
            "interleaved (is_concatenated=False) ones"
        )
    if experts.has_post_expert_norm:
        return "it has no norm after the experts (has_post_expert_norm)"
    gate = known_gate(experts)
    if gate is None or _activation(gate) is None:
        return f"this module's activation ({gate or 'its own'}) is none of {', '.join(ACTIVATIONS.values())}"
    H, I = experts.down_proj.shape[1:]  # noqa: E741
    if H % 8 or I % 8:
        return f"rows must be multiples of 16 bytes: hidden size {H} and intermediate size {I} must be multiples of 8"
    return None


def _activation(gate: Gate) -> str | None:
    return ACTIVATIONS.get((gate.kind, gate.alpha, gate.beta, gate.limit))


# Under torch.compile quack takes another road, which knows no `config`; a graph break costs less.
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
    if reason := unsupported(experts, x_RH.device, dtype):
        raise ValueError(f"experts='quack' can't run {type(experts).__name__} on {x_RH.device} in {dtype}: {reason}.")
    up = (experts.gate_up_proj if experts.has_gate else experts.up_proj).to(dtype)
    down = experts.down_proj.to(dtype)
    gate = known_gate(experts)
    assert gate is not None  # `unsupported` has asked
    activation = _Activation(_activation(gate), gate.has_gate)
    if torch.is_grad_enabled():
        _build(activation, up, down)

    R = x_RH.shape[0]
    more = _round_up(R) - R
    if more:
        x_RH, weights_RK = (pad(tensor, (0, 0, 0, more)) for tensor in (x_RH, weights_RK))
        idx_RK = pad(idx_RK, (0, 0, 0, more), value=-1)
    rounded = None if n_pairs is None else min(_round_up(n_pairs), idx_RK.numel())
    pairs = replace(sort_pairs(idx_RK, up.shape[0], rounded), has_tail=n_pairs is None or rounded != n_pairs)
    keeps_h = keeps_h and torch.is_grad_enabled()
    y_RH = _Experts.apply(x_RH, up, down, weights_RK.float(), pairs, activation, keeps_h)
    return y_RH[:R] if more else y_RH


def _round_up(n: int) -> int:
    # quack keeps a launch plan for every exact shape it has met. Where the number of rows changes with each step, 16
    # shapes from one power of two to the next keep them few; no GEMM computes the rows that are added.
    step = max(256, (1 << n.bit_length()) // 32)
    return -(-n // step) * step


@dataclass(frozen=True)
class _Activation:
    """quack's name of it, and whether it has a gate: gate and up are then two halves of the up projection."""

    name: str | None
    gated: bool

    def concat(self, name: str) -> tuple[str, ...] | None:
        return (name,) if self.gated else None


_built: set[tuple] = set()


def _build(activation: _Activation, up: Tensor, down: Tensor) -> None:
    """
    Compile the kernels of both directions, on a few rows, when experts of these sizes are met for the first time: a
    first backward that stops to compile on one rank keeps the others waiting in the middle of a step. quack keeps what
    was compiled on disk, in `QUACK_CACHE_DIR`.
    """
    trained = up.requires_grad or down.requires_grad
    key = (activation, up.shape, up.dtype, up.device, trained)
    if key in _built:
        return
    say_once(f"experts='quack': preparing kernels for experts of {tuple(up.shape)}; 2 to 5 s each if not yet on disk")
    start = time.monotonic()
    # Not through autograd: inside a checkpointed layer it would keep what the layer's recompute then doesn't find.
    with torch.no_grad():
        x_RH = torch.zeros(256, up.shape[2], dtype=up.dtype, device=up.device)
        weights_RK = torch.zeros(256, 1, device=up.device)
        pairs = sort_pairs(torch.zeros_like(weights_RK, dtype=torch.int64), up.shape[0])
        h_NJ, _ = _forward(x_RH, up, down, pairs, activation, keeps_h=True)
        assert h_NJ is not None
        indices = pairs.slot_N, pairs.row_N, pairs.pos_RK, pairs.bounds
        _backward(x_RH, x_RH, up, down, weights_RK, h_NJ, *indices, activation, (True, trained, trained, True))
    _built.add(key)
    say_once(f"experts='quack': kernels ready after {time.monotonic() - start:.0f} s")


class _Experts(torch.autograd.Function):
    """J = 2I with a gate, else I. `h_NJ` holds gate and up interleaved."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        up_eJH: Tensor,
        down_eHI: Tensor,
        weights_RK: Tensor,
        pairs: Pairs,
        activation: _Activation,
        keeps_h: bool,
    ) -> Tensor:
        slot_N, row_N, pos_RK, bounds = pairs.slot_N, pairs.row_N, pairs.pos_RK, pairs.bounds
        ctx.x_dtype, ctx.activation = x_RH.dtype, activation
        x_RH = x_RH.to(up_eJH.dtype).contiguous()
        h_NJ, out_NH = _forward(x_RH, up_eJH, down_eHI, pairs, activation, keeps_h)
        needs_x = ctx.needs_input_grad[1] or not keeps_h
        ctx.save_for_backward(
            x_RH if needs_x else None, up_eJH, down_eHI, weights_RK, h_NJ, slot_N, row_N, pos_RK, bounds
        )
        return gather_sum(out_NH, pos_RK, weights_RK, dtype=ctx.x_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, up_eJH, down_eHI, weights_RK, h_NJ, slot_N, row_N, pos_RK, bounds = ctx.saved_tensors
        dy_RH = dy_RH.to(up_eJH.dtype).contiguous()
        if h_NJ is None:
            h_NJ, _ = _up(x_RH, up_eJH, row_N, bounds, ctx.activation, keeps_h=True)
        dx_RH, *grads = _backward(
            dy_RH, x_RH, up_eJH, down_eHI, weights_RK, h_NJ, slot_N, row_N, pos_RK, bounds,
            ctx.activation, ctx.needs_input_grad[:4], ctx.x_dtype,
        )  # fmt: skip
        return dx_RH, *grads, None, None, None


def _forward(
    x_RH: Tensor, up_eJH: Tensor, down_eHI: Tensor, pairs: Pairs, activation: _Activation, keeps_h: bool
) -> tuple[Tensor | None, Tensor]:
    """h where it is to be kept, and each pair's result, not yet weighted."""
    h_NJ, a_NI = _up(x_RH, up_eJH, pairs.row_N, pairs.bounds, activation, keeps_h)
    out_NH = a_NI.new_empty(a_NI.shape[0], x_RH.shape[1])
    _gemm("down", a_NI, down_eHI.mT, out_NH, cu_seqlens_m=pairs.bounds)
    return h_NJ, out_NH


def _backward(
    dy_RH: Tensor,
    x_RH: Tensor,
    up_eJH: Tensor,
    down_eHI: Tensor,
    weights_RK: Tensor,
    h_NJ: Tensor,
    slot_N: Tensor,
    row_N: Tensor,
    pos_RK: Tensor,
    bounds: Tensor,
    activation: _Activation,
    needs: tuple[bool, ...],
    x_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, up, down and weights, each where `needs` says so."""
    from quack.gemm_interface import gemm_dact

    needs_x, needs_up, needs_down, needs_weights = needs
    dx_RH = d_up_eJH = d_down_eHI = d_weights_RK = None
    dh_NJ, scaled_a_NI, dots_N = gemm_dact(
        dy_RH,
        down_eHI,
        h_NJ,
        activation=activation.name,
        colvec_scale=weights_RK.reshape(-1)[slot_N],
        colvec_reduce=True,
        cu_seqlens_m=bounds,
        A_idx=row_N,
        dynamic_scheduler=False,
        tuned=False,
        config=_config("d_act"),
    )
    if needs_weights:
        d_weights_RK = gather_dots(dots_N[None], pos_RK)
    # The row gradients come first: their [N, H] is gone again before the weights' gradients are there.
    if needs_x:
        dx_NH = dh_NJ.new_empty(dh_NJ.shape[0], dy_RH.shape[1])
        _gemm("dx", dh_NJ, up_eJH, dx_NH, cu_seqlens_m=bounds, concat=activation.concat("B"))
        dx_RH = gather_sum(dx_NH, pos_RK, dtype=x_dtype)
        del dx_NH
    if needs_down:
        d_down_eHI = torch.empty_like(down_eHI)
        _gemm("d_down", dy_RH.mT, scaled_a_NI, d_down_eHI, cu_seqlens_k=bounds, index_N=row_N)
    del scaled_a_NI
    if needs_up:
        d_up_eJH = torch.empty_like(up_eJH)
        out = d_up_eJH.mT
        _gemm("d_up", x_RH.mT, dh_NJ, out, cu_seqlens_k=bounds, index_N=row_N, concat=activation.concat("out"))
    return dx_RH, d_up_eJH, d_down_eHI, d_weights_RK


def _up(
    x_RH: Tensor, up_eJH: Tensor, row_N: Tensor, bounds: Tensor, activation: _Activation, keeps_h: bool
) -> tuple[Tensor | None, Tensor]:
    from quack.gemm_interface import gemm_act

    return gemm_act(
        x_RH,
        up_eJH.mT,
        activation=activation.name,
        cu_seqlens_m=bounds,
        A_idx=row_N,
        store_preact=keeps_h,
        concat_layout=activation.concat("B"),
        tuned=False,
        config=_config("act"),
    )


def _gemm(
    name: str,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    index_N: Tensor | None = None,
    concat: tuple[str, ...] | None = None,
) -> None:
    """`left @ right` of each expert into `out`; what quack's `gemm` calls, which itself takes no tiles."""
    from quack.gemm_interface import gemm_tuned

    gemm_tuned.fn(
        left,
        right,
        out,
        cu_seqlens_m=cu_seqlens_m,
        cu_seqlens_k=cu_seqlens_k,
        A_idx=index_N,
        concat_layout=concat,
        config=_config(name),
    )


@cache
def _config(name: str) -> Any:
    """
    Tiles of the six GEMMs, each the fastest of a sweep on an H200 (131,072 pairs, H 2048, I 768; benchmarks/LOG.md).
    The two that differ from quack's own choice, 128 x 192: the backward's first GEMM, whose epilogue holds h, da and
    both results (0.95 against 1.53 ms), and dW2, whose 768 columns three wide tiles cut evenly (0.67 against 0.82).

    One object for the whole process: quack finds a plan by its identity.
    """
    from quack.gemm_config import GemmConfig

    tiles = {"d_act": (128, 128, True), "d_down": (128, 256, False)}
    m, n, pingpong = tiles.get(name, (128, 192, True))
    return GemmConfig(tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=2, is_dynamic_persistent=False)
