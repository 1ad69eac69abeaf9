"""Random weights for a sharded model: each module drawn whole from one common seed, each rank keeping its part."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.sharding_utils import DtensorShardOperation


@torch.no_grad()
def initialize_sharded(model: PreTrainedModel) -> None:
    """
    Draw the weights of a sharded model anew, as the unsharded model's own `_init_weights` draws them.

    Drawing only the local parts would give every rank's experts the same values, since all ranks start from the same
    seed. Drawing whole modules costs each rank the full model's random numbers and one module's memory.

    Args:
        model (`PreTrainedModel`): A model whose parameters are DTensors. Of the global generators only the CPU's
            moves on, by the one draw of the seed.
    """
    seed = torch.randint(2**62, (1,))
    if torch.distributed.is_initialized():
        device = model.device
        seed = seed.to(device)
        torch.distributed.broadcast(seed, src=0)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        _initialize(model, model)


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    # Children before parents, and each sub-model by its own `_init_weights`: transformers' order.
    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    sharded = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    if not sharded:
        return
    wholes = {
        name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
        for name, p in sharded.items()
    }
    module._parameters.update(wholes)
    owner._init_weights(module)
    for name, parameter in sharded.items():
        own = DtensorShardOperation(parameter).shard_tensor(wholes[name])
        assert own is not None, "only one expert's slice of a parameter can be another rank's"
        parameter.to_local().copy_(own)
    module._parameters.update(sharded)
