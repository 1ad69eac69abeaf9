"""Which checkpoint tensors become which parameters, by transformers' own renaming, before any of them is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from .headers import Entry


@dataclass
class Group:
    """
    The checkpoint tensors that one conversion turns into one or more parameters.

    Attributes:
        targets (`list[str]`): Parameter names; transformers reads every source with the first one's sharding.
        operations (`list[ConversionOps]`): What runs on them, in order. Empty: the tensor is only renamed.
        converter (`int`, *optional*): The converter's place in `weight_mapping`; `None` for a renaming.
        sources (`dict[str, list[str]]`): Checkpoint keys by source pattern, in the order in which they are collected.
    """

    targets: list[str]
    operations: list[ConversionOps]
    converter: int | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]


def make_plan(
    model: PreTrainedModel, weight_mapping: list | None, entries: Mapping[str, Entry], state: dict[str, Tensor]
) -> dict[str, Group]:
    """
    The groups that `convert_and_load_state_dict_in_model` will form, by their first target.

    Args:
        model (`PreTrainedModel`): The model, with parameters still on the meta device.
        weight_mapping (`list`, *optional*): `LoadStateDictConfig.weight_mapping`; it is left as it is.
        entries (mapping): What the checkpoint holds.
        state (mapping): `model.state_dict()`.
    """
    # A copy: renaming marks a transform as used, which decides what a later save reverts.
    transforms = deepcopy(weight_mapping or [])
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    places = {id(transform): place for place, transform in enumerate(transforms)}
    prefix = model.base_model_prefix

    plan: dict[str, Group] = {}
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            continue
        if pattern is None:
            group = plan.setdefault(name, Group([name], []))
        else:
            converter = by_pattern[pattern]
            first = converter.target_patterns[0]
            targets = [name.replace(first, target) for target in converter.target_patterns]
            group = plan.setdefault(name, Group(targets, converter.operations, places[id(converter)]))
        group.sources.setdefault(pattern or key, []).append(key)
    return plan


class Keep(ConversionOps):
    """Leaves one tensor as it is, on load and on save."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensor,) = input_dict.values()
        return {target_patterns[0]: tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return Keep()


def settle_transposes(
    weight_mapping: list, plan: Mapping[str, Group], entries: Mapping[str, Entry], state: Mapping[str, Tensor]
) -> None:
    """
    Decide each `Transpose(check_dims=True)`, which transposes what hasn't the parameter's shape, from the headers.

    transformers 5.24 decides it again on each rank's slice, which never has the parameter's shape; and when it saves,
    from the model's own tensor, which always has it, so that the checkpoint's layout is lost. `weight_mapping` and the
    plan are changed in place, and with them what a later save reverts. Converters whose tensors don't agree
    are left as they are.
    """
    verdicts: dict[int, set[bool]] = {}
    for group in plan.values():
        checks = [op.check_dims for op in group.operations if isinstance(op, Transpose)]
        if group.converter is not None and checks == [True]:
            shape = tuple(state[group.targets[0]].shape)
            verdicts.setdefault(group.converter, set()).update(entries[key].shape != shape for key in group.keys)
    for place, transposed in verdicts.items():
        if len(transposed) > 1 or len(weight_mapping[place].operations) > 1:
            continue
        (op,) = weight_mapping[place].operations
        settled: list[ConversionOps] = [Transpose(op.dim0, op.dim1) if transposed == {True} else Keep()]
        weight_mapping[place].operations = settled
        for group in plan.values():
            if group.converter == place:
                group.operations = settled


def list_index(pattern: str, key: str) -> int | None:
    """The number that stands for the `*` of a source pattern in a checkpoint key, e.g. the expert's."""
    match = re.search(pattern.replace("*.", r"(\d+)\.", 1), key)
    return int(match.group(match.lastindex)) if match and match.lastindex else None
