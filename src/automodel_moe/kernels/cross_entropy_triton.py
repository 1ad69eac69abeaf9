"""The kernel of [`automodel_moe.kernels.cross_entropy`]: one program a row, which it reads twice and writes once.

The first pass keeps a running maximum and sum of exponentials (Milakov and Gimelshein, arXiv:1805.02867), the second
writes the gradient; with one row in flight on each multiprocessor the second read finds most of the row in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def cross_entropy_(logits_TV: Tensor, target_T: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    """See [`automodel_moe.kernels.cross_entropy.cross_entropy_`]."""
    T, V = logits_TV.shape
    loss_T = torch.empty(T, dtype=torch.float32, device=logits_TV.device)
    if T > 0:
        block = min(triton.next_power_of_2(V), 16384)
        _cross_entropy[(T,)](
            logits_TV, target_T, scale, loss_T, V, ignore_index, block, num_warps=max(1, min(32, block // 512))
        )
    return loss_T


@triton.jit
def _cross_entropy(logits_ptr, target_ptr, scale_ptr, loss_ptr, V, ignore_index, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    target = tl.load(target_ptr + row)
    columns = tl.arange(0, block)
    if target == ignore_index:
        for start in range(0, V, block):
            zero = tl.zeros((block,), logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + start + columns, zero, mask=start + columns < V)
        tl.store(loss_ptr + row, 0.0)
    else:
        largest = float("-inf")
        total = 0.0
        for start in range(0, V, block):
            x = tl.load(logits_ptr + start + columns, mask=start + columns < V, other=float("-inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(x, axis=0))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), axis=0)
            largest = new
        lse = largest + tl.log(total)
        tl.store(loss_ptr + row, lse - tl.load(logits_ptr + target).to(tl.float32))
        # The target's logit was read by the whole program before any of it overwrites the row.
        tl.debug_barrier()
        scale = tl.load(scale_ptr)
        for start in range(0, V, block):
            live = start + columns < V
            x = tl.load(logits_ptr + start + columns, mask=live, other=float("-inf")).to(tl.float32)
            gradient = (tl.exp(x - lse) - tl.where(start + columns == target, 1.0, 0.0)) * scale
            tl.store(logits_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=live)
