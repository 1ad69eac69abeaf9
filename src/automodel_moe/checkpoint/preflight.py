"""Refuse a checkpoint whose experts are not the model's, before a weight is read.

transformers stacks the experts that it finds in the order in which it finds them: with one expert's key missing every
later expert moves one place down, and with one too many sharded ranks disagree about the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ErnieFuseAndSplitTextVisionExperts, MergeModulelist

from .headers import CheckpointError, Entry
from .plan import Group, list_index

# Operations that stack one tensor an expert.
_STACKING = (MergeModulelist, ErnieFuseAndSplitTextVisionExperts)
_SHOWN = 5


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward through its experts registry."""
    return "_is_expert_parallel" in vars(module)


def check_experts(
    model: PreTrainedModel,
    plan: Mapping[str, Group],
    entries: Mapping[str, Entry],
    state: Mapping[str, Tensor],
    is_experts: Callable[[nn.Module], bool] = is_experts,
    ignore_mismatched_sizes: bool = False,
) -> None:
    """
    Check that the checkpoint fills every parameter of every experts module, each expert once and in its shape.

    Other parameters keep transformers' own behaviour (a report of what is missing, unexpected or of another shape).

    Raises:
        `CheckpointError`: naming each parameter, the experts missing or in excess, and the file; the same on every
            rank, since every rank reads the same headers.
    """
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_experts(module)
        for name, _ in module.named_parameters(recurse=False)
    ]
    by_target = {target: group for group in plan.values() for target in group.targets}
    tied = {frozenset(pair) for pair in vars(model)["all_tied_weights_keys"].items()}
    problems, seen = [], set()
    for name in names:
        group = by_target.get(name)
        if group is None:
            if not any(name in pair and pair & by_target.keys() for pair in tied):
                problems.append(f"{name}: no tensor of the checkpoint becomes this parameter")
        elif group.targets[0] not in seen:
            seen.add(group.targets[0])
            problems += _check_group(group, entries, state, ignore_mismatched_sizes)
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError(
            "The checkpoint's experts do not fit the model:\n  "
            + "\n  ".join(problems[:_SHOWN] + more)
            + "\nDownload or write the checkpoint again, or load it with the config it was saved with."
        )


def _check_group(
    group: Group, entries: Mapping[str, Entry], state: Mapping[str, Tensor], ignore_mismatched_sizes: bool
) -> list[str]:
    target = group.targets[0]
    shapes = [tuple(state[name].shape) for name in group.targets if name in state]
    if any(isinstance(op, _STACKING) for op in group.operations):
        n_experts = sum(shape[0] for shape in shapes)
        problems = [
            f"{target}: {problem} (in {entries[keys[0]].file})"
            for pattern, keys in group.sources.items()
            if (problem := _check_indices(pattern, keys, n_experts))
        ]
        if problems:
            return problems
    if ignore_mismatched_sizes or any(_is_quantized(op) for op in group.operations):
        return []
    found, wanted = sum(prod(entries[key].shape) for key in group.keys), sum(map(prod, shapes))
    wrong = found != wanted if group.operations else entries[group.keys[0]].shape != shapes[0]
    if not wrong:
        return []
    key = group.keys[0]
    return [f"{target}: the config asks for {shapes[0]}, the checkpoint's {key} is {entries[key].shape}"]


def _check_indices(pattern: str, keys: list[str], n_experts: int) -> str | None:
    indices = [list_index(pattern, key) for key in keys]
    if None in indices:
        return None if len(keys) == n_experts else f"{pattern!r} has {len(keys)} tensors for {n_experts} experts"
    missing = sorted(set(range(n_experts)) - set(indices))
    extra = sorted(index for index in set(indices) if index is not None and index >= n_experts)
    parts = [f"{label} {_ranges(some)}" for label, some in (("lacks", missing), ("has in excess", extra)) if some]
    if len(set(indices)) < len(indices):
        parts.append("has an expert twice")
    return f"of the {n_experts} experts {pattern!r} {' and '.join(parts)}" if parts else None


def _ranges(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"{shown}, ... ({len(indices)} in all)" if len(indices) > 8 else shown


def _is_quantized(operation: object) -> bool:
    # Every operation on quantized storage is built with the quantizer: its shapes are the storage's, not the weight's.
    return "hf_quantizer" in vars(operation)
