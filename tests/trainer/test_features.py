"""Trainer's features together on ranks that share a model, and what must not be lost when a rank fails."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from automodel_moe import MoEAutoModel
from automodel_moe.checkpoint.headers import CheckpointError
from automodel_moe.trainer import folders, resume
from tests import tiny
from tests.trainer import runs

HERE = __name__


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


class Keep(TrainerCallback):
    """The weights as they were at each save."""

    def __init__(self):
        self.at = {}

    def on_save(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = runs.weights(model)


def all_together(folder: str, output: str) -> list[int]:
    scores = iter([3.0, 1.0, 2.0, 2.5, 0.0])
    keep = Keep()
    # Batches of 4 to 10 tokens, and one more for the first rank than for the second.
    evaluated = [{"input_ids": row[:n], "labels": row[:n]} for n, row in zip((4, 10, 5, 7, 9), ids(5), strict=True)]
    run = runs.trainer(
        folder,
        output,
        ep_size=2,
        evaluated=evaluated,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2), keep],
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        save_total_limit=1,
    )
    run.compute_metrics = lambda prediction: {"score": next(scores)}
    run.train()
    assert run.state.global_step == 4, "two evaluations after the best one"
    dist.barrier()  # rank 0 deletes the last checkpoint, which isn't the best, and the others go on
    assert sorted(path.name for path in Path(output).iterdir()) == ["checkpoint-2"]
    runs.assert_equal(runs.weights(run.model), keep.at[2])
    assert not torch.equal(keep.at[2]["lm_head.weight"], keep.at[4]["lm_head.weight"])
    state = json.loads((Path(output) / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == f"{output}/checkpoint-2" == run.state.best_model_checkpoint

    prompt = ids(2)[dist.get_rank()][None, : 3 + 4 * dist.get_rank()]
    out = run.model.generate(prompt, max_new_tokens=3 + dist.get_rank(), do_sample=False, pad_token_id=0)
    whole = AutoModelForCausalLM.from_pretrained(f"{output}/checkpoint-2", experts_implementation="eager")
    assert torch.equal(
        out, whole.generate(prompt, max_new_tokens=3 + dist.get_rank(), do_sample=False, pad_token_id=0)
    )
    return out.shape[1]


def ids(rows: int) -> list[torch.Tensor]:
    return [entry["input_ids"] for entry in runs.dataset(rows)]


def test_features_together(worlds, checkpoint, tmp_path):
    assert worlds(2).run(f"{HERE}:all_together", timeout=120, folder=checkpoint, output=str(tmp_path)) == [6, 11]


class Broken:
    """A schedule that can't be saved, on one rank."""

    def __init__(self, schedule):
        self.schedule = schedule

    def __getattr__(self, name):
        return getattr(self.schedule, name)

    def state_dict(self):
        raise OSError("no space left")


