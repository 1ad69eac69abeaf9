"""One of four ranks dies, freezes, stalls or fails in the middle of a step: the others end in time and name it."""

import json
import re
import sys

import pytest
import torch
import torch.distributed as dist

from automodel_moe import MoEAutoModel
from tests import processes, tiny
from tests.distributed.fault_run import FAULTY, RANKS

pytestmark = pytest.mark.usefixtures("cores")

# fault: the group's time-out, the seconds within which the others must have ended, and what each must say.
# A machine under load takes its time to tear processes down: hence half a minute on top of the shorter time-outs.
LAYER = r"in model\.layers\.1\.mlp\.experts"
CASES = {
    "killed": (300, 60, rf"{LAYER}, sizes \(forward\)[^\n]*Rank {FAULTY} \(process \d+ of \S+\) has died"),
    "frozen_in_backward": (
        10,
        40,
        rf"Rank {FAULTY} \(.*\) has given no sign of life[^\n]*{LAYER}, dispatch \(backward\)",
    ),
    "stalled": (10, 40, rf"{LAYER}, sizes \(forward\)[^\n]*All ranks are alive[^\n]*rank {FAULTY} is "),
    "out_of_memory_in_backward": (300, 60, rf"{LAYER}[^\n]*Rank {FAULTY} failed with OutOfMemoryError: out of memory"),
    "goes_on_after_an_error": (60, 30, rf"Rank {FAULTY} left a forward with KeyError: 'a bad sample[^\n]*{LAYER}"),
}


@pytest.mark.parametrize("fault", CASES)
def test_no_rank_is_left_waiting(tmp_path, fault):
    group_timeout, promised, says = CASES[fault]
    tiny.save("qwen3_moe", tmp_path)
    command = [sys.executable, "-m", "tests.distributed.fault_run", tmp_path, fault, str(group_timeout)]
    output = processes.run(command, timeout=150)
    ends = json.loads(output.splitlines()[-1])
    for rank in set(range(RANKS)) - {FAULTY}:
        said = (tmp_path / f"{rank}.err").read_text()
        code, seconds = ends[str(rank)]
        assert code == 1 and seconds < promised, said
        assert re.search(says, said), said


def time_outs(folder: str) -> list[float]:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2, "group_timeout": 77})
    groups = {mesh.get_group(d) for p in model.parameters() for mesh in [p.device_mesh] for d in range(mesh.ndim)}
    groups.add(next(m.automodel.driver.ep_mesh for m in model.modules() if "automodel" in vars(m)).get_group())
    backends = [group._get_backend(torch.device("cpu")) for group in groups - {dist.group.WORLD}]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_of_the_meshes_have_the_time_out(worlds, tmp_path):
    # torch's own default for them is half an hour, whatever the whole group's time-out.
    tiny.save("qwen3_moe", tmp_path)
    for seconds in worlds(4).run(f"{__name__}:time_outs", timeout=120, folder=str(tmp_path)):
        assert len(seconds) >= 2 and set(seconds) == {77.0}
