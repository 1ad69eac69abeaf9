"""What runs beside the transport, over gloo ranks: the order of events, the numbers, the host's reads, and that
nothing stays behind."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from automodel_moe import MoEAutoModel
from automodel_moe.block import Driver, experts_modules
from automodel_moe.dispatch.all_to_all import AllToAll, _Plan
from automodel_moe.recompute import Kept
from automodel_moe.trip import Trip
from tests import tiny
from tests.distributed.test_auto import assert_same_grads, full_grads, own_rows

HERE = __name__
PHASES = ("plan", "dispatch_start", "dispatch_finish", "combine_start", "combine_finish")
SHARED = {"deepseek_v3": "shared_experts", "qwen2_moe": "shared_expert", "nemotron_h": "shared_experts"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for kind in (*SHARED, "qwen3_moe"):
        made[kind] = str(tmp_path_factory.mktemp(kind))
        # One layer with experts.
        tiny.save(kind, made[kind], **({"num_hidden_layers": 1} if kind.startswith("qwen") else {}))
    return made


def load(folder: str, **moe_config):
    return MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": dist.get_world_size(), **moe_config}).train()


@contextmanager
def logging(log: list[str]):
    """Every phase of the transport, as it begins."""
    originals = {name: getattr(AllToAll, name) for name in PHASES}

    def logged(name):
        def phase(*args, **kwargs):
            log.append(name)
            return originals[name](*args, **kwargs)

        return phase

    for name in PHASES:
        setattr(AllToAll, name, logged(name))
    try:
        yield log
    finally:
        for name, original in originals.items():
            setattr(AllToAll, name, original)


def events(kind: str, folder: str, **moe_config) -> tuple[list[str], list[str]]:
    """Of a step's forward and of its backward."""
    model = load(folder, **moe_config)
    ((name, experts),) = experts_modules(model).items()
    log: list[str] = []
    if kind in SHARED:
        shared = getattr(model.get_submodule(name.rpartition(".")[0]), SHARED[kind])
        shared.register_forward_hook(lambda *_: log.append("shared"))
        shared.register_full_backward_hook(lambda *_: log.append("shared"))
    driver = experts.automodel.driver
    forward = driver.experts_forward

    def logged(x_RH, *args, **kwargs):
        log.append("experts")
        if x_RH.requires_grad:
            x_RH.register_hook(lambda _: log.append("experts"))
        return forward(x_RH, *args, **kwargs)

    driver.experts_forward = logged
    with logging(log):
        loss = model(**own_rows(tiny.batch(kind))).loss
        in_forward = log.copy()
        log.clear()
        loss.backward()
    return in_forward, log


FORWARD = ["plan", "dispatch_start", "shared", "dispatch_finish", "experts", "combine_start", "combine_finish"]
BACKWARD = ["dispatch_start", "dispatch_finish", "experts", "combine_start", "shared", "combine_finish"]


def run(worlds, kind: str, folders: dict[str, str], **moe_config):
    return worlds(2).run(f"{HERE}:events", kind=kind, folder=folders[kind], **moe_config)


@pytest.mark.parametrize("kind", SHARED)
def test_shared_experts_run_between_start_and_finish(worlds, folders, kind):
    for forward, backward in run(worlds, kind, folders):
        assert forward == FORWARD and backward == BACKWARD


def test_without_overlap_they_run_where_the_block_has_them(worlds, folders):
    for forward, backward in run(worlds, "deepseek_v3", folders, overlap="none"):
        assert forward == [event for event in FORWARD if event != "shared"] + ["shared"]
        assert backward == ["shared"] + [event for event in BACKWARD if event != "shared"]


@pytest.mark.parametrize("recompute, sent", [("experts", []), ("layer", ["dispatch_start"])])
def test_a_recompute_overlaps_too_and_combines_nothing(worlds, folders, recompute, sent):
    for forward, backward in run(worlds, "deepseek_v3", folders, recompute=recompute):
        assert forward == FORWARD
        arrived = ["dispatch_finish"] if sent else []
        # The layer's first saved tensor that backward asks for is the experts'; the dispatch of its own gradient has
        # set out before.
        again = [*sent, "shared", *arrived, "experts"]
        assert sorted(backward) == sorted(BACKWARD + again)
        assert backward.count("combine_start") == 1
        assert "".join(again) in "".join(backward)


HALVES_FORWARD = [
    *("plan", "plan", "dispatch_start", "dispatch_start", "shared"),
    *("dispatch_finish", "experts", "combine_start", "dispatch_finish", "experts", "combine_start"),
    *("combine_finish", "combine_finish"),
]
HALVES_BACKWARD = [
    *("dispatch_start", "dispatch_start"),
    *("dispatch_finish", "experts", "combine_start", "dispatch_finish", "experts", "combine_start"),
    *("shared", "combine_finish", "combine_finish"),
]


