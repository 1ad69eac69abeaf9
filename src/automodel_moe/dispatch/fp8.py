"""Rows in eight bits: e4m3 numbers with one float32 scale for each 128 columns of a row, as in the DeepSeek-V3 report
(arXiv 2412.19437, section 3.3.2). A row of H numbers takes about H * 1.03 bytes, half of what bfloat16 takes.

A number is off by at most 1/16 of itself, or, where it is tiny beside the largest of its 128, by 2^-19 of that one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

DTYPE = torch.float8_e4m3fn
COLUMNS = 128  # that share a scale
_LARGEST = torch.finfo(DTYPE).max


def pack(x_RH: torch.Tensor) -> torch.Tensor:
    """Rows of any float dtype as bytes, `uint8` `[R, 4 * ceil(H / 128) + H]`: the scales, then the numbers."""
    hidden = x_RH.size(1)
    blocks_RBC = F.pad(x_RH.float(), (0, -hidden % COLUMNS)).unflatten(1, (-1, COLUMNS))
    # Of zeros the scale is free; a not-finite number makes its whole block NaN, which the loss then shows.
    scale_RB1 = (blocks_RBC.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    numbers_RH = (blocks_RBC / scale_RB1).to(DTYPE).flatten(1)[:, :hidden]
    return torch.cat([scale_RB1.squeeze(-1).view(torch.uint8), numbers_RH.view(torch.uint8)], dim=1)


def unpack(bytes_RB: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """What `pack` made of rows of width `hidden`, in `dtype`."""
    # Copies: of no row, or of one, `contiguous` would keep strides that no float32 can have.
    scale_RB = bytes_RB[:, :-hidden].clone(memory_format=torch.contiguous_format).view(torch.float32)
    numbers_RH = bytes_RB[:, -hidden:].clone(memory_format=torch.contiguous_format).view(DTYPE)
    blocks_RBC = F.pad(numbers_RH.float(), (0, -hidden % COLUMNS)).unflatten(1, (-1, COLUMNS))
    return (blocks_RBC * scale_RB[..., None]).flatten(1)[:, :hidden].to(dtype)
