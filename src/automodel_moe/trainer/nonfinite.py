"""A step whose gradients are not finite is taken by no rank, where the user asks for it.

The gradients are sharded, so a NaN may be on one rank alone. (`torch.amp.GradScaler` needs nothing of this: its
`found_inf` comes out equal on all ranks.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ..say import logger
from .loops import local_parts

_guarded: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def install(model: PreTrainedModel) -> None:
    """Have an optimizer that trains the model skip, from now on, the steps in which one of its gradients is not finite
    on any rank: the gradients are dropped, so that parameters and optimizer state stay as they are."""
    _guarded.add(model)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if not any(trains(optimizer, model) for model in list(_guarded)):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not _all_finite([p.grad for p in parameters if p.grad is not None], parameters[0].device):
        for p in parameters:
            p.grad = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("A gradient is not finite: this optimizer step is skipped, on every rank.")


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer holds a parameter of the model, or one that was added to it, an adapter's say."""
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


@torch.no_grad()
def _all_finite(grads: Sequence[torch.Tensor], device: torch.device) -> bool:
    """A collective, and the one word from the device that a step then waits for."""
    parts = [part for part in local_parts(grads) if part.numel()]
    # The largest elements: a sum of squares can overflow where no element has.
    largest = [norm.to(device, torch.float32) for norm in torch._foreach_norm(parts, float("inf"))] if parts else []
    bad = torch.stack([torch.zeros((), device=device), *largest]).isfinite().logical_not().any().float()
    if dist.is_initialized():
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    return not bool(bad)