def test_one_halfs_experts_run_while_the_others_rows_travel(worlds, folders):
    for forward, backward in run(worlds, "deepseek_v3", folders, overlap="halves"):
        assert forward == HALVES_FORWARD and backward == HALVES_BACKWARD


def same_gradients(folder: str, kind: str, **moe_config) -> None:
    models = [load(folder, **moe_config), load(folder, overlap="none")]
    for rows, length in ((4, 12), (2, 1), (2, 7)):  # one token a rank has an empty half
        got, want = [], []
        for model, grads in zip(models, (got, want), strict=True):
            model.zero_grad()
            model(**own_rows(tiny.batch(kind, rows=rows, length=length))).loss.backward()
            grads.append(full_grads(model))
        assert_same_grads(*got, *want)


@pytest.mark.parametrize("moe_config", [{"overlap": "auto"}, {"overlap": "halves"}], ids=str)
@pytest.mark.parametrize("kind", SHARED)
def test_overlap_changes_no_gradient(worlds, folders, kind, moe_config):
    worlds(2).run(f"{HERE}:same_gradients", folder=folders[kind], kind=kind, **moe_config)


def test_halves_under_recompute_change_no_gradient(worlds, folders):
    for recompute in ("experts", "layer"):
        moe_config = {"overlap": "halves", "recompute": recompute}
        worlds(2).run(f"{HERE}:same_gradients", folder=folders["deepseek_v3"], kind="deepseek_v3", **moe_config)


class HostReads(TorchFunctionMode):
    """Counts what makes the host wait for a device: values taken to the host, and sizes that depend on values."""

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__", "nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        by_mask = name in ("__getitem__", "__setitem__") and torch.bool in (
            index.dtype for index in (args[1] if isinstance(args[1], tuple) else args[1:2]) if torch.is_tensor(index)
        )
        if name in self.READS or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def host_reads(folder: str, **moe_config) -> tuple[list[str], list[str]]:
    """Of the driver and its transport in one layer's forward, and of the whole backward."""
    model = load(folder, **moe_config)
    (experts,) = experts_modules(model).values()
    # How experts compute on a CPU is not in question here.
    experts.automodel.driver.experts_forward = lambda x_RH, idx_RK, weights_RK, n_pairs: (
        x_RH * weights_RK.sum(1, keepdim=True)
    )
    in_forward, call = HostReads(), Driver.__call__

    def counted(*args):
        with in_forward:
            return call(*args)

    Driver.__call__ = counted
    try:
        loss = model(**own_rows(tiny.batch("deepseek_v3"))).loss
    finally:
        Driver.__call__ = call
    with HostReads() as in_backward:
        loss.backward()
    return in_forward.seen, in_backward.seen


@pytest.mark.parametrize("moe_config, reads", [({}, 1), ({"recompute": "layer"}, 1), ({"overlap": "halves"}, 2)])
def test_the_host_reads_once_an_exchange_and_never_in_backward(worlds, folders, moe_config, reads):
    for forward, backward in worlds(2).run(f"{HERE}:host_reads", folder=folders["deepseek_v3"], **moe_config):
        assert forward == ["tolist"] * reads and backward == []


STEPS, SETTLED = 200, 60
MARGIN = 32 << 20  # bytes that a process may grow by between; keeping every step's rows would take four times as much


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def handles() -> tuple[int, int]:
    """Open files and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def alive() -> Counter[str]:
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in (Trip, Kept, _Plan, dist.Work))


def many_steps(folder: str, **moe_config) -> None:
    """Batches of random sizes, routers drawn anew for each."""
    gc.collect()
    model = load(folder, **moe_config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    gc.disable()  # a cycle of references that holds rows would be a leak between two collections
    try:
        for step in range(STEPS):
            if step == SETTLED:
                before = resident(), handles()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("gate.weight"):
                        parameter.to_local().normal_(generator=generator)
            length = int(torch.randint(1, 49, (), generator=generator))
            rows = int(torch.randint(1, 5, (), generator=generator))
            model(**tiny.batch("deepseek_v3", rows=rows, length=length, seed=step)).loss.backward()
            model.zero_grad()
        assert not alive(), alive()
        assert handles() == before[1]
        assert resident() - before[0] < MARGIN
    finally:
        gc.enable()


def test_two_hundred_steps_leave_nothing_behind(worlds, tmp_path):
    tiny.save("deepseek_v3", tmp_path, hidden_size=512)
    moe_config = {"overlap": "halves", "recompute": "experts"}
    worlds(2).run(f"{HERE}:many_steps", timeout=120, folder=str(tmp_path), **moe_config)
