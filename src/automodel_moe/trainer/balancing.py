"""Aux-loss-free load balancing (Wang et al. 2024, arXiv:2408.15664; used by DeepSeek-V3, arXiv:2412.19437): after each
optimizer step the bias that a router adds to an expert's score, to choose by and not to weigh by, goes up by a fixed
rate where the expert got fewer tokens than the mean, and down where it got more."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from ..say import say_once
from .expert_load import Load
from .nonfinite import trains

BIAS = "e_score_correction_bias"  # what transformers' routers of this kind call it


def check(model: PreTrainedModel, experts: Mapping[str, Any], rate: float) -> None:
    """
    Check, on a model that may be without memory, that there is something to balance.

    Raises:
        `ValueError`: if no router has such a bias.
    """
    if not _owners(model, experts):
        raise ValueError(
            f"moe_config: router_bias_update_rate={rate}, but no router of {type(model).__name__} has an {BIAS}; "
            "leave it at 0.0, or balance with output_router_logits=True and router_aux_loss_coef."
        )


def install(model: PreTrainedModel, experts: Mapping[str, Any], load: Load, rate: float) -> None:
    """Move the model's routing biases after each step of an optimizer that trains the model, from now on."""
    owners = _owners(model, experts)
    for owner in owners.values():
        _keep_fp32(owner)
    layers = {layer.name: i for i, layer in enumerate(load.layers)}
    vars(model)["automodel_balancing"] = _Balancing(load, rate, {layers[name]: o for name, o in owners.items()})
    _balanced.add(model)
    _watch_optimizers()


def _owners(model: PreTrainedModel, experts: Mapping[str, Any]) -> dict[str, nn.Module]:
    """By the name of an experts module, the module in its block that holds the bias."""
    owners = {}
    for name in experts:
        block = model.get_submodule(name.rpartition(".")[0])
        for module in block.modules():
            if BIAS in module._parameters or BIAS in module._buffers:
                owners[name] = module
    return owners


def _keep_fp32(owner: nn.Module) -> None:
    # transformers keeps most of them in float32 in any model. In bfloat16 a bias of 1 takes no step below 0.004.
    bias: torch.Tensor = getattr(owner, BIAS)
    if bias.dtype == torch.float32:
        return
    if isinstance(bias, DTensor):
        raise ValueError(
            f"moe_config: router_bias_update_rate needs {BIAS} in float32, and that of {type(owner).__name__} is "
            f"sharded in {bias.dtype}: load with precision='mixed' or 'fp32'."
        )
    say_once(f"{type(owner).__name__}.{BIAS} is kept in float32: {bias.dtype} would lose its steps")
    bias.data = bias.data.float()


class _Balancing:
    def __init__(self, load: Load, rate: float, owners: dict[int, nn.Module]):
        self.load, self.rate, self.owners = load, rate, owners

    @property
    def due(self) -> bool:
        """Whether there was a training forward since the last update: of several optimizers of one model, the first
        that steps moves the biases."""
        return any(layer.stale for layer in self.load.layers)

    @torch.no_grad()
    def update(self) -> None:
        """A collective."""
        load_LE = self.load.since("balancing")
        for layer in self.load.layers:
            layer.stale = False
        for i, owner in self.owners.items():
            bias = getattr(owner, BIAS)
            load_E = load_LE[i, : bias.numel()]
            # In integers, so that every layout moves alike: the sign of mean - load.
            sign_E = torch.sign(load_E.sum() - load_E.numel() * load_E)
            step = (self.rate * sign_E).to(bias.device, bias.dtype).view(bias.shape)
            if isinstance(bias, DTensor):
                step = distribute_tensor(step, bias.device_mesh, bias.placements, src_data_rank=None)
            bias.add_(step)


# Not the copies of a model: only what was loaded is trained.
_balanced: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    for model in list(_balanced):
        balancing: _Balancing = vars(model)["automodel_balancing"]
        if balancing.due and trains(optimizer, model):
            balancing.update()
