"""Folders of checkpoints: written aside, put in place when they are whole, and looked over before they are read.

A checkpoint is written in the folder `_saving` beside the others and moved to its name when it is whole on all ranks.
So none is ever half written, and a save that was killed leaves `_saving`, which the next one clears away.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from ..checkpoint.commit import sync
from ..checkpoint.headers import CheckpointError, read_header
from ..checkpoint.reload import weight_files
from . import collective
from .state import GROUPS

logger = logging.get_logger(__name__)

# Not "checkpoint-...": neither a look-up of the last checkpoint nor a rotation takes it for one, nor is it uploaded.
SAVING = "_saving"
OPTIMIZER = "optimizer"


def put_in_place(saving: Path, checkpoint: Path) -> None:
    """Give what was written in `saving` its name, flushed to disk, and drop what had that name before."""
    whole = saving / checkpoint.name
    for path in (*whole.rglob("*"), whole):
        sync(path)
    if checkpoint.exists():
        # Moved, not deleted: between the two renames nothing has the name, and that is as short as it can be.
        checkpoint.rename(saving / "replaced")
    whole.rename(checkpoint)
    sync(checkpoint.parent)  # before anyone deletes an older one
    shutil.rmtree(saving)


def check_shared(folder: Path) -> None:
    """Refuse a folder in which a rank doesn't see what rank 0 writes: its part of the optimizer would be lost."""
    probe, first = folder / ".seen-by-all-ranks", dist.get_rank() == 0
    with collective.together("Trainer.train"):
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    try:
        with collective.together("Trainer.train"):
            if not probe.exists():
                raise ValueError(
                    f"output_dir={os.fspath(folder)!r} is not on a filesystem that all ranks share: this rank doesn't "
                    "see what rank 0 writes there, and each rank writes its own part of the optimizer's state. Use a "
                    "shared folder, or TrainingArguments(save_only_model=True)."
                )
    finally:
        if first:
            probe.unlink()


def last_whole(output_dir: Path) -> str | None:
    """The checkpoint of the latest step that can be resumed from; those passed over are logged with the reason."""
    if (output_dir / SAVING).is_dir():
        logger.warning("%s is what is left of a save that did not finish: ignored.", output_dir / SAVING)
    for checkpoint in reversed(sort_checkpoints(os.fspath(output_dir))):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning("%s can't be resumed from: %s. Skipped.", checkpoint, problem)
    return None


def damage(checkpoint: str | os.PathLike) -> str | None:
    """
    What is missing of a checkpoint, found from names, sizes and headers alone.

    Returns:
        `str`: The first problem, or `None` if everything is there that a finished save leaves.
    """
    folder = Path(checkpoint)
    if not (folder / TRAINER_STATE_NAME).is_file():
        return f"it has no {TRAINER_STATE_NAME}"
    try:
        # An adapter's checkpoint has other names, and may be pickled.
        files = folder.glob("*.safetensors") if any(folder.glob("adapter_*")) else weight_files(folder)
        for path in files:
            read_header(path)
    except CheckpointError as error:
        return str(error)
    state = folder / OPTIMIZER
    if not state.is_dir():
        return None
    for name in (f"{OPTIMIZER}/.metadata", f"{OPTIMIZER}/{GROUPS}", SCHEDULER_NAME):
        if not (folder / name).is_file() or not (folder / name).stat().st_size:
            return f"it has no {name}, or an empty one"
    try:
        parts = FileSystemReader(state).read_metadata().storage_data.values()
    except (EOFError, pickle.UnpicklingError) as error:
        return f"{OPTIMIZER}/.metadata can't be read ({error})"
    for stored in parts:
        path = state / stored.relative_path
        if not path.is_file() or path.stat().st_size < stored.offset + stored.length:
            return f"{OPTIMIZER}/{stored.relative_path} is missing or truncated"
    return None
