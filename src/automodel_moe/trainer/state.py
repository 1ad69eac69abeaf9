"""An optimizer's state in a folder that any number of ranks can write and read, whatever they share of the model.

It is torch's distributed checkpoint (DCP), keyed by parameter name, so that it doesn't depend on the order or the
sharding of the parameters. Each rank writes the elements that it holds, and reads those it needs.

DCP takes a DTensor's local part for one box of the whole tensor. That is wrong where a dimension is cut by interleaved
blocks (`_StridedShard` that no later placement undoes), so the boxes are worked out here.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from . import collective

# Beside DCP's own files: the groups, and what of the state is no tensor.
GROUPS = "groups.pt"

_PLAIN = (bool, int, float, str, type(None))


def save_optimizer(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, **notes: Any
) -> None:
    """
    Write the optimizer's state. A collective.

    Args:
        folder (`str` or `os.PathLike`): On a filesystem that all ranks share; made if it isn't there.
        model (`nn.Module`): Gives the parameters their names.
        optimizer (`torch.optim.Optimizer`): Its state of a sharded parameter must be sharded like the parameter, or a
            single number.
        notes (numbers and strings): Kept for `load_optimizer` to return.

    Raises:
        `ValueError`: if the optimizer keeps what can't be cut anew for another number of ranks, or a parameter that is
            not the model's.
    """
    state = optimizer.state_dict()
    names = _names(model, optimizer)
    params = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    with collective.together("save_optimizer"):  # what is refused may depend on a rank's part
        for place, entries in state["state"].items():
            for key, value in entries.items():
                name = names[place]
                _check_can_be_cut(optimizer, name, key, value, params[name])
                (tensors if isinstance(value, Tensor) else others)[f"{name}/{key}"] = value
    with _quiet() as alone:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), planner=_SavePlanner(), no_dist=alone)
    if alone or dist.get_rank() == 0:
        groups = [{**group, "params": [names[place] for place in group["params"]]} for group in state["param_groups"]]
        torch.save({"groups": groups, "others": others, "notes": notes}, Path(folder) / GROUPS)


def load_optimizer(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[int]]:
    """
    Read what `save_optimizer` has written, on any number of ranks and for any sharding. A collective.

    Args:
        folder (`str` or `os.PathLike`): As in `save_optimizer`.
        model (`nn.Module`): The model whose parameters the optimizer has.
        optimizer (`torch.optim.Optimizer`): Its state and its groups' options become those saved.

    Returns:
        `dict`: The notes that were saved.
        `list[int]`: For each of the optimizer's groups the number of the saved group that it goes on from, for
            `regrouped`.

    Raises:
        `ValueError`: if the optimizer trains other parameters than those saved, or groups some together that had other
            options.
    """
    saved = torch.load(Path(folder) / GROUPS, map_location="cpu", weights_only=True)
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    names = _names(model, optimizer)
    params = dict(model.named_parameters(remove_duplicate=False))
    state = optimizer.state_dict()
    sources = [_source(group, saved["groups"], names, os.fspath(folder)) for group in state["param_groups"]]
    groups = [
        {**(saved["groups"][source] if group["params"] else group), "params": list(group["params"])}
        for source, group in zip(sources, state["param_groups"], strict=True)
    ]

    tensors: dict[str, Tensor] = {}
    filled: dict[int, dict[str, Any]] = {}
    places = {name: place for place, name in names.items()}
    for entry in (*stored, *saved["others"]):
        name, _, key = entry.rpartition("/")
        if name not in places:
            raise ValueError(
                f"{os.fspath(folder)} does not fit the optimizer: {name} was trained, and is not among its parameters "
                "now. Resume with the same trainable parameters as before."
            )
        if entry in stored:
            value: Any = _empty(cast("TensorStorageMetadata", stored[entry]), params[name])
            tensors[entry] = value
        else:
            value = saved["others"][entry]
        filled.setdefault(places[name], {})[key] = value
    with _quiet() as alone:
        dcp.load(tensors, storage_reader=reader, planner=_LoadPlanner(), no_dist=alone)
    optimizer.load_state_dict({"state": filled, "param_groups": groups})
    return saved["notes"], sources


# What torch's schedulers keep one of for each group.
_PER_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}


def regrouped(schedule: Mapping[str, Any], sources: list[int]) -> dict[str, Any]:
    """
    A scheduler's state for an optimizer with other groups: on another mesh `Trainer` makes more or fewer of them.

    Args:
        schedule (mapping): `scheduler.state_dict()` as it was saved.
        sources (`list[int]`): As `load_optimizer` returns it.
    """
    state = dict(schedule)
    for key in _PER_GROUP & state.keys():
        state[key] = [state[key][source] for source in sources]
    if "_schedulers" in state:  # those that one scheduler runs in turn
        state["_schedulers"] = [regrouped(inner, sources) for inner in state["_schedulers"]]
    return state


def pieces(tensor: Tensor) -> list[tuple[torch.Size, Tensor]]:
    """
    The boxes of the whole tensor that this rank holds: where each begins, and a view of its elements.

    Args:
        tensor (`Tensor`): A plain one is one box; a DTensor one or more, or none where this rank holds nothing.
    """
    if not isinstance(tensor, DTensor):
        return [(torch.Size([0] * tensor.ndim), tensor)]
    local = tensor.to_local()
    if local.numel() == 0:
        return []
    boxes = []
    for runs in itertools.product(*(_runs(tensor, dim) for dim in range(tensor.ndim))):
        view = local
        for dim, (_, start, length) in enumerate(runs):
            view = view.narrow(dim, start, length)
        boxes.append((torch.Size([offset for offset, _, _ in runs]), view))
    return boxes


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """Stretches of one dimension that are adjacent in the whole and here: (place in the whole, place here, length)."""
    index = torch.arange(tensor.shape[dim])
    mesh = tensor.device_mesh
    for size, rank, placement in zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True):
        if not isinstance(placement, (Shard, _StridedShard)) or placement.dim % tensor.ndim != dim:
            continue
        blocks = index.chunk(int(placement.split_factor)) if isinstance(placement, _StridedShard) else (index,)
        index = torch.cat([_nth_chunk(block, size, rank) for block in blocks])
    cuts = [0, *(torch.where(index.diff() != 1)[0] + 1).tolist(), len(index)]
    return [(int(index[start]), start, end - start) for start, end in itertools.pairwise(cuts)]


def _nth_chunk(index: Tensor, n_chunks: int, n: int) -> Tensor:
    # torch makes fewer chunks than asked where there is too little to share out.
    chunks = index.chunk(n_chunks)
    return chunks[n] if n < len(chunks) else index[:0]


def _chunk(offsets: torch.Size, view: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets, view.size())


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> planner.SavePlan:
        self._views: dict[tuple[str, torch.Size | None], Tensor] = {}
        items = []
        for name, tensor in self.state_dict.items():
            for offsets, view in pieces(tensor):
                self._views[name, offsets] = view
                data = planner.TensorWriteData(
                    _chunk(offsets, view), TensorProperties.create_from_tensor(view), tensor.size()
                )
                # Ranks that hold the same piece plan it with the same index; DCP lets one of them write it.
                index = MetadataIndex(name, offsets)
                items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        self.plan = planner.SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._views[index.fqn, index.offset]


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> planner.LoadPlan:
        assert self.metadata is not None, "a reader sets the planner up with what it has read"
        self._views: dict[tuple[str, torch.Size | None], Tensor] = {}
        items = []
        for name, tensor in self.state_dict.items():
            boxes = pieces(tensor)
            self._views |= {(name, offsets): view for offsets, view in boxes}
            stored = cast("TensorStorageMetadata", self.metadata.state_dict_metadata[name])
            items += create_read_items_for_chunk_list(name, stored, [_chunk(*box) for box in boxes])
        return planner.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._views[index.fqn, index.offset]


@contextmanager
def _quiet() -> Iterator[bool]:
    """Whether this process is alone: DCP then warns that it takes it for that, which is right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()


def strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters that are not the model's, e.g. the stand-in of one that steps in the backward."""
    own = {id(param) for param in model.parameters()}
    return [param for group in optimizer.param_groups for param in group["params"] if id(param) not in own]


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The name of each parameter of the optimizer, by its number in `optimizer.state_dict()`."""
    others = strangers(model, optimizer)
    if others:
        raise ValueError(
            f"{_kind(optimizer)} has {len(others)} parameters that are not the model's (shapes "
            f"{[tuple(param.shape) for param in others[:3]]}): make the optimizer from `model.parameters()` of the "
            "model that is saved or resumed."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {place: names[id(param)] for place, param in enumerate(params)}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer).__name__


def _check_can_be_cut(optimizer: torch.optim.Optimizer, name: str, key: str, value: Any, param: Tensor) -> None:
    if not isinstance(param, DTensor) or (isinstance(value, Tensor) and value.numel() == 1):
        return
    if not isinstance(value, Tensor):
        what, fits = f"a {type(value).__name__}", isinstance(value, _PLAIN)
    else:
        what = f"{type(value).__name__} of shape {tuple(value.shape)}"
        fits = isinstance(value, DTensor) and value.shape == param.shape
    if not fits:
        raise ValueError(
            f"{_kind(optimizer)} keeps {what} as {key!r} of {name}, which can't be saved so that another "
            "number of ranks could read it: use an optimizer whose state has the parameters' shapes, as AdamW's and "
            "SGD's has, or TrainingArguments(save_only_model=True)."
        )


def _empty(stored: TensorStorageMetadata, param: Tensor) -> Tensor:
    dtype = stored.properties.dtype
    if stored.size == param.shape:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    # A step count and the like: the optimizer puts it where it wants it.
    return torch.empty(stored.size, dtype=dtype)


def _source(group: Mapping[str, Any], saved: list[dict[str, Any]], names: Mapping[int, str], folder: str) -> int:
    """The number of the saved group whose options are those of each of this group's parameters."""
    number = {name: i for i, other in enumerate(saved) for name in other["params"]}
    own = [names[place] for place in group["params"]]
    new = [name for name in own if name not in number]
    if new:
        raise ValueError(
            f"{folder} does not fit the optimizer: it knows nothing of {len(new)} of the optimizer's parameters, "
            f"{new[0]} among them. Resume with the same trainable parameters as before."
        )
    options = [{key: value for key, value in other.items() if key != "params"} for other in saved]
    for name in own:
        if options[number[name]] != options[number[own[0]]]:
            raise ValueError(
                f"{folder} does not fit the optimizer: {own[0]} and {name} are in one group, and each was saved with "
                "options (learning rate, weight decay, ...) of its own. Make the optimizer's groups as before."
            )
    return number[own[0]] if own else 0
