"""How evenly the router spreads tokens over experts and ranks: counted on the device, read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from . import collective

_ATTRIBUTE = "automodel_load"  # on the model


@dataclass
class LayerLoad:
    """How often each expert of one layer was chosen in training, on this rank. Its method is the layer's hook, so that
    a copy of the model counts for itself."""

    name: str
    num_experts: int
    # int64 [E + 2], on the ids' device: ids from -1, a slot of padding, to E, which some routers give to no expert.
    chosen: torch.Tensor
    # Set where the host knows it, to spare those who ask after each step a word from the device.
    stale: bool = False

    @torch.compiler.disable
    def count(self, experts: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of an experts module, to run after the one that masks padding."""
        # A forward without gradients is an evaluation. One inside a backward is a recompute, and has been counted.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        idx_P = (kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]).reshape(-1)
        if self.chosen.device != idx_P.device:  # the model was moved after loading
            self.chosen = self.chosen.to(idx_P.device)
        # Integers: the order of the additions changes nothing.
        self.chosen.scatter_add_(0, idx_P.long() + 1, self.chosen.new_ones(()).expand_as(idx_P))
        self.stale = True


@dataclass
class Load:
    """The counts of a model's layers. They only grow: each reader keeps its own mark of where it last read."""

    layers: list[LayerLoad]
    ep_size: int
    tp_size: int
    marks: dict[str, torch.Tensor] = field(default_factory=dict)

    def since(self, reader: str) -> torch.Tensor:
        """The (token, slot) pairs of all ranks that each expert got since this reader last asked: int64 `[L, E]`, for
        the largest E of the layers, on the device. A collective."""
        width = max(layer.num_experts for layer in self.layers)
        total_LE = self.layers[0].chosen.new_zeros(len(self.layers), width)
        for i, layer in enumerate(self.layers):
            total_LE[i, : layer.num_experts] = layer.chosen[1:-1]
        new_LE = total_LE - self.marks[reader].to(total_LE.device) if reader in self.marks else total_LE.clone()
        self.marks[reader] = total_LE
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(new_LE)
        # The ranks of a tensor parallel group all count the same tokens.
        return new_LE // self.tp_size


def install(model: PreTrainedModel, experts: Mapping[str, Any], ep_size: int, tp_size: int) -> Load:
    """Count the choices of each of the model's experts modules from now on."""
    load = Load([], ep_size, tp_size)
    for name, module in experts.items():
        # Under expert parallelism transformers leaves the number of a rank's own on the module.
        num_experts = module.num_experts * (ep_size if module._is_expert_parallel else 1)
        device = next(module.parameters()).device
        layer = LayerLoad(name, num_experts, torch.zeros(num_experts + 2, dtype=torch.int64, device=device))
        module.register_forward_pre_hook(layer.count, with_kwargs=True)
        load.layers.append(layer)
    vars(model)[_ATTRIBUTE] = load
    return load


def load_imbalance(model: nn.Module) -> dict[str, dict[str, Any]]:
    """
    How evenly the router has spread the training tokens of all ranks since the last call. A collective: call it on
    every rank. It waits for the device; the counting itself doesn't.

    Padding, evaluation and the recompute of activation checkpointing are not counted.

    Args:
        model (`nn.Module`): Loaded by `MoEAutoModel` with `moe_config={"load_stats": True}`; or what PEFT made of it.

    Returns:
        By the name of each layer's experts module, a dict with:

        - `"experts"`: a list of E integers, the (token, slot) pairs that each expert got;
        - `"ranks"`: a list of `ep_size` integers, those that each rank of an expert-parallel group computed (the ranks
          at the same place in their groups are taken together);
        - `"expert_max_over_mean"`, `"rank_max_over_mean"`: the largest over the mean, 1.0 when even, and when nothing
          was counted.

    Raises:
        `ValueError`: if the model doesn't count.
        `RuntimeError`: if another rank doesn't call it in time.
    """
    load, owner = _find(model)
    timeout = vars(owner)["automodel_moe"].call_timeout
    collective.meet("automodel_moe.load_imbalance", timeout, "Call it on every rank: take it out of `if rank == 0:`.")
    return _read(load, "load_imbalance")


def _find(model: nn.Module) -> tuple[Load, nn.Module]:
    for module in model.modules():
        if _ATTRIBUTE in vars(module):
            return vars(module)[_ATTRIBUTE], module
    raise ValueError(
        f"This {type(model).__name__} doesn't count its experts' tokens: load it with "
        'MoEAutoModel.from_pretrained(..., moe_config={"load_stats": True}).'
    )


def _read(load: Load, reader: str) -> dict[str, dict[str, Any]]:
    read = {}
    for layer, row in zip(load.layers, load.since(reader).tolist(), strict=True):
        experts = row[: layer.num_experts]
        local = layer.num_experts // load.ep_size
        ranks = [sum(experts[r * local : (r + 1) * local]) for r in range(load.ep_size)]
        read[layer.name] = {
            "experts": experts,
            "ranks": ranks,
            "expert_max_over_mean": _max_over_mean(experts),
            "rank_max_over_mean": _max_over_mean(ranks),
        }
    return read


def _max_over_mean(counts: list[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


class LoadImbalanceCallback(TrainerCallback):
    """Puts the imbalance of the least even layer since the last log into Trainer's training logs, as
    `expert_load_max_over_mean` and `rank_load_max_over_mean`. Must stand before the callbacks that report logs."""

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        # An evaluation's log, or the summary at the end; or another one of these was here before.
        if "loss" not in logs or "expert_load_max_over_mean" in logs:
            return
        layers = _read(_find(model)[0], type(self).__name__).values()
        values = {
            "expert_load_max_over_mean": max(layer["expert_max_over_mean"] for layer in layers),
            "rank_load_max_over_mean": max(layer["rank_max_over_mean"] for layer in layers),
        }
        logs.update(values)
        # Trainer has made its own copy for the history before it calls.
        state.log_history[-1].update(values)
