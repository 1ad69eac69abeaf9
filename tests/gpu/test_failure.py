"""One of four NCCL ranks dies, freezes or fails in the middle of a step: the others end in time and name it."""

import json
import os
import re
import sys

import pytest
import torch

from tests import processes, tiny
from tests.distributed.fault_run import FAULTY, RANKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
        reason="needs 4 GPUs, or an NCCL that lets ranks share one",
    ),
]

# fault: the group's time-out and what the others say. NCCL notices nobody's end by itself before that time-out.
CASES = {
    "killed": (60, rf"Rank {FAULTY} \(.*\) has died"),
    "killed_in_backward": (60, rf"Rank {FAULTY} \(.*\) has died"),
    "frozen_in_backward": (30, rf"Rank {FAULTY} \(.*\) has given no sign of life"),
    "out_of_memory_in_backward": (60, rf"Rank {FAULTY} failed with OutOfMemoryError: out of memory"),
    "goes_on_after_an_error": (60, rf"Rank {FAULTY} left a forward with KeyError"),
}


@pytest.mark.parametrize("fault", CASES)
def test_no_rank_is_left_waiting(tmp_path, fault, figures):
    group_timeout, says = CASES[fault]
    tiny.save("qwen3_moe", tmp_path)
    command = [sys.executable, "-m", "tests.distributed.fault_run", tmp_path, fault, str(group_timeout)]
    ends = json.loads(processes.run(command, timeout=150).splitlines()[-1])
    figures[f"seconds after {fault}"] = {rank: end[1] for rank, end in ends.items()}
    for rank in set(range(RANKS)) - {FAULTY}:
        said = (tmp_path / f"{rank}.err").read_text()
        code, seconds = ends[str(rank)]
        assert code not in (0, None) and seconds < min(group_timeout + 5, 60), said[-3000:]
        assert re.search(says, said), said[-3000:]
