"""The router's load-balancing loss, over all ranks' tokens and in its right share of the step's loss.

transformers computes it from one rank's tokens of one micro-step and adds it whole to a loss that Trainer then sums
over the micro-steps and multiplies by the world (huggingface/transformers#48690). The loss is a product of two batch
means, so neither a sum nor a mean over ranks makes it right: here the means themselves run over all ranks.

Replaced is the function that a model's forward looks up in its module, and only in the forward of a model loaded by
this library. Set AUTOMODEL_MOE_PATCH_AUX_LOSS=0 to leave it alone.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from ..say import say_once

SWITCH = "AUTOMODEL_MOE_PATCH_AUX_LOSS"
FUNCTION = "load_balancing_loss_func"  # what every modeling file of transformers that has this loss calls it


@dataclass
class _Forward:
    """A forward in progress of a model of ours: its arguments, and both forms of its aux loss once it has one."""

    model: nn.Module
    arguments: dict[str, Any]
    outer: _Forward | None
    aux_loss: torch.Tensor | None = None
    in_loss: torch.Tensor | None = None


class _Running(threading.local):
    """The innermost forward of a model of ours in this thread. Kept here and not on the model, which the function that
    reads it doesn't see; torch.compile can trace this, and no context variable."""

    forward: _Forward | None = None


_running = _Running()


def install(model: PreTrainedModel) -> None:
    """Give the model's aux loss, if it has one, all ranks' tokens and its share of the loss. Once a model."""
    if os.environ.get(SWITCH, "1") == "0" or Version(transformers.__version__) >= Version("5.25"):
        return
    # A multimodal model's aux loss may be computed by the text model within.
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        forward = inspect.unwrap(type(part).forward)
        if FUNCTION in forward.__code__.co_names and _patch(forward.__globals__, type(part).__name__):
            # TRL's fused head is a forward of its own, and takes the function from here whatever the model.
            _patch(vars(modeling_mixtral), "Mixtral")
            part.register_forward_pre_hook(_enter, with_kwargs=True)
            part.register_forward_hook(_leave, with_kwargs=True, always_call=True)


