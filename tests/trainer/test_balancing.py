"""Counts of tokens an expert, and the routing biases moved by them: exact, in every layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from automodel_moe import MoEAutoModel, load_imbalance
from automodel_moe.trainer.expert_load import LoadImbalanceCallback
from tests import tiny
from tests.distributed.sweep import Layout

HERE = __name__
RATE = 0.01
STEPS, MICRO_STEPS = 3, 2
# The bias is a buffer in the one, and a parameter in the other, which FSDP2 shards.
KINDS = ["glm4_moe", "ernie4_5_moe"]
LAYOUTS = {
    "2 ranks": Layout(2, ep=1),
    "EP 2": Layout(2, ep=2),
    "EP 2 x efsdp 2": Layout(4, ep=2),
    "EP 4": Layout(4, ep=4),
    "tp 2 x EP 2": Layout(2, ep=2, tp=2),
}


def batches(kind: str) -> list[list[dict[str, torch.Tensor]]]:
    """By step and micro-step, four rows with padding."""
    made = []
    for step in range(STEPS):
        made.append([])
        for micro in range(MICRO_STEPS):
            inputs = tiny.batch(kind, seed=10 * step + micro)
            lengths = torch.tensor([12, 3 + step, 7, 2 + micro])
            inputs["attention_mask"] = (torch.arange(12) < lengths[:, None]).long()
            inputs["labels"].masked_fill_(inputs["attention_mask"] == 0, -100)
            made[-1].append(inputs)
    return made


def biases(model) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().clone().flatten()
    return found


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(model, steps: list, scale: int = 1, part: tuple[int, int] = (0, 1)) -> None:
    """A plain loop: `part` is (index, number) of this rank's rows, `scale` the mean that FSDP2 takes."""
    optimizer = optimizer_of(model)
    for micro_steps in steps:
        n_labels = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in micro_steps)
        for inputs in micro_steps:
            inputs = {key: value.chunk(part[1])[part[0]] for key, value in inputs.items()}
            (model(**inputs, num_items_in_batch=n_labels).loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(kind: str, folder: Path) -> dict[str, Any]:
    """Plain transformers in one process, its biases moved by the published rule, written down once more."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    blocks = {name.rpartition(".")[0]: m for name, m in model.named_modules() if name.endswith(".experts")}
    mask: list[torch.Tensor] = []
    chosen = {name: [] for name in blocks}
    for name, experts in blocks.items():
        experts.register_forward_pre_hook(lambda m, args, name=name: chosen[name].append(args[1][mask[-1]]))
    optimizer = optimizer_of(model)
    counts = {name: torch.zeros(8, dtype=torch.long) for name in blocks}
    for micro_steps in batches(kind):
        n_labels = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in micro_steps)
        for inputs in micro_steps:
            mask.append(inputs["attention_mask"].bool().flatten())
            model(**inputs, num_items_in_batch=n_labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name in blocks:
            load = torch.bincount(torch.cat(chosen[name]).flatten(), minlength=8)
            counts[name] += load
            chosen[name].clear()
            bias = next(
                t for n, t in [*model.named_parameters(), *model.named_buffers()] if re.match(name + r"\..*bias", n)
            )
            with torch.no_grad():
                bias += (RATE * torch.sign(load.float().mean() - load)).view(bias.shape)
    return {"biases": biases(model), "counts": {f"{name}.experts": c.tolist() for name, c in counts.items()}}


def moe_config(layout: Layout | None = None) -> dict[str, Any]:
    return {"router_bias_update_rate": RATE, "load_stats": True, "ep_size": layout.ep if layout else "auto"}


def balanced(kind: str, folder: str, layout: Layout) -> dict[str, Any]:
    """Run by every rank."""
    options = {}
    if layout.tp > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=layout.tp, fsdp_size=layout.fsdp, ep_size=layout.ep)
    model = MoEAutoModel.from_pretrained(folder, moe_config=moe_config(layout), **options).train()
    train(model, batches(kind), layout.fsdp, (dist.get_rank() // layout.tp, layout.fsdp))
    made = {"biases": biases(model), "load": load_imbalance(model), "again": load_imbalance(model)}
    model.save_pretrained(f"{folder}/saved")
    reloaded = MoEAutoModel.from_pretrained(f"{folder}/saved", moe_config={"ep_size": layout.ep}, **options)
    made["reloaded"] = biases(reloaded)
    return made


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and want
    for name, bias in want.items():
        assert bias.dtype == torch.float32 and torch.equal(got[name], bias), (name, got[name], bias)


@pytest.mark.parametrize(
    ("kind", "layout"), [("glm4_moe", name) for name in LAYOUTS] + [("ernie4_5_moe", "EP 2 x efsdp 2")]
)
def test_biases_and_counts_are_those_of_one_process(worlds, tmp_path, kind, layout):
    tiny.save(kind, tmp_path)
    want, layout = reference(kind, tmp_path), LAYOUTS[layout]
    assert not torch.equal(*(bias[:2] for bias in (next(iter(want["biases"].values())), torch.zeros(2))))
    for got in worlds(layout.ranks).run(f"{HERE}:balanced", kind=kind, folder=str(tmp_path), layout=layout):
        assert_same(got["biases"], want["biases"])
        assert_same(got["reloaded"], want["biases"])
        assert {name: layer["experts"] for name, layer in got["load"].items()} == want["counts"]
        for layer in got["load"].values():
            experts = torch.tensor(layer["experts"])
            assert layer["ranks"] == experts.view(layout.ep, -1).sum(1).tolist()
            assert layer["expert_max_over_mean"] == pytest.approx((experts.max() / experts.float().mean()).item())
        for layer in got["again"].values():
            assert not any(layer["experts"]) and layer["expert_max_over_mean"] == 1.0, "read, and none since"


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_and_evaluation_do_not_count(tmp_path, kind):
    tiny.save(kind, tmp_path)
    want = reference(kind, tmp_path)
    model = MoEAutoModel.from_pretrained(tmp_path, moe_config=moe_config()).train()
    model.activation_checkpointing_enable()
    with torch.no_grad():
        model(**batches(kind)[0][0])
    train(model, batches(kind))
    assert_same(biases(model), want["biases"])
    assert {name: layer["experts"] for name, layer in load_imbalance(model).items()} == want["counts"]


def test_two_optimizers_of_one_model_move_the_biases_once(tmp_path):
    tiny.save("glm4_moe", tmp_path)
    model = MoEAutoModel.from_pretrained(tmp_path, moe_config=moe_config()).train()
    stranger = torch.nn.Linear(2, 2)
    named = dict(model.named_parameters())
    before = biases(model)
    parts = [[p for name, p in named.items() if ("experts" in name) == experts] for experts in (True, False)]
    optimizers = [torch.optim.SGD(part, lr=0.0) for part in [*parts, list(stranger.parameters())]]
    model(**tiny.batch("glm4_moe")).loss.backward()
    optimizers[2].step()
    assert_same(biases(model), before)
    for optimizer in (*optimizers, *optimizers):
        optimizer.step()
    for name, bias in biases(model).items():
        steps = ((bias - before[name]) / RATE).round()
        assert set(steps.tolist()) <= {-1.0, 0.0, 1.0} and steps.any(), name


class Reporter(TrainerCallback):
    """Keeps what it is given to report of the training."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs = dict(logs)


def test_trainer_moves_the_biases_and_logs_the_imbalance(tmp_path):
    kind = "glm4_moe"
    tiny.save(kind, tmp_path)
    want = reference(kind, tmp_path)
    rows = [
        {key: value[row] for key, value in inputs.items()}
        for micro_steps in batches(kind)
        for inputs in micro_steps
        for row in range(4)
    ]
    trainer = Trainer(
        model=MoEAutoModel.from_pretrained(tmp_path, moe_config=moe_config()),
        train_dataset=rows,
        eval_dataset=rows[:4],
        args=TrainingArguments(
            output_dir=str(tmp_path / "out"), num_train_epochs=1, per_device_train_batch_size=4, logging_steps=STEPS,
            gradient_accumulation_steps=MICRO_STEPS, optim="sgd", learning_rate=0.01, lr_scheduler_type="constant",
            max_grad_norm=0.0, eval_strategy="steps", eval_steps=1, train_sampling_strategy="sequential",
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        ),
    )  # fmt: skip
    reported = Reporter()
    trainer.callback_handler.callbacks = [LoadImbalanceCallback(), *trainer.callback_handler.callbacks, reported]
    trainer.train()
    assert_same(biases(trainer.model), want["biases"])
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    counts = [torch.tensor(c).float() for c in want["counts"].values()]
    assert log["expert_load_max_over_mean"] == pytest.approx(max((c.max() / c.mean()).item() for c in counts))
    assert log["rank_load_max_over_mean"] == 1.0
    assert reported.logs["expert_load_max_over_mean"] == log["expert_load_max_over_mean"]
    assert all("expert_load_max_over_mean" not in entry for entry in trainer.state.log_history if "eval_loss" in entry)


def test_off_by_default(tmp_path):
    tiny.save("glm4_moe", tmp_path)
    model = MoEAutoModel.from_pretrained(tmp_path).train()
    before = biases(model)
    train(model, batches("glm4_moe")[:1])
    assert_same(biases(model), before)
    with pytest.raises(ValueError, match="doesn't count its experts' tokens"):
        load_imbalance(model)


def test_what_cannot_be_had_is_refused(tmp_path):
    tiny.save("qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match="no router of Qwen3MoeForCausalLM has an e_score_correction_bias"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"router_bias_update_rate": 0.001})
    with pytest.raises(ValueError, match="load_stats=True counts tokens"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"load_stats": True}, experts_implementation="eager")
    with pytest.raises(ValueError, match="router_bias_update_rate=-1"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"router_bias_update_rate": -1})


