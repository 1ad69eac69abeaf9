"""`save_pretrained` of a sharded model, in the layout that its checkpoint came in.

transformers 5.24 gathers the whole model on one rank, then converts the whole of it: two copies of most weights at the
peak, on one host. It ignores a `state_dict=` that the caller passed, writes a tied weight twice, and leaves the other
ranks waiting when the writing one fails. Here every rank converts and writes what it holds.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.hub import create_and_tag_model_card

from ..say import say_once
from ..trainer.collective import together
from .commit import commit, drop_leftovers, weight_files, write_synced
from .headers import CheckpointError, read_header
from .layout import Layout, index_bytes, lay_out
from .reverse import Conversion, changed_by_dtype, conversions_of, entries_to_save, reverse, settle_dtypes
from .shares import fetch
from .writer import write_own_slices, write_streamed

_CALL = "save_pretrained"
_NONCE = "nonce"


def prepare_save(model: PreTrainedModel) -> None:
    """
    Make `model.save_pretrained` (and with it `push_to_hub`) write the checkpoint's own layout from any sharding.

    Call it once, on a loaded model; only this instance changes. Every rank must call `save_pretrained`. Each writes
    its own slices and holds little more than its parameters meanwhile; an error on one rank is raised on all. The
    folder holds the earlier weights until the new ones are complete on disk, except where transformers itself writes:
    adapters, quantized models, `distributed_checkpoint=True`, and `push_to_hub=True` in one process.
    """
    own = vars(model)
    # Partials of the model, so that a deep copy or a pickle of it saves itself and not the original.
    own["save_pretrained"] = functools.partial(_save_pretrained, model)
    own["gather_sharded_state_dict_for_save"] = functools.partial(_gather_for_save, model)
    own["barrier_after_gathered_checkpoint_save"] = functools.partial(_no_barrier, model)
    own.setdefault("_kept_from", {})
    own["_weight_conversions"] = conversions_of(model)


def _save_pretrained(self: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(type(self).save_pretrained).bind(self, save_directory, *args, **kwargs)
    call.apply_defaults()
    shared = _is_shared(self)
    with together(_CALL) if shared else nullcontext():
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file.")
    if call.arguments["distributed_checkpoint"] or self._hf_peft_config_loaded:
        with together(_CALL, slow=True) if shared else nullcontext():
            type(self).save_pretrained(*call.args, **call.kwargs)
    elif shared:
        _save_together(self, call)
    else:
        _save_alone(self, call)


def _is_shared(model: nn.Module) -> bool:
    return dist.is_initialized() and any(isinstance(param, DTensor) for param in model.parameters())


def _gather_for_save(self, model_to_save, state_dict, distributed_config, *, save_on_this_rank=True):
    # An adapter's tensors; all others are whole already.
    whole = {name: fetch(tensor, 0, "cpu") for name, tensor in state_dict.items()}
    return whole if save_on_this_rank else {}


def _no_barrier(self, distributed_config) -> None:
    # The ranks meet in `together`, which a failing writer reaches too.
    return None


def _save_alone(model: PreTrainedModel, call: inspect.BoundArguments) -> None:
    """One process: transformers' own save, written aside first, in the dtypes that the checkpoint had."""
    arguments = call.arguments
    original = type(model).save_pretrained
    if vars(model).get("hf_quantizer") is not None:
        original(*call.args, **call.kwargs)
        return
    passed, kept_from = arguments["state_dict"], vars(model)["_kept_from"]
    state = entries_to_save(model, model.state_dict() if passed is None else passed)
    conversions = _reverse(model, _describe(state), arguments["save_original_format"])
    settle_dtypes(conversions, kept_from, changed_by_dtype(conversions, kept_from, state))
    for conversion in conversions:
        if conversion.stored is not None:
            state |= {name: state[name].to(conversion.stored) for name in conversion.names}
    keys = {key for conversion in conversions for key, _ in conversion.outputs}
    arguments["state_dict"] = state
    folder, variant = Path(arguments["save_directory"]), arguments["variant"]
    if not model.should_save_on_this_rank(arguments["is_main_process"]) or arguments["push_to_hub"]:
        # It uploads what has changed in the folder, and so must write there.
        original(*call.args, **call.kwargs)
        return
    folder.mkdir(parents=True, exist_ok=True)
    drop_leftovers(folder)
    arguments["save_directory"] = aside = tempfile.mkdtemp(prefix=".saving-", dir=folder)
    try:
        original(*call.args, **call.kwargs)
        _check_written(Path(aside), variant, keys)
        commit(Path(aside), folder, variant)
    finally:
        drop_leftovers(folder)


