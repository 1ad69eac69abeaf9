"""Rotary embeddings in one Triton kernel for q and k: each element is read and written once, in any layout.

The sums are float32 and rounded once, where torch's three operations round in the tensors' dtype three times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def unsupported(device: torch.device, dtype: torch.dtype, head_size: int, width: int) -> str | None:
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it is for bfloat16, float16 and float32, not {dtype}"
    return None if width <= head_size and width % 2 == 0 else f"it can't rotate {width} of {head_size} columns"


def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """See [`automodel_moe.dense.rotary`]. `half`: cos and sin hold one entry for both halves of what is rotated."""
    return _Rotary.apply(q, k, cos, sin, half)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.half = half
        return _launch(q, k, cos, sin, half, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_launch(dq, dk, cos, sin, ctx.half, backward=True), None, None, None


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: bool, backward: bool) -> tuple[Tensor, Tensor]:
    from ..kernels.rotary_triton import rotate

    return rotate(q, k, cos, sin, shared_table=half, backward=backward)
