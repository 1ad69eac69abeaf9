"""The losses of rows of logits and, in the logits' place, the gradient: plain torch, and the choice of a kernel.

loss[t] = logsumexp(logits[t]) - logits[t, target[t]]         0 for an ignored target
logits[t] <- (softmax(logits[t]) - onehot(target[t])) * scale  0 for an ignored target
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_(logits_TV: Tensor, target_T: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    """
    Args:
        logits_TV (`Tensor`): contiguous, in any floating dtype; overwritten with the gradient.
        target_T (`Tensor`): ids in [0, V), or `ignore_index`.
        scale (`Tensor`): one float32 number, what the loss will be multiplied with.

    Returns:
        `Tensor`: the rows' losses `[T]`, float32 (float64 for float64 logits), unscaled.
    """
    if logits_TV.is_cuda:
        from . import cross_entropy_triton

        return cross_entropy_triton.cross_entropy_(logits_TV, target_T, scale, ignore_index)
    return reference(logits_TV, target_T, scale, ignore_index)


def reference(logits_TV: Tensor, target_T: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    """[`cross_entropy_`] in plain torch, on any device."""
    exact_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    live_T1 = (target_T != ignore_index)[:, None]
    column_T1 = target_T.clamp(min=0)[:, None]
    log_p_TV = exact_TV.log_softmax(dim=-1)
    loss_T1 = torch.where(live_T1, -log_p_TV.gather(1, column_T1), 0)
    gradient_TV = log_p_TV.exp_()
    gradient_TV.scatter_add_(1, column_T1, torch.full_like(loss_T1, -1))
    logits_TV.copy_(torch.where(live_T1, gradient_TV * scale, 0))
    return loss_T1[:, 0]
