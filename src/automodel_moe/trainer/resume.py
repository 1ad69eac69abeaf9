"""transformers' `Trainer` for models of this library: checkpoints that resume as if training had never stopped.

transformers 5.24 refuses to save the optimizer of a model that was sharded at load, and resumes a MoE model with
untrained experts, since it looks for the checkpoint's keys among the model's fused parameters
(huggingface/transformers#48805). The patches below act only where a `Trainer` trains a model that this library loaded.
Set AUTOMODEL_MOE_PATCH_TRAINER=0 to leave `Trainer` alone.

A checkpoint gets its name when it is whole on all ranks (see `folders.py`), and only then are older ones deleted.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints
from transformers.utils import logging

from ..checkpoint.headers import CheckpointError
from ..checkpoint.reload import reload_weights
from . import collective
from .callback import callbacks
from .folders import OPTIMIZER, SAVING, check_shared, damage, last_whole, put_in_place
from .state import load_optimizer, regrouped, save_optimizer, strangers

logger = logging.get_logger(__name__)

SWITCH = "AUTOMODEL_MOE_PATCH_TRAINER"


def install() -> None:
    """Install the patches once a process."""
    if os.environ.get(SWITCH, "1") == "0" or Version(transformers.__version__) >= Version("5.25"):
        return
    if vars(Trainer.__init__).get("automodel_moe"):
        return
    for name, method in _METHODS.items():
        setattr(Trainer, name, _patch(vars(Trainer)[name], method))


def _patch(original: Any, method: Any) -> Any:
    @functools.wraps(original)
    def patched(self, *args, **kwargs):
        return method(original, self, *args, **kwargs)

    vars(patched)["automodel_moe"] = True
    return patched


def own_model(model: nn.Module | None) -> PreTrainedModel | None:
    """The model that this library loaded, among the modules of `model`: a PEFT model has it within."""
    modules = () if model is None else model.modules()
    return next((m for m in modules if isinstance(m, PreTrainedModel) and "automodel_moe" in vars(m)), None)


def _saves_whole(model: nn.Module) -> bool:
    """Whether its checkpoints hold all of its weights. Those of a model with adapters hold the adapters alone."""
    return own_model(model) is model and not model._hf_peft_config_loaded


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(param, DTensor) for param in model.parameters())


# --- Trainer's methods, as they are for a model of this library ------------------------------------------------------


def _init(original, self, *args, **kwargs):
    call = inspect.signature(original).bind(self, *args, **kwargs)
    if own_model(call.arguments.get("model")) is None:
        original(self, *args, **kwargs)
    else:
        given = call.arguments.get("args") or TrainingArguments(output_dir="tmp_trainer")
        call.arguments["args"] = given
        # It refuses a model that was sharded at load, unless no optimizer is ever to be saved.
        asked, given.save_only_model = given.save_only_model, True
        try:
            original(*call.args, **call.kwargs)
        finally:
            given.save_only_model = asked
    model = own_model(self.model)
    if model is not None:
        # Before the callbacks that report logs: ours add to them.
        self.callback_handler.callbacks[:0] = callbacks(model)


def _train(original, self, resume_from_checkpoint=None, *args, **kwargs):
    if own_model(self.model) is not None:
        if _is_sharded(self.model) and self.args.save_strategy != SaveStrategy.NO and not self.args.save_only_model:
            check_shared(Path(self.args.output_dir))
        if resume_from_checkpoint:
            resume_from_checkpoint = _checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint)
    return original(self, resume_from_checkpoint, *args, **kwargs)


def _save_checkpoint(original, self, model, trial):
    own = own_model(self.model)
    if own is None:
        original(self, model, trial)
        return
    args, state = self.args, self.state
    folder = Path(self._get_output_dir(trial=trial))
    saving, name = folder / SAVING, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    call, timeout = "Trainer._save_checkpoint", own.automodel_moe.call_timeout
    collective.meet(call, timeout)
    first = self.is_world_process_zero()
    with collective.together(call):
        if first:
            shutil.rmtree(saving, ignore_errors=True)
    with collective.together(call):
        # An upload goes on while training does, so it must find the folder under its last name.
        aside = {"_get_output_dir": lambda trial=None: os.fspath(saving), "_push_from_checkpoint": lambda folder: None}
        with _replaced(self, aside):
            original(self, model, trial)
        best = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if state.best_global_step and (best.name == name or best.is_dir()):
            state.best_model_checkpoint = os.fspath(best)
            if first:
                state.save_to_json(os.fspath(saving / name / TRAINER_STATE_NAME))
    with collective.together(call):
        if first:
            put_in_place(saving, folder / name)
            rotate_checkpoints(
                output_dir=os.fspath(folder),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )
    if args.push_to_hub:
        self._push_from_checkpoint(os.fspath(folder / name))


def _save_optimizer_and_scheduler(original, self, output_dir):
    model = own_model(self.model)
    if model is None or (not _is_sharded(self.model) and strangers(self.model, self.optimizer)):
        original(self, output_dir)
        return
    # A rank that failed before it came here is met by the others no longer than this.
    collective.meet("Trainer._save_optimizer_and_scheduler", model.automodel_moe.call_timeout)
    batch = self.get_total_train_batch_size(self.args)
    save_optimizer(Path(output_dir) / OPTIMIZER, self.model, self.optimizer, global_batch=batch)
    if self.args.should_save:
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)


def _load_from_checkpoint(original, self, resume_from_checkpoint, model=None):
    if model is None and _saves_whole(self.model):
        reload_weights(self.model, resume_from_checkpoint)
    else:
        original(self, resume_from_checkpoint, model)


def _load_best_model(original, self):
    if _saves_whole(self.model):
        logger.info("Loading best model from %s", self.state.best_model_checkpoint)
        reload_weights(self.model, self.state.best_model_checkpoint)
    else:
        original(self)


def _load_optimizer_and_scheduler(original, self, checkpoint):
    folder = None if checkpoint is None else Path(checkpoint) / OPTIMIZER
    if own_model(self.model) is None or folder is None:
        original(self, checkpoint)
        return
    if not folder.is_dir():
        if _is_sharded(self.model):
            logger.warning(
                "%s holds no optimizer state that a sharded model could read: the optimizer and the learning rate's "
                "schedule start anew.",
                checkpoint,
            )
        else:
            # It may be plain Trainer's.
            original(self, checkpoint)
        return
    notes, sources = load_optimizer(folder, self.model, self.optimizer)
    schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
    self.lr_scheduler.load_state_dict(regrouped(schedule, sources))
    batch = self.get_total_train_batch_size(self.args)
    if batch != notes["global_batch"]:
        logger.warning(
            "The checkpoint was trained with a global batch of %d, and now it is %d (batch a device x accumulation "
            "steps x data-parallel ranks): training goes on at another place in the data. Change "
            "per_device_train_batch_size or gradient_accumulation_steps to go on exactly.",
            notes["global_batch"],
            batch,
        )


_METHODS = {
    "__init__": _init,
    "train": _train,
    "_save_checkpoint": _save_checkpoint,
    "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
    "_load_from_checkpoint": _load_from_checkpoint,
    "_load_best_model": _load_best_model,
    "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
}


# --- helpers ---------------------------------------------------------------------------------------------------------


@contextmanager
def _replaced(trainer: Trainer, methods: dict[str, Any]) -> Iterator[None]:
    """While active, `methods` of this instance stand before those of its class."""
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]


def _checkpoint_to_resume(output_dir: str, asked: str | os.PathLike | Literal[True]) -> str | Literal[True]:
    """The checkpoint that was asked for, or the last whole one; the same on every rank."""
    with collective.together("Trainer.train(resume_from_checkpoint=...)"):
        if asked is True:
            found = last_whole(Path(output_dir))
        else:
            found = os.fspath(asked)
            problem = damage(found)
            if problem is not None:
                raise CheckpointError(f"resume_from_checkpoint={found!r} can't be resumed from: {problem}.")
    if dist.is_initialized():
        collective.agree("resume_from_checkpoint", found)
    # Trainer looks itself, and raises, where there is none.
    return True if found is None else found
