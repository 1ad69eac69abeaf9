"""The router's aux loss is one number, whatever the world, the layout and the accumulation: transformers' own function
of the concatenation of all ranks' rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from automodel_moe import MoEAutoModel
from automodel_moe.trainer import aux_loss
from tests import tiny
from tests.distributed import sweep
from tests.distributed.sweep import Layout

HERE = __name__
WITH_AUX = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
# Ten roundings of float32: sums over ranks instead of rows.
TOLERANCE = 1e-6
LAYOUTS = {
    "2 ranks": Layout(2, ep=1),
    "EP 2": Layout(2, ep=2),
    "4 ranks": Layout(4, ep=1),
    "EP 2 x efsdp 2": Layout(4, ep=2),
    "EP 4": Layout(4, ep=4),
    "tp 2 x EP 2": Layout(2, ep=2, tp=2),
}


def uneven(kind: str = "qwen3_moe", rows: int = 4) -> dict[str, torch.Tensor]:
    """Four rows of 12, 3, 7 and 1 tokens (repeated), the rest padding: 15 and 8 tokens on two ranks."""
    inputs = tiny.batch(kind, rows=rows)
    lengths = torch.tensor([12, 3, 7, 2] * (rows // 4))
    inputs["attention_mask"] = (torch.arange(12) < lengths[:, None]).long()
    inputs["labels"].masked_fill_(inputs["attention_mask"] == 0, -100)
    return inputs


def routers(model) -> dict[str, torch.Tensor]:
    return {key: p for key, p in model.named_parameters() if key.endswith(("gate.weight", "router.weight"))}


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint, and beside it what plain transformers makes of all rows at once in one process."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder, **WITH_AUX)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    inputs = uneven()
    made = {"inputs": inputs, "n_labels": int((inputs["labels"][:, 1:] != -100).sum())}
    output = model(**inputs, num_items_in_batch=made["n_labels"])
    made |= {"aux_loss": output.aux_loss.detach(), "loss": output.loss.detach()}
    output.aux_loss.backward(retain_graph=True)
    made["aux_gradients"] = {key: p.grad.clone() for key, p in routers(model).items()}
    model.zero_grad()
    output.loss.backward()
    made["gradients"] = {key: p.grad for key, p in model.named_parameters()}
    torch.save(made, folder / "reference.pt")
    return folder


def plain_loop(folder: str, layout: Layout) -> dict[str, float]:
    """Run by every rank: its rows, once for the aux loss alone, once for the loss that holds it."""
    made = torch.load(Path(folder) / "reference.pt")
    model = sweep.load("qwen3_moe", Path(folder), layout)
    part = dist.get_rank() // layout.tp
    inputs = {key: value.chunk(layout.fsdp)[part] for key, value in made["inputs"].items()}

    output = model(**{key: value for key, value in inputs.items() if key != "labels"})
    alone = output.aux_loss
    # FSDP2 brings a layer's weights back when the gradient reaches the layer's output.
    (alone + 0.0 * output.logits.sum()).backward()
    grads = {key: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for key, p in routers(model).items()}
    worst = max(off(grad, made["aux_gradients"][key]) for key, grad in grads.items())

    model.zero_grad()
    output = model(**inputs, num_items_in_batch=made["n_labels"])
    (output.loss * layout.fsdp).backward()
    total = output.loss.detach().clone()
    dist.all_reduce(total)
    return {
        "aux_loss": off(alone.detach(), made["aux_loss"]),
        "aux_gradient": worst,
        "aux_loss beside a loss": off(output.aux_loss.detach(), made["aux_loss"]),
        "loss": off(total / layout.tp, made["loss"]),
        "gradient": sweep.worst_gradient(model, made["gradients"])[0],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_value_and_one_router_gradient_for_every_layout(worlds, checkpoint, layout):
    layout = LAYOUTS[layout]
    for result in worlds(layout.ranks).run(f"{HERE}:plain_loop", folder=str(checkpoint), layout=layout):
        assert result.pop("gradient") <= sweep.GRADIENT_TOLERANCE, "of the cross-entropy and the aux loss"
        for what, error in result.items():
            assert error <= TOLERANCE, what


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "olmoe", "ernie4_5_moe", "jamba"])
def test_on_one_process_it_is_transformers_own(tmp_path, kind):
    tiny.save(kind, tmp_path, **WITH_AUX)
    ours = MoEAutoModel.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    got, want = (model(**uneven(kind)) for model in (ours, theirs))
    for model, output in ((ours, got), (theirs, want)):
        assert output.aux_loss.item() > 0
        output.aux_loss.backward(retain_graph=True)
        model.grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert off(got.aux_loss.detach(), want.aux_loss.detach()) <= TOLERANCE
    assert off(got.loss.detach(), want.loss.detach()) <= TOLERANCE
    assert ours.grads.keys() == theirs.grads.keys()
    for key, grad in theirs.grads.items():
        assert off(ours.grads[key], grad) <= sweep.GRADIENT_TOLERANCE, key


@pytest.mark.parametrize("n", [1, 3])
def test_copies_of_a_micro_batch_give_the_value_of_one(checkpoint, n):
    made = torch.load(checkpoint / "reference.pt")
    model = MoEAutoModel.from_pretrained(checkpoint)
    loss = torch.zeros(())
    for _ in range(n):
        output = model(**made["inputs"], num_items_in_batch=torch.tensor(n * made["n_labels"]))
        assert off(output.aux_loss.detach(), made["aux_loss"]) <= TOLERANCE, "what is logged is the loss itself"
        output.loss.backward()
        loss += output.loss.detach()
    assert off(loss, made["loss"]) <= TOLERANCE
    for key, p in routers(model).items():
        assert off(p.grad, made["gradients"][key]) <= sweep.GRADIENT_TOLERANCE


def test_a_tuple_holds_the_whole_aux_loss_too(checkpoint):
    made = torch.load(checkpoint / "reference.pt")
    model = MoEAutoModel.from_pretrained(checkpoint)
    output = model(**made["inputs"], num_items_in_batch=2 * made["n_labels"], return_dict=False)
    assert off(output[0].detach(), made["loss"] / 2) <= TOLERANCE
    assert off(output[1].detach(), made["aux_loss"]) <= TOLERANCE


def train(folder: str, accumulation: int, average: bool) -> dict[str, float]:
    """One step of an unmodified Trainer over eight rows; run by every rank, or by one process."""
    from accelerate.state import AcceleratorState, PartialState

    world = dist.get_world_size() if dist.is_initialized() else 1
    inputs = uneven(rows=8)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trainer = Trainer(
            model=MoEAutoModel.from_pretrained(folder),
            train_dataset=[{key: value[row] for key, value in inputs.items()} for row in range(8)],
            args=TrainingArguments(
                output_dir=f"{folder}/out", max_steps=1, logging_steps=1, save_strategy="no", report_to="none",
                per_device_train_batch_size=8 // world // accumulation, gradient_accumulation_steps=accumulation,
                train_sampling_strategy="sequential", average_tokens_across_devices=average, use_cpu=True,
                disable_tqdm=True,
            ),
        )  # fmt: skip
        trainer.train()
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return {key: trainer.state.log_history[0][key] for key in ("loss", "grad_norm")}


def expected_step(folder: Path, accumulation: int, ranks: int = 1) -> dict[str, float]:
    """Plain transformers in one process: each rank's sum over its labels, and the micro-steps' aux losses weighed by
    their labels. With more than one rank, each of them divides by its own labels."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    micro_steps = [{key: v.chunk(accumulation)[i] for key, v in uneven(rows=8).items()} for i in range(accumulation)]
    parts = [[{key: v.chunk(ranks)[r] for key, v in micro.items()} for micro in micro_steps] for r in range(ranks)]
    total = torch.zeros(())
    for own in parts:
        counts = [(part["labels"][:, 1:] != -100).sum() for part in own]
        for part, count, micro in zip(own, counts, micro_steps, strict=True):
            output = model(**part, num_items_in_batch=sum(counts))
            loss = output.loss - output.aux_loss + count / sum(counts) * model(**micro).aux_loss
            (loss / ranks).backward()
            total += loss.detach() / ranks
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return {"loss": total.item(), "grad_norm": norm.item()}


