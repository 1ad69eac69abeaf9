"""`save_pretrained` of a sharded model, in the layout that its checkpoint came in.

transformers 5.24 gathers the whole model, then converts the whole of it: two copies of most weights at the peak. It
ignores a `state_dict=` that the caller passed, writes a tied weight twice, and leaves the other ranks waiting when the
writing one fails. Here each tensor is gathered, converted and let go before the next one.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)

from .guard import Split
from .headers import CheckpointError, read_header

# Of a sharded tensor no rank holds more than this much that it doesn't own, while it is gathered.
_PIECE_BYTES = 256 * 2**20


def prepare_save(model: PreTrainedModel) -> None:
    """
    Make `model.save_pretrained` (and with it `push_to_hub`) write the checkpoint's own layout from any sharding.

    Call it once, on a loaded model; only this instance changes. Every rank must call `save_pretrained`; rank 0 writes,
    and an error on one rank is raised on all. It holds one copy of the model on rank 0's CPU and no more, and on the
    other ranks one piece of one tensor.
    """
    own = vars(model)
    # Partials of the model, so that a deep copy or a pickle of it saves itself and not the original.
    own["save_pretrained"] = functools.partial(_save_pretrained, model)
    own["gather_sharded_state_dict_for_save"] = functools.partial(_gather_for_save, model)
    own["barrier_after_gathered_checkpoint_save"] = functools.partial(_no_barrier, model)
    own.setdefault("_kept_from", {})
    if "_weight_conversions" not in own:
        # A dequantized source leaves none. These are the model type's own; which prefix the keys had isn't known.
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        own["_weight_conversions"] = [c for c in conversions if not isinstance(c, PrefixChange)]


def _save_pretrained(self: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    original = type(self).save_pretrained
    call = inspect.signature(original).bind(self, save_directory, *args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    with _error_on_every_rank(self):
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file.")
        if arguments["distributed_checkpoint"] or self._hf_peft_config_loaded:
            original(*call.args, **call.kwargs)
            return
        state_dict = arguments["state_dict"]
        names = _names_to_save(self, self.state_dict() if state_dict is None else state_dict)
        writes = self.should_save_on_this_rank(arguments["is_main_process"])
        layout = hub_layout(self, names) if arguments["save_original_format"] else gathered(names)
        tensors = {name: tensor for name, tensor in layout if writes}
        arguments["state_dict"], arguments["save_original_format"] = tensors, False
        keys = set(tensors)
        if not writes:
            original(*call.args, **call.kwargs)
            return
        folder, variant = Path(save_directory), arguments["variant"]
        if arguments["push_to_hub"]:
            # It uploads what has changed in the folder, and so must write there.
            original(*call.args, **call.kwargs)
            _check_written(folder, variant, keys)
            return
        # Written aside and moved in when it is whole: a save that fails leaves the folder as it was.
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as aside:
            arguments["save_directory"] = aside
            original(*call.args, **call.kwargs)
            _check_written(Path(aside), variant, keys)
            _move_in(Path(aside), folder, variant)


def _gather_for_save(self, model_to_save, state_dict, distributed_config, *, save_on_this_rank=True):
    # Whole already, except for a PEFT adapter's tensors.
    return {name: tensor for name, tensor in gathered(state_dict) if save_on_this_rank}


def _no_barrier(self, distributed_config) -> None:
    # The ranks meet in `_error_on_every_rank`, which a failing writer reaches too.
    return None


def gathered(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and whole value of each entry, on rank 0's CPU; on the other ranks the value is `None`. A collective."""
    for name, value in state_dict.items():
        yield name, _whole(value)


