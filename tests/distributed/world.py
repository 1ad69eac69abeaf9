"""A world of gloo ranks that outlives one test: importing torch and transformers costs more than most tests do."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """One or more ranks failed or did not answer in time; the message holds each rank's traceback or stacks."""


def _serve(rank: int, world_size: int, port: int, pipe, stacks_path: str, threads: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    stacks = open(stacks_path, "w")  # noqa: SIM115 - must stay open: the signal handler writes to it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    import torch

    torch.set_num_threads(threads)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    while (job := pipe.recv()) is not None:
        _drop_groups(torch.distributed)
        module, function, kwargs = job
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(**kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()


def _drop_groups(dist) -> None:
    """Destroy the groups that earlier jobs' device meshes left: each has threads, and hundreds of them eat the cores.

    Called where every rank has answered the last job, so none is in use.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    gc.collect()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if groups:
        dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    # They hold DTensor results with the mesh of the first call, and give them to an equal mesh: with groups now gone.
    _clear_sharding_prop_cache()


_JOBS = 16


class World:
    """`size` gloo ranks in processes of their own.

    Args:
        size (`int`): How many ranks.
        threads (`int`, *optional*, defaults to 1): Torch threads a rank.

    Example:

        world = World(2)
        results = world.run("tests.distributed.test_dispatch:round_trip", timeout=60, top_k=2)  # one result a rank
    """

    def __init__(self, size: int, threads: int = 1):
        self.size, self.threads = size, threads
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._jobs = 0

    def _start(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._stacks = tempfile.mkdtemp(prefix="stacks-")
        for rank in range(self.size):
            here, there = context.Pipe()
            args = (rank, self.size, port, there, f"{self._stacks}/{rank}", self.threads)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, target: str, timeout: float = 120, **kwargs) -> list[Any]:
        """Run `module:function` with `kwargs` on every rank; returns the ranks' results in rank order.

        Raises:
            `RankError`: if a rank raised, died, or did not answer within `timeout` seconds. The world is then killed
                (a later `run` starts a fresh one), and for a time-out the message holds every rank's stacks.
        """
        # Caches keep some of an earlier job's groups alive, whose threads then spin: a world is made anew in time.
        if self._jobs == _JOBS:
            self.close()
        if not self._processes:
            self._start()
        self._jobs += 1
        module, function = target.split(":")
        for pipe in self._pipes:
            pipe.send((module, function, kwargs))
        deadline = time.monotonic() + timeout
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            # Once one rank has failed the others may wait for it in a collective: give them a moment, not the rest.
            wait = deadline - time.monotonic() if not errors else min(5.0, deadline - time.monotonic())
            try:
                if not pipe.poll(max(wait, 0.0)):
                    errors.append(f"rank {rank}: no answer within {timeout} s\n{self._dump(rank)}")
                    continue
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(5)
                errors.append(f"rank {rank}: died, exit code {self._processes[rank].exitcode}")
                continue
            if ok:
                results.append(value)
            else:
                errors.append(f"rank {rank}:\n{value}")
        if errors:
            self.close(kill=True)
            raise RankError(f"{target} on {self.size} ranks\n" + "\n".join(errors))
        return results

    def _dump(self, rank: int) -> str:
        process = self._processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return Path(f"{self._stacks}/{rank}").read_text()

    def close(self, kill: bool = False) -> None:
        """End the ranks."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        if self._processes:
            shutil.rmtree(self._stacks, ignore_errors=True)
        self._processes, self._pipes, self._jobs = [], [], 0
