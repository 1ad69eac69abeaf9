"""Linear + cross-entropy over chunks of tokens: logits of one chunk at a time, in the weights' dtype, on any device.

A chunk's logits become their own gradient in place; x's gradient and, in float32 across chunks, the weight's are taken
from it while it is there. The chunks are large: their products run at the rate of large ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.cross_entropy import cross_entropy_

CHUNK_BYTES = 2**31  # of logits


def unsupported(device: torch.device, dtype: torch.dtype, vocabulary: int, hidden: int) -> str | None:
    if dtype == torch.float16:
        return "a gradient scaler comes after these gradients, which float16 has then lost"
    return None if dtype.is_floating_point else f"it has no arithmetic for {dtype}"


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
    (T, _), (V, _) = x_TH.shape, weight_VH.shape
    n_chunks = math.ceil(T * V * weight_VH.itemsize / CHUNK_BYTES)
    rows = math.ceil(T / n_chunks / 128) * 128  # of nearly equal chunks
    loss_T = torch.empty(T, dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device)
    dx_TH = torch.empty_like(x_TH) if needs_x else None
    d_weight_VH = torch.zeros_like(weight_VH, dtype=loss_T.dtype) if needs_weight else None
    for start in range(0, T, rows):
        chunk = slice(start, start + rows)
        logits_CV = x_TH[chunk] @ weight_VH.T
        loss_T[chunk] = cross_entropy_(logits_CV, target_T[chunk], scale, ignore_index)
        if dx_TH is not None:
            torch.mm(logits_CV, weight_VH, out=dx_TH[chunk])
        if d_weight_VH is not None:
            _add_product(d_weight_VH, logits_CV.T, x_TH[chunk])
    return loss_T.sum() * scale, dx_TH, d_weight_VH


def _add_product(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """`total += left @ right`, accumulated in total's dtype."""
    if left_VC.dtype == total_VH.dtype:
        total_VH.addmm_(left_VC, right_CH)
    elif left_VC.is_cuda:
        torch.addmm(total_VH, left_VC, right_CH, out_dtype=total_VH.dtype, out=total_VH)
    else:
        total_VH.addmm_(left_VC.to(total_VH.dtype), right_CH.to(total_VH.dtype))
