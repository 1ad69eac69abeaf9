"""Every transport over NCCL ranks: the contract's checks with exact values, and a model's gradients in bfloat16."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.gpu

needs_deepep = pytest.mark.skipif(find_spec("deep_ep") is None, reason="needs the package deep_ep")
ALL = [
    "all_to_all",
    "all_to_all_padded",
    *[pytest.param(n, marks=needs_deepep) for n in ("deepep_buffer", "deepep_elastic")],
]
# Ranks that share a GPU do so only with an NCCL that lets them.
SIZES = [2, 4] if torch.cuda.device_count() >= 4 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else [2]


def run(ranks: int, *arguments: str) -> dict:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29578"]
    command = [*launcher, "-m", "tests.gpu.dispatch_run", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_contract(name, size, figures):
    result = figures[f"contract {name}, {size} ranks"] = run(size, "--name", name)
    if name.startswith("all_to_all"):
        assert result["host reads"] == {"forward": int(name == "all_to_all"), "backward": 0}


@pytest.mark.parametrize("dispatcher", ["all_to_all", pytest.param("deepep", marks=needs_deepep)])
def test_gradients_are_one_ranks(dispatcher, tmp_path, figures):
    one = run(1, "--gradients", "all_to_all", "--folder", str(tmp_path))
    two = run(2, "--gradients", dispatcher, "--folder", str(tmp_path))
    figures[f"gradients {dispatcher}"] = {"one process": one, "two ranks": two}
    assert two["transports"] == [{"all_to_all": "AllToAll", "deepep": "DeepEPBuffer"}[dispatcher]]
    assert two["loss"] == pytest.approx(one["loss"], rel=2e-3)
    # bfloat16 rounds on one rank as on two, in another order: two must be as near to float32's gradients as one is.
    assert two["error"] < 1.5 * two["one rank's error"], two["worst"]
