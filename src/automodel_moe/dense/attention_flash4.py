"""FlashAttention 4 (package flash-attn-4): windows and sinks, and no compiler to install it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import needs_hopper


def unsupported(device: torch.device, dtype: torch.dtype, *head_sizes: int) -> str | None:
    """`head_sizes`: of q and k, and of v, where they are known."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is for bfloat16 and float16, not {dtype}"
    if any(size % 8 or not 8 <= size <= 256 for size in head_sizes):
        return f"head sizes {head_sizes} are no multiples of 8 up to 256"
    if reason := needs_hopper(device):
        return reason
    if head_sizes and max(head_sizes) > 128 and torch.cuda.get_device_capability(device) != (9, 0):
        return f"head sizes {head_sizes} are for Hopper alone"
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bounds: Tensor | None,
) -> Tensor:
    """See [`automodel_moe.dense.attention`]."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    B, S, N, _ = q.shape
    options = {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (None, None) if window is None or window >= S else (window - 1, 0),
        "softcap": softcap or 0.0,
        "learnable_sink": None if sinks is None else sinks.to(q.dtype),
    }
    if bounds is None:
        out, *_ = flash_attn_func(q, k, v, **options)
        return out
    tokens = (t.reshape(B * S, *t.shape[2:]) for t in (q, k, v))
    out, *_ = flash_attn_varlen_func(
        *tokens, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=S, max_seqlen_k=S, **options
    )
    return out.view(B, S, N, v.shape[-1])
