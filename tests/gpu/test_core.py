"""Load, train and save in bfloat16 on a GPU: one process, and two ranks under EP 2 (on two GPUs, or sharing one)."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def run(shape: str, folder, ranks: int, *arguments: str) -> dict:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29577"]
    command = [*launcher, "-m", "tests.gpu.core_run", "--shape", shape, "--folder", str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize("shape", ["demo", "qwen3-30b-a3b-4l"])
def test_load_train_save(shape, tmp_path, figures):
    one = run(shape, tmp_path, 1)
    two = run(shape, tmp_path, 2)
    figures[f"core {shape}"] = {"one process": one, "two ranks, EP 2": two}
    # bfloat16 weights and activations against float32 of the same weights: 8 mantissa bits, a mean over 2,000 tokens.
    assert one["losses"][0] == pytest.approx(one["loss_fp32_transformers"], rel=2e-3)
    for a, b in zip(one["losses"], two["losses"], strict=True):
        # The same step in bfloat16 over two ranks: other sums, and AdamW's first steps amplify what is near zero.
        assert b == pytest.approx(a, rel=5e-3)
    assert one["losses"][-1] < one["losses"][0] and two["losses"][-1] < two["losses"][0]
    assert two["local_experts"] * 2 == one["local_experts"]
    for result in (one, two):
        assert result["dtype"] == "torch.bfloat16"
        assert result["reloaded_greedy"][0] == result["greedy"][0], "the first token has no earlier one to part on"
