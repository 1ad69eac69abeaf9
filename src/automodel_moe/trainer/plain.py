"""What `Trainer` saves and resumes, for a loop of one's own: two functions that every rank calls."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME

from ..checkpoint.reload import reload_weights
from . import collective
from .folders import OPTIMIZER, SAVING, put_in_place
from .state import load_optimizer, regrouped, save_optimizer


def save_training_state(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    **progress: int | float | str,
) -> None:
    r"""
    Save all that [`load_training_state`] needs to go on as if training had never stopped. Every rank must call it.

    The model is written in its Hub layout: `from_pretrained(folder)` and serving engines read it too. The folder gets
    its name when all ranks have written their part, so that a killed save leaves an earlier one as it was.

    Args:
        folder (`str` or `os.PathLike`):
            On a filesystem that all ranks share. One that is there already is replaced.
        model (`PreTrainedModel`):
            As [`MoEAutoModel`] returned it.
        optimizer (`torch.optim.Optimizer`):
            One whose state has the parameters' shapes, e.g. `AdamW`, as it is or prepared by accelerate.
        scheduler (*optional*):
            A learning rate scheduler with a `state_dict()`.
        progress (numbers and strings, *optional*):
            E.g. `step=100`: [`load_training_state`] returns them.

    Raises:
        `ValueError`: for a model or an optimizer that can't be saved so.
        `RuntimeError`: on every rank, if one rank fails or does not call it.

    Examples:

    ```python
    >>> save_training_state(f"run/step-{step}", model, optimizer, scheduler, step=step)
    >>> step = load_training_state("run/step-100", model, optimizer, scheduler)["step"]
    ```
    """
    own, folder = _whole_model(model), Path(folder).absolute()
    saving, first = folder.parent / SAVING, not dist.is_initialized() or dist.get_rank() == 0
    whole = saving / folder.name
    call = "save_training_state"
    collective.meet(call, vars(own)["automodel_moe"].call_timeout, "Call it on every rank.")
    with collective.together(call):
        if first:
            shutil.rmtree(saving, ignore_errors=True)
            whole.mkdir(parents=True)
    with collective.together(call):
        if not whole.is_dir():
            raise ValueError(
                f"folder={os.fspath(folder)!r} is not on a filesystem that all ranks share: this rank doesn't see "
                "what rank 0 writes there."
            )
    with collective.together(call):
        own.save_pretrained(whole, is_main_process=first)
        save_optimizer(whole / OPTIMIZER, model, optimizer, **progress)
        if first and scheduler is not None:
            torch.save(scheduler.state_dict(), whole / SCHEDULER_NAME)
        torch.save(_random_state(), whole / _random_file())
    with collective.together(call):
        if first:
            put_in_place(saving, folder)


def load_training_state(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None
) -> dict[str, Any]:
    """
    Give the model, the optimizer, the scheduler and the random generators what [`save_training_state`] has saved.

    Every rank must call it. Their number, and `ep_size`, may differ from what they were; with another number the
    random generators are left as they are.

    Args:
        folder (`str` or `os.PathLike`): As it was saved.
        model (`PreTrainedModel`): Its weights are read in place, each rank its own part.
        optimizer (`torch.optim.Optimizer`): For the same parameters as before.
        scheduler (*optional*): If one was saved.

    Returns:
        `dict`: The `progress` that was saved.

    Raises:
        `CheckpointError`: for weights that are truncated, missing or of another shape.
        `ValueError`: if the optimizer has other parameters than the one that was saved.
    """
    folder = Path(folder)
    reload_weights(_whole_model(model), folder)
    progress, sources = load_optimizer(folder / OPTIMIZER, model, optimizer)
    if scheduler is not None:
        schedule = torch.load(folder / SCHEDULER_NAME, weights_only=True)
        scheduler.load_state_dict(regrouped(schedule, sources))
    generators = folder / _random_file()
    if generators.is_file():
        _set_random_state(torch.load(generators, weights_only=True))
    return progress


def _whole_model(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel) or "automodel_moe" not in vars(model) or model._hf_peft_config_loaded:
        raise ValueError(
            f"model={type(model).__name__} is not a model as MoEAutoModel returned it. Save adapters with PEFT's own "
            "save_pretrained, and compile or wrap the model only where it is called."
        )
    return model


def _random_file() -> str:
    # The number of ranks is in the name: on another number the generators' states mean nothing.
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return f"rng_state_{rank}_of_{world}.pth"


def _random_state() -> dict[str, Any]:
    # numpy's array as a tensor, so that the file can be read with weights_only=True.
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    state["numpy"] = (name, torch.tensor(keys), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
