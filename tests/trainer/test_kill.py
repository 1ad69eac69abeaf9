"""SIGKILL at random moments of a save: the last checkpoint is whole, and is what training goes on from."""

import multiprocessing
import os
import random
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers.trainer_utils import get_last_checkpoint

from automodel_moe.trainer import folders
from tests import tiny
from tests.trainer import runs

STEPS, KILLS, LIMIT = 6, 5, 60.0

pytestmark = pytest.mark.usefixtures("cores")

# Forked from a process that has imported everything: a start costs a tenth of a second.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["transformers.trainer", "automodel_moe.auto"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


def save_at_every_step(folder: str, output: str, rank: int, ranks: int, port: int, limit: int | None) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo")
    runs.trainer(folder, output, save_steps=1, max_steps=STEPS, save_total_limit=limit).train()


@contextmanager
def training(folder: str, output: Path, ranks: int, limit: int | None = None):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [
        forks.Process(target=save_at_every_step, args=(folder, str(output), rank, ranks, port, limit))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def wait_for(condition, processes) -> None:
    """Until the condition holds; on a busy machine training may be over before it was looked at."""
    deadline = time.monotonic() + LIMIT
    while not condition() and any(process.is_alive() for process in processes):
        assert time.monotonic() < deadline, "no save"
        time.sleep(0.0005)


def resumed_from(folder: str, output: Path) -> dict:
    look = runs.Look()
    last = int(get_last_checkpoint(output).rsplit("-")[-1])
    run = runs.trainer(folder, str(output), callbacks=[look, runs.StopAt(last + 1)], save_strategy="no")
    run.train(resume_from_checkpoint=True)
    assert look.seen["step"] == last
    return look.seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_in_a_save(checkpoint, tmp_path, ranks):
    whole = tmp_path / "whole"
    with training(checkpoint, whole, ranks) as processes:
        for process in processes:
            process.join(LIMIT)
            assert process.exitcode == 0
    wanted = {}
    for step in range(1, STEPS + 1):
        alone = tmp_path / f"whole-{step}"
        alone.mkdir()
        (whole / f"checkpoint-{step}").rename(alone / f"checkpoint-{step}")
        wanted[step] = resumed_from(checkpoint, alone)

    moments, in_a_save = random.Random(ranks), 0
    for kill in range(KILLS):
        output = tmp_path / f"killed-{kill}"
        saving = output / folders.SAVING
        with training(checkpoint, output, ranks, limit=2) as processes:
            wait_for(saving.exists, processes)
            start = time.monotonic()
            wait_for((output / "checkpoint-1").exists, processes)
            duration = time.monotonic() - start
            if moments.random() < 0.5:
                wait_for((output / "checkpoint-2").exists, processes)
            wait_for(saving.exists, processes)
            time.sleep(moments.uniform(0, duration))
        in_a_save += saving.exists()
        seen = resumed_from(checkpoint, output)
        runs.assert_equal(seen, wanted[seen["step"]], f"step {seen['step']}")
    assert in_a_save, "no kill fell into a save"
