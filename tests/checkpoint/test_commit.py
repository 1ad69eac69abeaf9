"""A save that is killed at any moment leaves the earlier checkpoint or the new one, whole."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from automodel_moe.checkpoint import commit
from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write
from tests.checkpoint.test_save import loaded

INDEX = "model.safetensors.index.json"


class Killed(BaseException):
    pass


def checkpoint(folder: Path, value: str, files: int) -> None:
    """`files` weight files with `value` in each, and an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.safetensors"]
    if files > 1:
        names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
        index = {"metadata": {}, "weight_map": dict(zip("abc", names, strict=False))}
        (folder / INDEX).write_text(json.dumps(index))
    for name in names:
        (folder / name).write_text(value)
    (folder / "config.json").write_text("config")


def what_is_read(folder: Path) -> set[str] | None:
    """What transformers reads: the one file, or else those that the index names."""
    if (folder / "model.safetensors").exists():
        return {(folder / "model.safetensors").read_text()}
    if not (folder / INDEX).exists():
        return None
    return {(folder / name).read_text() for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
@pytest.mark.parametrize(("before", "after"), [*itertools.product((0, 1, 2, 3), (1, 2, 3))])
def test_killed_at_every_step(before, after, links, tmp_path, monkeypatch):
    """Every call that changes the folder is the last one, in turn; then a later save goes through."""
    steps = itertools.count()
    last = None
    whole = tmp_path / "whole"
    checkpoint(whole, "newer", after)

    def stepwise(function):
        def call(*args, **kwargs):
            if next(steps) == last:
                raise Killed
            return function(*args, **kwargs)

        return call

    def link(*args):
        raise OSError("no hard links here")

    monkeypatch.setattr(Path, "replace", stepwise(Path.replace))
    monkeypatch.setattr(Path, "unlink", stepwise(Path.unlink))
    monkeypatch.setattr(os, "link", stepwise(os.link if links else link))
    monkeypatch.setattr(shutil, "rmtree", stepwise(shutil.rmtree))
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        if before:
            checkpoint(folder, "old", before)
        aside = folder / ".saving-1"
        checkpoint(aside, "new", after)
        steps, last = itertools.count(), step
        killed = False
        try:
            commit.commit(aside, folder, None)
        except Killed:
            killed = True
        last = None
        assert what_is_read(folder) in ([{"new"}] if not killed else [{"new"}, {"old"} if before else None])
        read = what_is_read(folder)
        commit.drop_leftovers(folder)  # as a save does that ends in an error
        assert what_is_read(folder) == read
        again = folder / ".saving-2"
        checkpoint(again, "newer", after)
        commit.commit(again, folder, None)
        assert what_is_read(folder) == {"newer"}
        assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
        if not killed:
            break
    assert not killed and step > 2


def save_for_ever(rank: int, port: int, source: str, out: str, began) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = loaded("qwen3_moe", source, fsdp_size=2, ep_size=2)
    began.set()
    for factor, size in itertools.cycle([(1, "60KB"), (2, "60KB"), (0.5, "50GB"), (2, "40KB"), (0.5, "60KB")]):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)  # by powers of two: exact
        model.save_pretrained(out, max_shard_size=size)


def kill_a_save(source: Path, out: Path, delay: float) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoint.test_commit"])
    began = context.Event()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    saving = [
        context.Process(target=save_for_ever, args=(rank, port, str(source), str(out), began), daemon=True)
        for rank in range(2)
    ]
    for process in saving:
        process.start()
    try:
        assert began.wait(90), "the ranks did not come up"
        saving[0].join(delay)
    finally:
        for process in saving:
            os.kill(process.pid, signal.SIGKILL)
        for process in saving:
            process.join()


def test_ranks_killed_at_random_moments(cores, tmp_path):
    """SIGKILL for both ranks, ten times, while they save two models in turn, in one file or several."""
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    one = model_class("qwen3_moe").from_pretrained(source).state_dict()
    two = {name: 2 * tensor for name, tensor in one.items()}
    moments = random.Random(0)
    there, in_the_middle = False, 0
    for _ in range(10):
        kill_a_save(source, out, moments.uniform(0, 0.6))
        in_the_middle += len(list(out.glob(".saving-*"))) > 0
        read = (out / "model.safetensors").exists() or (out / INDEX).exists()
        assert read or not there, "the earlier checkpoint is gone"
        if read:
            there = True
            model, info = model_class("qwen3_moe").from_pretrained(out, output_loading_info=True)
            assert not any(info.values())
            assert [] in (ranks.differences(model, one), ranks.differences(model, two)), "a mix of two saves"
    assert there and in_the_middle, "no save got through, or none was hit"
    loaded("qwen3_moe", source).save_pretrained(out)
    assert not list(out.glob(".saving-*"))


def test_transformers_reads_the_new_files_where_they_lie(tmp_path, monkeypatch):
    """Killed before the new files have their names: the index names them in the folder they were written to."""
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    model = loaded("qwen3_moe", source)
    model.save_pretrained(out, max_shard_size="60KB")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(Killed):
            model.save_pretrained(out, max_shard_size="60KB")
    assert len(list(out.glob(".saving-*"))) == 1
    assert ranks.differences(model_class("qwen3_moe").from_pretrained(out), model.state_dict()) == []
    model.save_pretrained(out, max_shard_size="60KB")
    assert not list(out.glob(".saving-*"))
    assert ranks.differences(model_class("qwen3_moe").from_pretrained(out), model.state_dict()) == []