def _patch(namespace: dict[str, Any], name: str) -> bool:
    """Replace the function in a modeling file's namespace, once a process; False if it is one of another kind."""
    original = namespace[FUNCTION]
    if vars(original).get("automodel_moe"):
        return True
    if not _is_known(original):
        say_once(f"{name} has a load-balancing loss of its own kind: left as it is, over each rank's own tokens.")
        return False

    @functools.wraps(original)
    def load_balancing_loss(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        forward = _running.forward
        if forward is None or not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        forward.aux_loss = global_load_balancing_loss(gate_logits, num_experts, top_k, attention_mask)
        forward.in_loss = forward.aux_loss * _share(forward.arguments, forward.aux_loss.device)
        return forward.in_loss

    vars(load_balancing_loss)["automodel_moe"] = True
    namespace[FUNCTION] = load_balancing_loss
    return True


def _is_known(function: Callable) -> bool:
    """Whether a modeling file's function is the one computed here: asked of its values, not of its source or name."""
    if list(inspect.signature(function).parameters) != ["gate_logits", "num_experts", "top_k", "attention_mask"]:
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        logits = tuple(torch.randn(6, 4, generator=generator, dtype=torch.float32) for _ in range(2))
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        return all(
            torch.allclose(function(logits, 4, 2, m), _loss(_sums(logits, 4, 2, m), 4), rtol=1e-5)
            for m in (None, mask)
        )


# --- the value -------------------------------------------------------------------------------------------------------


def global_load_balancing_loss(
    gate_logits: tuple[torch.Tensor, ...], num_experts: int, top_k: int, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """
    The load-balancing loss of the Switch Transformer (Fedus et al. 2021, equations 4 to 6, arXiv:2101.03961) in
    transformers' form, over the tokens of all ranks: `E * sum_e f_e * p_e`, where, over all tokens of all layers,
    `f_e` is the share of tokens that chose expert e, and `p_e` the mean of its router probability. A collective, and
    another one in backward.

    Args:
        gate_logits: This rank's router logits, `[T, E]` a layer.
        num_experts (`int`): E.
        top_k (`int`): Experts a token.
        attention_mask (*optional*): `[B, S]` with B * S = T, 0 where a position is padding and does not count.

    Returns:
        `torch.Tensor`: a float32 scalar, equal on all ranks: what transformers' function makes of the concatenation of
        all ranks' rows. With the mean over ranks that FSDP2 takes of gradients, its gradient is that value's too.
    """
    sums = _sums(gate_logits, num_experts, top_k, attention_mask)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        sums = _SumOverRanks.apply(sums)
    return _loss(sums, num_experts)


def _sums(
    gate_logits: tuple[torch.Tensor, ...], num_experts: int, top_k: int, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Chosen slots of each expert, its router probabilities summed, and the tokens: float32 `[2 E + 1]`."""
    device = gate_logits[0].device
    sums = torch.zeros(2 * num_experts + 1, dtype=torch.float32, device=device)
    counts_T = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    # Layer by layer: all layers' probabilities at once would be the largest tensor of the step.
    for logits_TE in gate_logits:
        probs_TE = logits_TE.to(device).softmax(-1)
        # Zeros and ones as a table: unlike bincount it needs no word from the device.
        chosen_TE = torch.zeros_like(probs_TE, dtype=torch.float32).scatter_(1, probs_TE.topk(top_k).indices, 1.0)
        table = torch.cat([chosen_TE, probs_TE.float(), torch.ones_like(chosen_TE[:, :1])], dim=1)
        if counts_T is not None:
            table = table * counts_T[:, None]
        sums = sums + table.sum(0)
    return sums


def _loss(sums: torch.Tensor, num_experts: int) -> torch.Tensor:
    chosen_E, probs_E, tokens = sums.split([num_experts, num_experts, 1])
    return num_experts * (chosen_E / tokens * (probs_E / tokens)).sum()


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks, and in backward the sum of all ranks' gradients: ranks may scale their losses unlike."""

    @staticmethod
    def forward(ctx, sums):
        sums = sums.clone()
        dist.all_reduce(sums)
        return sums

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


# --- its share of the loss -------------------------------------------------------------------------------------------


def _share(arguments: dict[str, Any], device: torch.device) -> torch.Tensor | float:
    """The weight that this rank's labels of this micro-step have in the cross-entropy, which the aux loss gets too.

    With `num_items_in_batch` a cross-entropy is a sum over labels, divided by the labels of the optimizer step: of all
    ranks, then the caller multiplies the loss by their number, or of this rank alone. Either way the shares of a step,
    averaged over the ranks, add up to 1, and nobody needs to know which way it was. Without it a cross-entropy is a
    mean: the share is 1, and the micro-steps are weighed by the caller.
    """
    n_items, labels = arguments.get("num_items_in_batch"), arguments.get("labels")
    if n_items is None or labels is None:
        return 1.0
    targets = arguments.get("shift_labels")
    targets = labels[..., 1:] if targets is None else targets
    n_own = (targets != -100).sum().to(device)
    return n_own / (n_items.to(device) if isinstance(n_items, torch.Tensor) else n_items)


def _enter(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    arguments = _signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
    _running.forward = _Forward(model, arguments | arguments.pop("kwargs", {}), _running.forward)


def _leave(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    forward = _running.forward
    if forward is None or forward.model is not model:  # torch calls this hook too when one before `_enter` raised
        return None
    _running.forward = forward.outer
    # The loss holds a share of the aux loss; whoever reads the aux loss itself, to log or to weigh it, gets it whole.
    if forward.in_loss is None or output is None:
        return None
    if isinstance(output, tuple):
        return tuple(forward.aux_loss if entry is forward.in_loss else entry for entry in output)
    output["aux_loss"] = forward.aux_loss
    return output


@functools.cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)
