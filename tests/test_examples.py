"""The examples: their two forms differ in the import line, and train alike on one process and on several."""

import difflib
import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.processes import ROOT, run, torchrun

pytestmark = pytest.mark.usefixtures("cores")

EXAMPLES = ("trainer", "torch_loop", "accelerate_loop")
STEPS, GLOBAL_BATCH = 4, 8
TEXT = ROOT / "LICENSE"

# float32, and only the order of sums differs between worlds: measured 4e-7 on the losses, and 6e-6 of a tensor's own
# update on the weights. A missing or doubled gradient, or other data on a rank, is off by more than 1e-2.
LOSS_RTOL, UPDATE_RTOL = 5e-6, 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "checkpoint"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def before(checkpoint, tmp_path_factory):
    """`before(example)`: losses and weights of plain transformers on one process; each example runs once."""
    done = {}

    def result(example):
        if example not in done:
            output = tmp_path_factory.mktemp(f"before-{example}")
            printed = run([sys.executable, *command(example, "before", checkpoint, output, 1)], timeout=120)
            done[example] = losses(example, printed, output), load_file(output / "model.safetensors")
        return done[example]

    return result


def command(example, form, checkpoint, output, ranks):
    script = ROOT / "examples" / example / f"{form}.py"
    return [script, checkpoint, TEXT, output, "--steps", str(STEPS), "--batch", str(GLOBAL_BATCH // ranks)]


def losses(example, printed, output):
    if example == "trainer":
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", printed, re.MULTILINE)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_forms_differ_in_the_import_line_only(example):
    forms = [(ROOT / "examples" / example / f"{form}.py").read_text().splitlines() for form in ("before", "after")]
    changed = [line for line in difflib.ndiff(*forms) if line[0] in "+-"]
    assert changed == [
        "- from transformers import AutoModelForCausalLM",
        "+ from automodel_moe import MoEAutoModel as AutoModelForCausalLM",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("example", EXAMPLES)
def test_after_trains_like_before(example, ranks, checkpoint, before, tmp_path):
    reference_losses, reference = before(example)
    printed = torchrun(*command(example, "after", checkpoint, tmp_path, ranks), ranks=ranks, timeout=180)

    assert len(reference_losses) == STEPS
    assert reference_losses[-1] < reference_losses[0] - 0.05
    assert losses(example, printed, tmp_path) == pytest.approx(reference_losses, rel=LOSS_RTOL)

    start = load_file(checkpoint / "model.safetensors")
    trained = load_file(tmp_path / "model.safetensors")
    assert trained.keys() == reference.keys() == start.keys()
    for name, weight in trained.items():
        update = (reference[name] - start[name]).norm()
        assert update > 0, f"{name} was not trained"
        assert (weight - reference[name]).norm() <= UPDATE_RTOL * update, name