def hub_layout(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """
    Key and tensor of each entry of the checkpoint that the model was loaded from, one conversion at a time.

    Args:
        model (`PreTrainedModel`): Its `_weight_conversions` say how it was loaded.
        state_dict (mapping): Whole tensors or DTensors by parameter name. With DTensors every rank must iterate.

    Yields:
        `(str, Tensor)` on rank 0, on the CPU; nothing on the other ranks.
    """
    transforms = [transform.reverse_transform() for transform in reversed(vars(model)["_weight_conversions"])]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    kept_from: dict[str, torch.dtype] = vars(model)["_kept_from"]

    groups: dict[str, list[tuple[str, str | None]]] = {}
    # In this order, and all names before the first conversion: some renamings depend on what they have seen.
    for name in sorted(state_dict, key=dot_natural_key):
        key, pattern = apply_converters(name, converters)
        if pattern is None:
            key = apply_renamings(name, renamings)
        groups.setdefault(key, []).append((name, pattern))

    problem: Exception | None = None
    for key, members in groups.items():
        values = [_whole(state_dict[name]) for name, _ in members]
        if not _is_writer() or problem is not None:
            continue
        try:
            converted = list(_convert(model, key, members, values, by_pattern, renamings, kept_from))
        except Exception as error:
            # The other ranks go on to the next gather: take part in all of them before anyone hears of it.
            problem = error
            continue
        yield from converted
    if problem is not None:
        raise problem


def _convert(
    model: PreTrainedModel,
    key: str,
    members: list[tuple[str, str | None]],
    values: list[Any],
    by_pattern: Mapping[str, WeightConverter],
    renamings: list[WeightRenaming],
    kept_from: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    """Key and tensor of each entry that one group of parameters becomes. `values` is emptied on the way."""
    pattern = members[0][1]
    if pattern is None:
        yield key, _as_stored(values[0], kept_from.get(key))
        return
    converter = deepcopy(by_pattern[pattern])
    for name, member_pattern in members:
        converter.add_tensor(key, name, cast("str", member_pattern), values.pop(0))
    for target, tensor in converter.convert(key, model=model, config=model.config).items():
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        target = apply_renamings(target, renamings)
        yield target, _as_stored(_own(tensor), kept_from.get(target))


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _as_stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In the checkpoint's dtype where the model computes in another one, unless that would change a value."""
    if dtype is None:
        return tensor
    stored = tensor.to(dtype)
    return stored if torch.equal(stored.to(tensor.dtype), tensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: a view of a larger one would count, and live on, as the larger one."""
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


@torch.no_grad()
def _whole(value: Any) -> Any:
    """A value of a state dict, whole, on rank 0's CPU; `None` on the other ranks. A collective for a DTensor."""
    if not isinstance(value, DTensor):
        if not _is_writer():
            return None
        return value.detach().cpu() if isinstance(value, Tensor) else value
    local, mesh, placements = value.to_local(), value.device_mesh, value.placements
    cut = Split.of(value).parts
    dim = next((dim for dim in range(value.ndim) if dim not in cut), None)
    n_pieces = math.ceil(value.numel() * value.itemsize / _PIECE_BYTES)
    if dim is None or n_pieces <= 1:
        full = value.full_tensor()
        return full.cpu() if _is_writer() else None
    out = torch.empty(value.shape, dtype=value.dtype, device="cpu") if _is_writer() else None
    step = math.ceil(value.shape[dim] / n_pieces)
    for start in range(0, value.shape[dim], step):
        size = min(step, value.shape[dim] - start)
        shape = torch.Size((*value.shape[:dim], size, *value.shape[dim + 1 :]))
        stride = torch.empty(shape, device="meta").stride()
        part = local.narrow(dim, start, size).contiguous()
        piece = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()
        if out is not None:
            out.narrow(dim, start, size).copy_(piece)
    return out


def _names_to_save(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a checkpoint holds: not those the model never saves, and of a tied weight its source alone."""
    drop = set(model._keys_to_ignore_on_save or ())
    params: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for target, source in vars(model)["all_tied_weights_keys"].items():
        # Gathered or passed in, the two are two tensors; in the model they are one as long as they are tied.
        if source in state_dict and target in params and params[target] is params.get(source):
            drop.add(target)
    return {name: value for name, value in state_dict.items() if name not in drop}


@contextmanager
def _error_on_every_rank(model: nn.Module) -> Iterator[None]:
    """Where ranks share a model, leave together; raise on each of them what one of them raised."""
    shared = dist.is_initialized() and any(isinstance(param, DTensor) for param in model.parameters())
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if not shared:
            raise
        problem = error
    if not shared:
        return
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, message in enumerate(problems):
        if message is not None:
            raise RuntimeError(f"save_pretrained failed on rank {rank}: {message}")


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    dot = "" if variant is None else f".{re.escape(variant)}"
    mine = re.compile(rf"model{dot}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{dot}\.json")
    return [path for path in folder.glob("model*") if mine.fullmatch(path.name)] if folder.is_dir() else []


def _move_in(aside: Path, folder: Path, variant: str | None) -> None:
    """Put the files in place, the index last; what an earlier save left would be taken for a part of this one."""
    new = sorted(aside.iterdir(), key=lambda path: ".index." in path.name)
    for path in _weight_files(folder, variant):
        if path.name not in {file.name for file in new}:
            path.unlink()
    for path in new:
        path.replace(folder / path.name)


def _check_written(folder: Path, variant: str | None, keys: set[str]) -> None:
    files = [path for path in _weight_files(folder, variant) if path.suffix == ".safetensors"]
    written = {key for path in files for key in read_header(path)}
    if written != keys:
        differ = ", ".join(sorted(written ^ keys)[:5])
        raise CheckpointError(f"{folder} does not hold what was to be saved: {differ}")