@pytest.mark.parametrize(
    ("world", "accumulation", "average"), [(1, 1, True), (1, 2, True), (2, 1, True), (2, 2, True), (2, 2, False)]
)
def test_trainer_logs_and_trains_on_one_value(worlds, checkpoint, world, accumulation, average):
    want = expected_step(checkpoint, accumulation, ranks=1 if average else world)
    options = {"folder": str(checkpoint), "accumulation": accumulation, "average": average}
    results = worlds(2).run(f"{HERE}:train", **options) if world == 2 else [train(**options)]
    for got in results:
        assert got["loss"] == pytest.approx(want["loss"], rel=TOLERANCE)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=TOLERANCE)


def fine_tune(folder: str, per_device: int) -> dict[str, float]:
    """One step of TRL's SFTTrainer, whose fused head is a forward of its own; run by every rank, or by one process."""
    from accelerate.state import AcceleratorState, PartialState
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(tiny.VOCAB)}, unk_token="0"))
    ids = tiny.batch("qwen3_moe")["input_ids"].tolist()
    rows = [{"input_ids": row[:length]} for row, length in zip(ids, (12, 3, 7, 2), strict=True)]
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trainer = SFTTrainer(
            model=MoEAutoModel.from_pretrained(folder),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2"),
            train_dataset=Dataset.from_list(rows),
            args=SFTConfig(
                output_dir=f"{folder}/out", max_steps=1, logging_steps=1, save_strategy="no", report_to="none",
                per_device_train_batch_size=per_device, train_sampling_strategy="sequential", use_cpu=True,
                bf16=False, gradient_checkpointing=False, disable_tqdm=True,
            ),
        )  # fmt: skip
        trainer.train()
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return {key: trainer.state.log_history[0][key] for key in ("loss", "grad_norm", "aux_loss")}