class BreakSaves(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and dist.get_rank() == 0:
            self.trainer.lr_scheduler = Broken(self.trainer.lr_scheduler)


def fail_on_one_rank(folder: str, output: str) -> str:
    breaker = BreakSaves()
    run = runs.trainer(folder, output, ep_size=2, callbacks=[breaker], save_steps=1)
    breaker.trainer = run
    with pytest.raises((OSError, RuntimeError)) as error:
        run.train()
    assert get_last_checkpoint(output) == f"{output}/checkpoint-1"
    assert sorted(path.name for path in Path(output).iterdir()) == ["_saving", "checkpoint-1"]
    dist.barrier()
    again = runs.trainer(folder, output, ep_size=2, model=run.model, save_steps=1, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in Path(output).iterdir()) == [f"checkpoint-{n}" for n in (1, 2, 3)]
    return str(error.value)


def test_a_save_that_fails_on_one_rank_fails_on_all(worlds, checkpoint, tmp_path):
    first, second = worlds(2).run(f"{HERE}:fail_on_one_rank", timeout=120, folder=checkpoint, output=str(tmp_path))
    assert first == "no space left"
    assert second == "`Trainer._save_checkpoint` failed on rank 0: OSError: no space left"


def with_adapters(folder: str, output: str) -> None:
    from peft import LoraConfig, get_peft_model

    def run(callbacks):
        model = MoEAutoModel.from_pretrained(folder)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM"))
        return runs.trainer(folder, output, model=model, callbacks=callbacks)

    half = run([runs.StopAt(5)])
    half.train()
    want = runs.outcome(half)
    look = runs.Look()
    rest = run([look])
    rest.train(resume_from_checkpoint=True)
    runs.assert_equal(look.seen, {key: want[key] for key in ("weights", "moments", "rates", "schedule")} | {"step": 5})
    assert rest.state.global_step == 10
    changed = [
        name for name, value in runs.weights(rest.model).items() if not torch.equal(value, want["weights"][name])
    ]
    assert len(changed) == 8 and all("lora" in name for name in changed)


def test_adapters_on_a_sharded_base_resume(worlds, checkpoint, tmp_path):
    pytest.importorskip("peft")
    worlds(2).run(f"{HERE}:with_adapters", timeout=120, folder=checkpoint, output=str(tmp_path))


def refused_by_transformers(folder: str, output: str) -> None:
    run = runs.trainer(folder, output, ep_size=2)
    with pytest.raises(ValueError, match="Resuming is not supported for models sharded at load time"):
        Trainer.__init__.__wrapped__(Trainer.__new__(Trainer), run.model, run.args)
    assert run.args.save_only_model is False


def test_transformers_still_refuses_a_sharded_model(worlds, checkpoint, tmp_path):
    """The reason for the patch of `__init__`: once this fails, transformers has mended it."""
    worlds(2).run(f"{HERE}:refused_by_transformers", folder=checkpoint, output=str(tmp_path))


def half_done(folder, output, **options):
    runs.first_half(folder, str(output), **options)
    return str(output / "checkpoint-5")


def test_transformers_still_leaves_experts_untrained(checkpoint, tmp_path):
    """The reason for the patch of `_load_from_checkpoint` in one process (huggingface/transformers#48805)."""
    saved = half_done(checkpoint, tmp_path)
    run = runs.trainer(checkpoint, str(tmp_path))
    name = "model.layers.0.mlp.experts.down_proj"
    base, head = run.model.get_parameter(name).detach().clone(), run.model.lm_head.weight.detach().clone()
    Trainer._load_from_checkpoint.__wrapped__(run, saved)
    assert torch.equal(run.model.get_parameter(name), base) and not torch.equal(run.model.lm_head.weight, head)
    run._load_from_checkpoint(saved)
    assert not torch.equal(run.model.get_parameter(name), base)


def test_a_checkpoint_of_plain_trainer_resumes_in_one_process(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    plain = runs.trainer(checkpoint, str(tmp_path), model=model, callbacks=[runs.StopAt(5)])
    plain.train()
    assert (tmp_path / "checkpoint-5" / "optimizer.pt").is_file()
    look = runs.Look()
    run = runs.trainer(checkpoint, str(tmp_path), callbacks=[look])
    run.train(resume_from_checkpoint=True)
    assert look.seen["step"] == 5
    runs.assert_equal(look.seen["weights"], runs.weights(plain.model))
    runs.assert_equal(look.seen["moments"], runs.moments(plain.model, plain.optimizer))


def test_weights_alone_are_saved_and_resumed(checkpoint, tmp_path):
    saved = half_done(checkpoint, tmp_path, save_only_model=True)
    assert not (Path(saved) / "optimizer").exists()
    look = runs.Look()
    run = runs.trainer(checkpoint, str(tmp_path), callbacks=[look], save_only_model=True)
    run.train(resume_from_checkpoint=True)
    assert look.seen["step"] == 5 and look.seen["moments"] == {}


@pytest.fixture
def said(caplog):
    from transformers.utils import logging as hub_logging

    hub_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield lambda: [record.getMessage() for record in caplog.records]
    hub_logging.disable_propagation()


def test_another_global_batch_is_told(checkpoint, tmp_path, said):
    saved = half_done(checkpoint, tmp_path)
    for batch, told in ((4, 0), (2, 1)):
        run = runs.trainer(checkpoint, str(tmp_path), per_device_train_batch_size=batch, max_steps=6)
        run.train(resume_from_checkpoint=saved)
        lines = [line for line in said() if "global batch of 8, and now it is 4" in line]
        assert len(lines) == told


def test_a_broken_checkpoint_is_named_and_skipped(checkpoint, tmp_path, said):
    good = half_done(checkpoint, tmp_path)
    broken = tmp_path / "checkpoint-7"

    def breaks(path, how):
        shutil.copytree(good, broken, dirs_exist_ok=True)
        how(broken / path)
        run = runs.trainer(checkpoint, str(tmp_path), max_steps=6, save_strategy="no")
        with pytest.raises(CheckpointError, match=path.rsplit("/")[-1]):
            run.train(resume_from_checkpoint=str(broken))
        run.train(resume_from_checkpoint=True)
        assert run.state.global_step == 6
        assert any(f"{broken} can't be resumed from" in line for line in said())
        shutil.rmtree(broken)

    def truncate(path):
        path.write_bytes(path.read_bytes()[:-1])

    breaks("model.safetensors", truncate)
    breaks("model.safetensors", Path.unlink)
    breaks("optimizer/__0_0.distcp", truncate)
    breaks("optimizer/groups.pt", Path.unlink)
    breaks("trainer_state.json", Path.unlink)
    breaks("optimizer/.metadata", truncate)
    breaks("optimizer/groups.pt", lambda path: path.write_bytes(b""))
    breaks("scheduler.pt", lambda path: path.write_bytes(b""))
    breaks("model.safetensors.index.json", lambda path: path.write_text('{"weight_map"'))
    (tmp_path / "_saving").mkdir()
    run = runs.trainer(checkpoint, str(tmp_path), max_steps=6, save_strategy="no")
    run.train(resume_from_checkpoint=True)
    assert any(line.startswith(f"{tmp_path / '_saving'} is what is left of a save") for line in said())


def test_a_resumed_run_replaces_what_it_saves_again(checkpoint, tmp_path):
    saved = Path(half_done(checkpoint, tmp_path))
    (saved / "old").touch()
    run = runs.trainer(checkpoint, str(tmp_path), callbacks=[runs.StopAt(5)])
    run.train()
    assert not (saved / "old").exists() and not (tmp_path / "_saving").exists()
    assert folders.damage(saved) is None


class Mark(TrainerCallback):
    pass


def test_callbacks_are_for_models_of_this_library(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "callbacks", lambda model: [Mark()])
    adapted = runs.trainer(checkpoint, str(tmp_path), callbacks=[runs.StopAt(1)])
    assert isinstance(adapted.callback_handler.callbacks[0], Mark), "before those that report logs"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    plain = runs.trainer(checkpoint, str(tmp_path), model=model)
    assert not any(isinstance(callback, Mark) for callback in plain.callback_handler.callbacks)
    assert resume.own_model(plain.model) is None and resume.own_model(adapted.model) is adapted.model
