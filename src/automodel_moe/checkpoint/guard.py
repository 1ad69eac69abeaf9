"""The load guard: a sharded parameter gets what one process would load, or the load is refused.

transformers 5.24 reads each rank's slice of a checkpoint tensor first and runs the conversion operations on the slice
(public: huggingface/transformers#48519). That is right only for an operation that commutes with the slicing: stacking
experts does with a split by expert; a concatenation of q, k and v along the split dimension doesn't, and silently
gives wrong weights. What doesn't commute is read whole, converted as on one process, and only then cut down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import core_model_loading as core
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from .headers import CheckpointError, Entry
from .patching import patched
from .plan import Group, Keep

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """
    How one parameter is cut over the ranks.

    Attributes:
        shape: The whole parameter's.
        parts: For each dimension that is cut at all, into how many parts.
        strides: For each dimension cut by interleaved blocks, the number of blocks (`_StridedShard`'s split factor).
    """

    shape: Shape
    parts: Mapping[int, int]
    strides: Mapping[int, int]

    @classmethod
    def of(cls, param: DTensor) -> Split:
        parts: dict[int, int] = {}
        strides: dict[int, int] = {}
        for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
            if size == 1 or not isinstance(placement, (Shard, _StridedShard)):
                continue
            dim = placement.dim % param.ndim
            parts[dim] = parts.get(dim, 1) * size
            if isinstance(placement, _StridedShard):
                strides[dim] = int(placement.split_factor)
        return cls(tuple(param.shape), parts, strides)


@dataclass
class Flow:
    """What runs through a group's operations: source shapes by pattern, and whether they were read one by one."""

    shapes: dict[str, list[Shape]]
    as_slices: bool  # each source is one slice of the parameter's dimension 0, e.g. one expert
    merged: bool = False  # such slices were stacked by an earlier operation


def _untouched(split: Split, *dims: int) -> bool:
    return all(dim % len(split.shape) not in split.parts for dim in dims)


def _merge(op: core.MergeModulelist, split: Split, flow: Flow) -> bool:
    commutes = op.dim == 0 and flow.as_slices
    flow.as_slices, flow.merged = False, True
    return commutes


def _concatenate(op: core.Concatenate, split: Split, flow: Flow) -> bool:
    if _untouched(split, op.dim):
        return True
    # Slices are cut before they are stacked, each source on its own: that is interleaved blocks, one a source.
    dim = op.dim % len(split.shape)
    n_sources = len(flow.shapes)
    return (
        flow.merged
        and split.strides.get(dim) == n_sources
        and split.shape[dim] % (n_sources * split.parts[dim]) == 0
        and len({shape for shapes in flow.shapes.values() for shape in shapes}) == 1
    )


def _along_dim(op: core.Chunk | core.Split | core.Interleave, split: Split, flow: Flow) -> bool:
    return _untouched(split, op.dim)


def _transpose(op: core.Transpose, split: Split, flow: Flow) -> bool:
    # With check_dims it compares the local slice's shape with the whole parameter's.
    return not op.check_dims and _untouched(split, op.dim0, op.dim1)


def _keep(op: Keep, split: Split, flow: Flow) -> bool:
    return True


def _rope(op: core.PermuteForRope, split: Split, flow: Flow) -> bool:
    return _untouched(split, 0)


def _flatten(op: core.Conv3dToLinear | core.LinearToConv3d, split: Split, flow: Flow) -> bool:
    return set(split.parts) <= {0}


def _modal_experts(op: core.ErnieFuseAndSplitTextVisionExperts, split: Split, flow: Flow) -> bool:
    commutes = op.stack_dim == 0 and flow.as_slices and set(split.parts) <= {0}
    flow.as_slices, flow.merged = False, True
    return commutes


def _mxfp4(op: Mxfp4Dequantize, split: Split, flow: Flow) -> bool:
    # It moves the packed dimension to the front of the expert's matrix; the experts stay where they are.
    return set(split.parts) <= {0}


def _fp8(op: Fp8Dequantize, split: Split, flow: Flow) -> bool:
    aux = [pattern for pattern in flow.shapes if pattern.endswith(("_scale_inv", "activation_scale"))]
    scales = [shape for pattern in aux for shape in flow.shapes.pop(pattern)]
    if not scales or (flow.as_slices and set(split.parts) <= {0}):
        return True
    block = op.hf_quantizer.quantization_config.weight_block_size
    if set(split.parts) != {0} or block is None or any(len(shape) != len(split.shape) for shape in scales):
        return False
    # Whole blocks a rank, and as many scales: then each slice is quantized as the whole is.
    rows = split.shape[0]
    return rows % (split.parts[0] * block[0]) == 0 and all(shape[0] * block[0] == rows for shape in scales)


# An operation that isn't here doesn't commute. Exact types: a subclass may compute something else.
_RULES: dict[type, Callable[..., bool]] = {
    core.MergeModulelist: _merge,
    core.Concatenate: _concatenate,
    core.Chunk: _along_dim,
    core.Split: _along_dim,
    core.Interleave: _along_dim,
    core.Transpose: _transpose,
    core.PermuteForRope: _rope,
    core.Conv3dToLinear: _flatten,
    core.LinearToConv3d: _flatten,
    core.ErnieFuseAndSplitTextVisionExperts: _modal_experts,
    Keep: _keep,
    Mxfp4Dequantize: _mxfp4,
    Fp8Dequantize: _fp8,
}


def commutes(
    operations: Sequence[core.ConversionOps], shapes: Mapping[str, Sequence[Shape]], splits: Sequence[Split]
) -> str | None:
    """
    Whether converting each rank's slices gives the slices of what is converted whole.

    Args:
        operations (sequence of `ConversionOps`): What runs, in order. Empty: the tensor is only renamed.
        shapes (mapping): The checkpoint tensors' whole shapes, by source pattern.
        splits (sequence of `Split`): Of each parameter that comes out; transformers reads with the first one's.

    Returns:
        `None` if it does; otherwise the reason in a few words.
    """
    split = splits[0]
    name = " then ".join(type(op).__name__ for op in operations)
    if any(other.parts != split.parts or other.strides != split.strides for other in splits):
        return f"{name}: its parameters are sharded differently"
    ndims = {len(shape) for some in shapes.values() for shape in some}
    flow = Flow({pattern: list(some) for pattern, some in shapes.items()}, ndims == {len(split.shape) - 1})
    for op in operations:
        rule = _RULES.get(type(op))
        if rule is None:
            return f"{type(op).__name__} is not known to work on slices"
        if not rule(op, split, flow):
            dims = ", ".join(map(str, sorted(split.parts)))
            return f"{type(op).__name__} does not work on slices of dimension {dims}"
    if flow.merged:
        return None
    # What is left is cut by its own sizes, so they must be the parameter's where it is cut.
    for shape in (shape for some in flow.shapes.values() for shape in some):
        if len(shape) != len(split.shape) and not any(type(op) in _RESHAPING for op in operations):
            return f"{name or 'renaming'}: {len(shape)} dimensions become {len(split.shape)}"
        if any(shape[dim] != split.shape[dim] for dim in split.parts):
            return f"{name or 'renaming'}: its size {shape} is not the parameter's {split.shape}"
    return None


# Rules that have looked at the number of dimensions themselves.
_RESHAPING = (core.Conv3dToLinear, core.LinearToConv3d, Mxfp4Dequantize)


@dataclass
class Guard:
    """What is loaded otherwise than transformers would: read whole and cut down, or not read at all."""

    whole: dict[str, str] = field(default_factory=dict)  # parameter name -> reason
    empty: list[str] = field(default_factory=list)  # sharded parameters of which this rank holds nothing


def inspect(plan: Mapping[str, Group], entries: Mapping[str, Entry], params: Mapping[str, Tensor]) -> Guard:
    """
    Decide what has to be guarded.

    Args:
        plan (mapping): The groups, as `make_plan` gives them.
        entries (mapping): What the checkpoint holds.
        params (mapping): The model's parameters and buffers by name.

    Raises:
        `CheckpointError`: if a group can't be loaded right even when it is read whole.
    """
    guard = Guard()
    for group in plan.values():
        targets = [name for name in group.targets if name in params]
        sharded = {name: param for name in targets if isinstance(param := params[name], DTensor)}
        splits = [Split.of(param) for param in sharded.values()]
        if not any(split.parts for split in splits):
            continue
        if any("hf_quantizer" in vars(op) and type(op) not in _RULES for op in group.operations):
            op = next(op for op in group.operations if "hf_quantizer" in vars(op))
            raise CheckpointError(
                f"{targets[0]} is quantized ({type(op).__name__}), and quantized weights can't be sharded: pass a "
                f"quantization_config with dequantize=True, or load an unquantized checkpoint."
            )
        shapes = {pattern: [entries[key].shape for key in keys] for pattern, keys in group.sources.items()}
        reason = commutes(group.operations, shapes, splits)
        if reason is None and len(sharded) < len(targets):
            reason = "only some of its parameters are sharded"
        if reason is not None:
            guard.whole |= dict.fromkeys(sharded, reason)
        elif all(param.to_local().numel() == 0 for param in sharded.values()):
            guard.empty += sharded
    return guard


@dataclass
class _Placeholders:
    model: nn.Module
    whole: dict[str, DTensor]
    empty: dict[str, DTensor]
    store: Callable[..., None] | None

    def restore(self, name: str) -> DTensor:
        param = self.whole.pop(name)
        _set(self.model, name, param)
        return param


_placeholders: ContextVar[_Placeholders | None] = ContextVar("placeholders", default=None)


@contextmanager
def guarded(model: nn.Module, guard: Guard, store: Callable[..., None] | None = None) -> Iterator[None]:
    """
    While active, transformers loads `model` with the guard's parameters read whole, or not at all.

    With `store` it takes the place of transformers' `set_param_for_module`, e.g. to copy values into parameters that
    are there already.

    A parameter that is read whole is an ordinary meta parameter of the whole shape until its value is set. One that
    is empty here is taken out: transformers 5.24 would stack no expert, or slice an interval that isn't there.
    """
    if not guard.whole and not guard.empty and store is None:
        yield
        return
    held = _Placeholders(model, _take(model, guard.whole), _take(model, guard.empty), store)
    for name, param in held.whole.items():
        whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
        _set(model, name, nn.Parameter(whole, requires_grad=param.requires_grad))
    if guard.whole:
        reasons = sorted(set(guard.whole.values()))
        size = sum(prod(param.shape) * param.itemsize for param in held.whole.values()) / 2**20
        logger.info("%d sharded tensors (%.1f MiB) are read whole: %s", len(guard.whole), size, "; ".join(reasons))
    token = _placeholders.set(held)
    try:
        with (
            patched(core, "set_param_for_module", _set_param_for_module),
            patched(core, "spawn_materialize", _spawn_materialize),
        ):
            yield
    finally:
        _placeholders.reset(token)
        for name in list(held.whole):
            held.restore(name)
        for name, param in held.empty.items():
            _set(model, name, param)


def fill_empty(model: nn.Module, guard: Guard, loading_info) -> None:
    """Give the parameters of which this rank holds nothing their (empty) value, and clear them from the report."""
    for name in guard.empty:
        param = _get(model, name)
        local = torch.empty_like(param.to_local(), device=param.device_mesh.device_type)
        value = nn.Parameter(core._dtensor_from_local_like(local, param), requires_grad=param.requires_grad)
        vars(value)["_is_hf_initialized"] = True
        _set(model, name, value)
        loading_info.unexpected_keys.discard(name)


def _set_param_for_module(original, model, target_name, param_value, loading_info, hf_quantizer):
    held = _placeholders.get()
    if held is None or held.model is not model:
        return original(model, target_name, param_value, loading_info, hf_quantizer)
    store = held.store or original
    if target_name not in held.whole:
        return store(model, target_name, param_value, loading_info, hf_quantizer)
    param = held.restore(target_name)
    if param_value.shape != param.shape:
        # Judged on the whole tensor, so that every rank gives the same verdict.
        loading_info.missing_keys.discard(target_name)
        loading_info.mismatched_keys.add((target_name, param_value.shape, param.shape))
        return None
    if param.to_local().numel() == 0:
        local = param_value.new_empty(param.to_local().shape)
    else:
        # A copy: a view would keep the whole tensor alive.
        local = DtensorShardOperation(param).shard_tensor(param_value.detach()).clone()
    return store(model, target_name, local, loading_info, hf_quantizer)


def _spawn_materialize(original, thread_pool, tensor, *args, sharding_op=None, **kwargs):
    held = _placeholders.get()
    if held is not None and (sharding_op is None or held.store is not None):
        # Read when its turn comes: the reading threads run ahead, and would hold every whole tensor at once, or beside
        # the model that is there a second one.
        thread_pool = None
    return original(thread_pool, tensor, *args, sharding_op=sharding_op, **kwargs)


def _take(model: nn.Module, names: Iterable[str]) -> dict[str, DTensor]:
    taken = {}
    for name in names:
        taken[name] = _get(model, name)
        _set(model, name, None)
    return taken


def _get(model: nn.Module, name: str) -> DTensor:
    param = model.get_parameter(name)
    assert isinstance(param, DTensor)
    return param


def _set(model: nn.Module, name: str, param: Tensor | None) -> None:
    path, _, leaf = name.rpartition(".")
    # Not by attribute, which would register a parameter anew: this is a placeholder changing places.
    model.get_submodule(path)._parameters[leaf] = cast("nn.Parameter | None", param)
