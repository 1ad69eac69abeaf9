"""Read a checkpoint into a model that is there already: in place, and of each tensor this rank's part alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .guard import guarded
from .headers import CheckpointError
from .load import examine, same_on_every_rank

_SHOWN = 5


def reload_weights(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """
    Give every parameter and buffer the value that `model.save_pretrained(folder)` has saved. A collective.

    Parameters stay the objects that they are, so that an optimizer made before keeps them.

    Args:
        model (`PreTrainedModel`): As `from_pretrained` or `from_config` of this library returned it.
        folder (`str` or `os.PathLike`): With safetensors files in the model's Hub layout.

    Raises:
        `CheckpointError`: on every rank, before a weight is read, for a truncated file and for experts that are
            missing, in excess or of another shape; afterwards, for any other weight that was not there or did not fit.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward may have left it whole, on parameters that are dropped when it is cut anew.
            module.reshard()
    own = vars(model)
    conversions = own["_weight_conversions"]
    # What the last load used is what saving has reverted. No device map: values are read to the CPU, one conversion at
    # a time, and not the whole model to the device that holds one already.
    config = LoadStateDictConfig(dtype=model.dtype, weight_mapping=deepcopy(conversions))
    sharded = any(isinstance(param, DTensor) for param in model.parameters())
    with same_on_every_rank(sharded):
        files = weight_files(folder)
    _, _, guard = examine(model, None, files, config)
    try:
        with torch.no_grad(), guarded(model, guard, store=_copy_in):
            info, _ = model._load_pretrained_model(model, None, files, config)
    finally:
        own["_weight_conversions"] = conversions
    with same_on_every_rank(sharded):
        _check_filled(model, folder, info.missing_keys - set(guard.empty), info.mismatched_keys)


def weight_files(folder: str | os.PathLike) -> list[str]:
    """
    The safetensors files that make up the model in `folder`.

    Raises:
        `CheckpointError`: if there is none, one that the index names is missing, or the index can't be read.
    """
    folder = Path(folder)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index} is no index ({error}): download or copy it again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} is incomplete: it has no {', '.join(missing[:_SHOWN])}.")
    return [os.fspath(folder / name) for name in names]


def _check_filled(
    model: PreTrainedModel, folder: str | os.PathLike, missing: Iterable[str], mismatched: Iterable[tuple]
) -> None:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    left = set(missing) - set(model._keys_to_ignore_on_save or ())
    for target, source in vars(model)["all_tied_weights_keys"].items():
        if source not in left and tensors.get(target) is tensors.get(source):
            left.discard(target)
    problems = [f"{name} is not there" for name in sorted(left)]
    problems += [f"{name} has shape {tuple(got)}, not {tuple(wanted)}" for name, got, wanted in sorted(mismatched)]
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError(f"{folder} does not fill the model:\n  " + "\n  ".join(problems[:_SHOWN] + more))


def _copy_in(model, target_name, param_value, loading_info, hf_quantizer) -> None:
    """What transformers' `set_param_for_module` does, for a parameter that keeps its identity."""
    module, _, name = target_name.rpartition(".")
    here: Tensor = getattr(model.get_submodule(module), name)
    local = here.to_local() if isinstance(here, DTensor) else here
    loading_info.missing_keys.discard(target_name)
    if local.shape != param_value.shape:
        loading_info.mismatched_keys.add((target_name, param_value.shape, local.shape))
    else:
        local.copy_(param_value)