def test_trl_has_one_value_too(worlds, checkpoint):
    pytest.importorskip("trl")
    made = torch.load(checkpoint / "reference.pt")
    alone = fine_tune(str(checkpoint), per_device=4)
    assert alone["aux_loss"] == pytest.approx(made["aux_loss"].item(), rel=TOLERANCE)
    for got in worlds(2).run(f"{HERE}:fine_tune", folder=str(checkpoint), per_device=2):
        assert got == pytest.approx(alone, rel=TOLERANCE)


def test_models_that_others_loaded_keep_transformers_own(checkpoint):
    """Fails too when transformers has mended its aux loss: then the patch goes."""
    MoEAutoModel.from_pretrained(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager")
    made = torch.load(checkpoint / "reference.pt")
    output = theirs(**made["inputs"], num_items_in_batch=2 * made["n_labels"])
    cross_entropy = (made["loss"] - made["aux_loss"]) / 2
    assert off(output.loss.detach(), cross_entropy + made["aux_loss"]) <= TOLERANCE, "the whole aux loss"


def test_a_loss_of_another_kind_is_left_alone(monkeypatch):
    def squared(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return sum(logits.square().mean() for logits in gate_logits)

    namespace: dict[str, Any] = {aux_loss.FUNCTION: squared}
    assert not aux_loss._patch(namespace, "SquaredForCausalLM")
    assert namespace[aux_loss.FUNCTION] is squared


def test_the_switch(monkeypatch, tmp_path):
    tiny.save("mixtral", tmp_path, **WITH_AUX)
    monkeypatch.setenv(aux_loss.SWITCH, "0")
    model = MoEAutoModel.from_pretrained(tmp_path)
    inputs = uneven("mixtral")
    n_labels = (inputs["labels"][:, 1:] != -100).sum()
    output, halved = (model(**inputs, num_items_in_batch=n * n_labels) for n in (1, 2))
    cross_entropy = output.loss - output.aux_loss
    assert off((halved.loss - halved.aux_loss).detach(), cross_entropy.detach() / 2) <= 10 * TOLERANCE