def in_bfloat16(kind: str, folder: str) -> None:
    """Run by every rank: only the bias stays in float32, on disk too."""
    options = {"dtype": torch.bfloat16, "moe_config": {"router_bias_update_rate": 0.001, "ep_size": 2}}
    model = MoEAutoModel.from_pretrained(folder, **options).train()
    assert model.dtype == torch.bfloat16
    before = biases(model)
    train(model, batches(kind)[:2], 2, (dist.get_rank(), 2))
    after = biases(model)
    model.save_pretrained(f"{folder}/saved")
    assert_same(biases(MoEAutoModel.from_pretrained(f"{folder}/saved", **options)), after)
    for name, bias in after.items():
        steps = (bias - before[name]) / 0.001
        # To the last place of a bias of about 1.
        assert steps.any() and (steps - steps.round()).abs().max() < 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_model_keeps_its_biases_in_float32(worlds, tmp_path, kind):
    tiny.save(kind, tmp_path)
    worlds(2).run(f"{HERE}:in_bfloat16", kind=kind, folder=str(tmp_path))


def test_a_bias_in_half_precision_is_kept_in_float32(tmp_path):
    tiny.save("minimax_m2", tmp_path, dtype=torch.bfloat16)
    model = MoEAutoModel.from_pretrained(tmp_path, moe_config={"router_bias_update_rate": 0.001}).train()
    before = biases(model)
    train(model, batches("minimax_m2")[:1])
    for name, bias in biases(model).items():
        assert bias.dtype == torch.float32
        moved = (bias - before[name]).abs()
        # 0.001 to the last place of a bias of about 1.
        assert moved.max().item() == pytest.approx(0.001, abs=1e-6), name
