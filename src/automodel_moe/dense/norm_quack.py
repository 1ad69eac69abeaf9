"""RMSNorm by quack: one pass forward, one backward that sums the weight's gradient in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from . import needs_hopper


def unsupported(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it is for bfloat16, float16 and float32, not {dtype}"
    if width % 8:
        return f"a width of {width} is no multiple of 8"
    return needs_hopper(device)


def run(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    """See [`automodel_moe.dense.norm`]."""
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight_D, eps=eps, weight_offset=offset)
