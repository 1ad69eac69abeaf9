"""Calls that every rank must make: the process group comes up with a time-out of minutes, and a call that only some
ranks make raises and names itself instead of hanging."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

# Ranks may read a checkpoint at very different speeds; a rank that dies ends the job through its launcher.
LOAD_TIMEOUT = 7200.0

_calls: Counter[str] = Counter()


def ensure_process_group(timeout: float) -> None:
    """
    Bring up the default process group for this machine's accelerator, unless there is one.

    Args:
        timeout (`float`): Seconds after which a collective that a rank does not join fails.

    Raises:
        `RuntimeError`: if the launcher's environment is incomplete.
    """
    if dist.is_initialized():
        return
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise RuntimeError(
            f"A sharded model needs a launcher, and {', '.join(missing)} is not set: start the script "
            "with `torchrun --nproc-per-node N script.py` or `accelerate launch`; for one process without sharding "
            "unset WORLD_SIZE and leave distributed_config out."
        )
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        atexit.register(_leave)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=timeout))


def bound_groups(model: PreTrainedModel, timeout: float) -> None:
    """
    Give the groups that a model's parameters are sharded over this time-out. torch makes a mesh's groups with its own
    default, 10 minutes for NCCL and 30 for gloo, whatever the time-out of the group that they are parts of.

    Args:
        timeout (`float`): As of `ensure_process_group`. The default process group keeps its own.
    """
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    groups = {mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)}
    for group in groups - {dist.group.WORLD}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)


def _leave() -> None:
    # A script that did not bring the group up does not take it down, and one run in four then ended in "terminate
    # called without an active exception": gloo's threads were still there. After an error they may wait for a peer.
    if dist.is_initialized() and "last_value" not in vars(sys):
        dist.destroy_process_group()


def meet(call: str, timeout: float, remedy: str = "") -> None:
    """
    Wait until every rank has made this call.

    Through the process group's key-value store, not a collective: it works while other collectives are in flight, and
    it can say who is missing.

    Args:
        call (`str`): The call's name, as the user wrote it.
        timeout (`float`): Seconds to wait.
        remedy (`str`, *optional*): What to do about a rank that stays away.

    Raises:
        `RuntimeError`: after `timeout` seconds, naming the call and the ranks that did not make it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # Counted per call name: the n-th `save_pretrained` of one rank meets the n-th of the others.
    _calls[call] += 1
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    here = f"automodel_moe/{call}/{{}}/{{}}"
    keys = [here.format(_calls[call], r) for r in range(world)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        absent = [r for r, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"`{call}` works on all {world} ranks together, but after {timeout:g} s rank(s) {absent} have not called "
            f"it. {remedy}"
        ) from error
    # Whoever is here has left the meeting before, so nobody waits for its keys: the store does not grow.
    if _calls[call] > 1:
        store.delete_key(here.format(_calls[call] - 1, rank))


def agree(what: str, value: Any) -> None:
    """
    Check that all ranks were given the same value. A collective.

    Raises:
        `ValueError`: on every rank, naming two that differ and their values.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ValueError(f"The ranks disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}.")


@contextmanager
def together(call: str, slow: bool = False) -> Iterator[None]:
    """
    Leave a block that every rank runs together, and raise on all ranks what one of them raised. A collective.

    Args:
        call (`str`): The call's name, for the ranks that hear of another's error.
        slow (`bool`): A disk or a network may keep one rank for longer than a collective would wait.

    Raises:
        `RuntimeError`: on the ranks where the block went well, if it failed on another one.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if slow:
        meet(f"{call} (its end)", LOAD_TIMEOUT)
    problems: list[str | None] = [None]
    if dist.is_initialized():
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, message in enumerate(problems):
        if message is not None:
            raise RuntimeError(f"`{call}` failed on rank {rank}: {message}")


def guard_calls(model: PreTrainedModel, timeout: float) -> None:
    """Have `save_pretrained`, `push_to_hub` and `generate` of this model raise where only some ranks call them."""
    remedies = {
        "save_pretrained": "Call it on every rank (each writes its part): take it out of `if is_main_process:`.",
        "push_to_hub": "Call it on every rank (rank 0 uploads): take it out of `if is_main_process:`.",
        "generate": "Call it on every rank, with inputs of any size: the experts of each token live on all of them.",
    }
    if not model.can_generate():
        del remedies["generate"]
    for name, remedy in remedies.items():
        function = getattr(model, name)
        # No closure: a copy of the model copies the method within, and so calls itself and not the original.
        guarded = functools.partial(_guarded, function, f"model.{name}", timeout, remedy)
        vars(model)[name] = functools.update_wrapper(guarded, function)


def _guarded(function: Callable, call: str, timeout: float, remedy: str, *args: Any, **kwargs: Any) -> Any:
    meet(call, timeout, remedy)
    return function(*args, **kwargs)
