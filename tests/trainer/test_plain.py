"""A loop without `Trainer`: saved, and resumed in a new model, it goes on bit for bit."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from automodel_moe import MoEAutoModel, load_training_state, save_training_state
from automodel_moe.checkpoint.headers import CheckpointError
from tests import tiny
from tests.trainer import runs

HERE = __name__


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


def parts(folder: str):
    model = MoEAutoModel.from_pretrained(folder, attention_dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def steps(model, optimizer, scheduler, n: int) -> dict:
    losses = []
    for _ in range(n):
        rows = torch.randint(0, tiny.VOCAB, (2, 12))
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    draws = (torch.rand(1).item(), float(np.random.rand()), random.random())
    moments = runs.moments(model, optimizer)
    return {"losses": losses, "weights": runs.weights(model), "moments": moments, "draws": draws}


def goes_on(folder: str, output: str) -> None:
    run = parts(folder)
    steps(*run, 2)
    save_training_state(output, *run, step=2)
    want = steps(*run, 3)
    again = parts(folder)
    assert load_training_state(output, *again) == {"step": 2}
    runs.assert_equal(steps(*again, 3), want)
    assert [path.name for path in Path(output).parent.iterdir()] == [Path(output).name]

    save_training_state(output, *again, step=5)  # in the place of the first
    assert load_training_state(output, *again) == {"step": 5}


@pytest.mark.parametrize("ranks", [1, 2])
def test_goes_on_bit_for_bit(worlds, checkpoint, tmp_path, ranks):
    output = str(tmp_path / "state")
    if ranks == 1:
        goes_on(checkpoint, output)
    else:
        worlds(ranks).run(f"{HERE}:goes_on", folder=checkpoint, output=output)


def called_by_one_rank(folder: str, output: str) -> None:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"call_timeout": 1.0})
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"`save_training_state` works on all 2 ranks .* rank\(s\) \[1\] have not"
        ):
            save_training_state(output, model, torch.optim.AdamW(model.parameters()))
    assert not Path(output).exists()


def test_a_call_by_one_rank_raises(worlds, checkpoint, tmp_path):
    worlds(2).run(f"{HERE}:called_by_one_rank", folder=checkpoint, output=str(tmp_path / "state"))


def test_what_does_not_fit_is_refused(checkpoint, tmp_path):
    run = parts(checkpoint)
    save_training_state(tmp_path / "state", *run)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match="is not a model as MoEAutoModel returned it"):
        save_training_state(tmp_path / "plain", plain, torch.optim.AdamW(plain.parameters()))
    other = MoEAutoModel.from_config(tiny.config("qwen3_moe", vocab_size=tiny.VOCAB * 2))
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \(96, 32\), not \(192, 32\)"):
        load_training_state(tmp_path / "state", other, torch.optim.AdamW(other.parameters()))
    (tmp_path / "state" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"it has no model.safetensors"):
        load_training_state(tmp_path / "state", *run)
