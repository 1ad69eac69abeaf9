"""Gather the next layers' experts while this layer computes: FSDP2's explicit prefetch, unset by transformers.

By itself FSDP2 starts a layer's all-gather when the host comes to that layer. Where the host waits in between, for the
counts of an expert-parallel exchange say, the gather starts late and the GPU waits for it. With experts that FSDP2
shards (`ep_size=1`, or copies of the experts over several nodes) it is the largest gather of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .say import say_once


def install(model: nn.Module, experts: Mapping[str, Any], ahead: int | str) -> None:
    """
    Let each layer of the stacks that hold experts start the gathers of the next ones in forward, and of the previous
    ones in backward.

    Args:
        model (`nn.Module`): A model that FSDP2 shards layer by layer.
        experts (mapping of `str` to `nn.Module`): Its experts modules by name.
        ahead (`int` or `"auto"`): How many layers ahead. At most `ahead + 1` layers are whole on a GPU at a time; 0
            leaves FSDP2's own order. `"auto"`: 1 where experts are gathered at all.
    """
    if isinstance(ahead, str):
        ahead = int(any(_is_gathered(module) for module in experts.values()))
        if ahead:
            say_once("prefetch='auto': 1 layer ahead (FSDP2 gathers the experts)")
    if not ahead:
        return
    for stack in _stacks(model, experts):
        for place, layer in enumerate(stack):
            # The experts within a layer may be a unit of their own: wanted last in forward, with it in backward.
            own = _units(layer)[1:]
            later = [unit for other in stack[place + 1 : place + 1 + ahead] for unit in _units(other)]
            earlier = [unit for other in reversed(stack[max(place - ahead, 0) : place]) for unit in _units(other)]
            layer.set_modules_to_forward_prefetch(own + later)
            layer.set_modules_to_backward_prefetch(own + earlier)


def _is_gathered(module: nn.Module) -> bool:
    # Over the mesh's "ep" dimension experts are spread for good; over the others FSDP2 gathers them.
    return any(
        not placement.is_replicate() and name != "ep" and size > 1
        for p in module.parameters()
        if isinstance(p, DTensor)
        for placement, name, size in zip(
            p.placements, p.device_mesh.mesh_dim_names or [None] * p.device_mesh.ndim, p.device_mesh.shape, strict=True
        )
    )


def _stacks(model: nn.Module, experts: Mapping[str, Any]) -> Iterator[list[FSDPModule]]:
    """The layers, in order, of each list of layers that holds experts; all of them FSDP2 units."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not any(key.startswith(f"{name}.") for key in experts):
            continue
        layers: list[FSDPModule] = [layer for layer in module if isinstance(layer, FSDPModule)]
        if len(layers) == len(module):
            yield layers


def _units(layer: FSDPModule) -> list[FSDPModule]:
    """A layer and the FSDP2 units within it."""
    assert isinstance(layer, nn.Module)
    return [module for module in layer.modules() if isinstance(module, FSDPModule)]