class _Entry(NamedTuple):
    """One entry of a state dict, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool


@dataclass(frozen=True)
class _Job:
    """What rank 0 decides for all; each rank has arguments of its own, e.g. another temporary folder."""

    entries: dict[str, _Entry]
    passed: bool  # the state dict: plain tensors of such a one may be there on rank 0 alone
    original_format: bool
    max_shard_size: int | str
    variant: str | None
    aside: str
    nonce: str


def _save_together(model: PreTrainedModel, call: inspect.BoundArguments) -> None:
    arguments, leads = call.arguments, dist.get_rank() == 0
    passed = arguments["state_dict"]
    folder = Path(arguments["save_directory"]).absolute()
    kept_from = vars(model)["_kept_from"]
    job: _Job | None = None
    try:
        with together(_CALL):
            state = entries_to_save(model, model.state_dict() if passed is None else passed)
            if leads and arguments["is_main_process"]:
                before = _files(model, folder)
                job = _begin(folder, state, arguments)
        job_of_all: _Job | None = _from_leader(job)
        if job_of_all is None:
            return
        aside = Path(job_of_all.aside)
        with together(_CALL):
            _check_entries(job_of_all.entries, state)
            conversions = _reverse(model, job_of_all.entries, job_of_all.original_format)
            changed = changed_by_dtype(conversions, kept_from, state)
        changed = [key for keys in _from_all(changed) for key in keys]
        blind = [rank for rank, sees in enumerate(_from_all(_sees(job_of_all))) if not sees]
        with together(_CALL):
            settle_dtypes(conversions, kept_from, changed)
            layout = lay_out(conversions, job_of_all.max_shard_size, job_of_all.variant, model.num_parameters())
            hub = _save_all_but_weights(model, call, aside, folder) if leads else {}
        with together(_CALL, slow=True):
            if blind:
                say_once(
                    f"save_pretrained: rank(s) {blind} do not see rank 0's {folder}, so rank 0 writes everything, "
                    "piece by piece; a folder on a file system that all ranks share is written by all of them at once."
                )
                write_streamed(aside, layout, conversions, state)
            else:
                write_own_slices(aside, layout, conversions, state, copies=not job_of_all.passed)
        with together(_CALL, slow=True):
            if leads:
                _finish(aside, folder, layout, job_of_all.variant)
                if hub:
                    _upload(model, folder, before, **hub)
    finally:
        if job is not None:
            drop_leftovers(folder)


def _files(model: PreTrainedModel, folder: Path) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    drop_leftovers(folder)
    return model._get_files_timestamps(folder)


def _begin(folder: Path, state: Mapping[str, Any], arguments: Mapping[str, Any]) -> _Job:
    entries = _describe(state)
    aside = tempfile.mkdtemp(prefix=".saving-", dir=folder)
    nonce = secrets.token_hex(16)
    write_synced(Path(aside, _NONCE), nonce.encode())
    return _Job(
        entries=entries,
        passed=arguments["state_dict"] is not None,
        original_format=arguments["save_original_format"],
        max_shard_size=arguments["max_shard_size"],
        variant=arguments["variant"],
        aside=aside,
        nonce=nonce,
    )


def _finish(aside: Path, folder: Path, layout: Layout, variant: str | None) -> None:
    if layout.index_name is not None:
        write_synced(aside / layout.index_name, index_bytes(layout.index))
    (aside / _NONCE).unlink()
    _check_written(aside, variant, set(layout.places))
    commit(aside, folder, variant)


def _reverse(model: PreTrainedModel, entries: Mapping[str, _Entry], original_format: bool = True) -> list[Conversion]:
    shapes = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    return reverse(model, shapes, original_format)


def _describe(state: Mapping[str, Any]) -> dict[str, _Entry]:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"state_dict[{name!r}] is a {type(value).__name__}; a checkpoint holds tensors alone.")
    return {name: _Entry(tuple(value.shape), value.dtype, isinstance(value, DTensor)) for name, value in state.items()}


def _check_entries(entries: Mapping[str, _Entry], state: Mapping[str, Any]) -> None:
    """That this rank has its part of every sharded tensor that rank 0 has."""
    for name, entry in entries.items():
        value = state.get(name)
        if entry.sharded and not (isinstance(value, DTensor) and tuple(value.shape) == entry.shape):
            raise ValueError(
                f"state_dict[{name!r}] is a DTensor on rank 0 and not on rank {dist.get_rank()}: pass DTensors on "
                "every rank, or whole tensors on rank 0."
            )


def _sees(job: _Job) -> bool:
    try:
        return Path(job.aside, _NONCE).read_text(encoding="utf-8") == job.nonce
    except OSError:
        return False


def _save_all_but_weights(
    model: PreTrainedModel, call: inspect.BoundArguments, aside: Path, folder: Path
) -> dict[str, Any]:
    """Have transformers write the configuration and what belongs to it. Returns what an upload needs, if any."""
    hub: dict[str, Any] = {}

    def instead_of_weights(model_to_save, save_directory, *, push_to_hub, save_on_this_rank, **options):
        if push_to_hub:
            hub.update(options)

    arguments = call.arguments
    arguments |= {"save_directory": aside, "state_dict": {}, "distributed_checkpoint": True}
    if arguments["push_to_hub"]:
        arguments["kwargs"] = {"repo_id": folder.name} | arguments.get("kwargs", {})
    # This is the call in which transformers would write a distributed checkpoint; all else is done before it.
    vars(model)["save_distributed_checkpoint"] = instead_of_weights
    try:
        type(model).save_pretrained(*call.args, **call.kwargs)
    finally:
        del vars(model)["save_distributed_checkpoint"]
    return hub


def _upload(
    model: PreTrainedModel,
    folder: Path,
    before: dict[str, float],
    repo_id: str,
    commit_message: str | None,
    create_pr: bool,
    token: str | None,
) -> None:
    create_and_tag_model_card(repo_id, model.model_tags, token=token).save(folder / "README.md")
    model._upload_modified_files(folder, repo_id, before, commit_message, token, create_pr)


def _from_leader(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def _from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _check_written(folder: Path, variant: str | None, keys: set[str]) -> None:
    files = [path for path in weight_files(folder, variant) if path.suffix == ".safetensors"]
    written = {key for path in files for key in read_header(path)}
    if written != keys:
        differ = ", ".join(sorted(written ^ keys)[:5])
        raise CheckpointError(f"{folder} does not hold what was to be saved: {differ}")
