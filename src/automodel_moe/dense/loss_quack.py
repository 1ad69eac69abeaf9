"""Linear + cross-entropy by quack: the first product's epilogue leaves exponentials, which both gradients read.

No pass over the logits is left outside the three products. Of what is rounded to bfloat16 the target's coefficient
counts most: its relative error is the same for all rows in transformers and each row's own here, up to 2^-8 in x's
gradient and twice that in the weight's, where the row's factor is rounded too.
https://github.com/Dao-AILab/quack
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import needs_hopper

CHUNK_ROWS = 4096


def unsupported(device: torch.device, dtype: torch.dtype, vocabulary: int, hidden: int) -> str | None:
    if dtype != torch.bfloat16:
        return f"it is for bfloat16, not {dtype}"
    if vocabulary % 128 or hidden % 8 or hidden <= 128:
        return f"it is for vocabularies of multiples of 128 and hidden sizes above 128, not {vocabulary} and {hidden}"
    if reason := needs_hopper(device):
        return reason
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it is for Hopper alone"
    return None


def run(
    x_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    scale: Tensor,
    ignore_index: int,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See [`automodel_moe.dense.loss`]."""
    from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy_fwd

    T, H = x_TH.shape
    loss_T, dx_TH, d_weight_VH = scaled_exp_linear_cross_entropy_fwd(
        x_TH,
        weight_VH,
        target_T,
        _chunk_rows(T, H),
        ignore_index,
        need_dx=needs_x,
        need_dw=needs_weight,
        grad_scale=scale,
    )
    return loss_T[:T].sum() * scale, None if dx_TH is None else dx_TH[:T], d_weight_VH


def _chunk_rows(T: int, H: int) -> int:
    # quack tells an operand of rows from one of columns by its length: no chunk may have as many rows as there are
    # columns, the last one included, which is padded to 128.
    for rows in range(CHUNK_ROWS, 0, -128):
        last = math.ceil((T % rows or rows) / 128) * 128
        if H not in (last, min(rows, T)):
            return rows
    raise AssertionError("a hidden size above 128 leaves a chunk of 128")
