"""Gradient norms and clipping of a sharded model are those of the whole one, whoever clips; and a step that is not
finite is taken by all ranks or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from automodel_moe import MoEAutoModel
from tests import tiny
from tests.distributed import sweep

HERE = __name__
MAX_NORM = 0.1
# Ten roundings of float32: sums over ranks instead of rows.
TOLERANCE = 1e-6
LAYOUTS = {
    "EP 2": (2, {}),
    "EP 2 x efsdp 2": (4, {}),
    "2 replicas x EP 2": (4, {"dp_replicate_size": 2, "fsdp_size": 2}),
    "tp 2 x EP 2": (2, {"tp_size": 2, "fsdp_size": 1}),
}
# gpt_oss has experts with biases; in muse_spark, which can't be sharded by tensor, all experts share a norm.
CASES = [("gpt_oss", layout) for layout in LAYOUTS] + [("muse_spark", "EP 2 x efsdp 2")]


def load(kind: str, folder: str, shape: dict[str, int], **moe_config: Any):
    if tiny.model_class(kind).config_class not in AutoModelForCausalLM._model_mapping:
        AutoModelForCausalLM.register(tiny.model_class(kind).config_class, tiny.model_class(kind), exist_ok=True)
    options = {"distributed_config": DistributedConfig(**shape, ep_size=2)} if shape else {}
    return MoEAutoModel.from_pretrained(
        folder, moe_config={"ep_size": 2, **moe_config}, dtype=torch.float32, **options
    )


def reference(kind: str, folder: Path) -> float:
    """Write a checkpoint, and the clipped gradients of one process; returns their norm before."""
    sweep.reference(kind, folder)
    model = tiny.model_class(kind).from_pretrained(folder, experts_implementation="eager", dtype=torch.float32)
    tiny.loss(model, tiny.batch(kind)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    torch.save({key: p.grad for key, p in model.named_parameters()}, folder / "clipped.pt")
    return norm.item()


def clip(kind: str, folder: str, shape: dict[str, int], by: str) -> tuple[float, float, str]:
    """Run by every rank: the norm that each way of clipping returns, and the worst gradient it leaves."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    model = load(kind, folder, shape)
    data_ranks = dist.get_world_size() // shape.get("tp_size", 1)
    part = dist.get_rank() // shape.get("tp_size", 1)
    tiny.loss(model, {key: value.chunk(data_ranks)[part] for key, value in tiny.batch(kind).items()}).backward()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        if by == "torch":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        elif by == "accelerate":
            norm = Accelerator(cpu=True).clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            arguments = TrainingArguments(
                output_dir=f"{folder}/out", save_strategy="no", report_to="none", use_cpu=True, max_grad_norm=MAX_NORM
            )
            norm = Trainer(model=model, args=arguments)._clip_grad_norm(model)
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm.item(), *sweep.worst_gradient(model, torch.load(f"{folder}/clipped.pt"))


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_clip_norms_are_the_gathered_models(worlds, tmp_path, kind, layout):
    want = reference(kind, tmp_path)
    assert want > MAX_NORM, "or nothing would be clipped"
    ranks, shape = LAYOUTS[layout]
    # accelerate 1.15 has no tensor parallelism on CPUs, where Trainer would ask it for some.
    for by in ("torch", "accelerate", "Trainer")[: 2 if "tp_size" in shape else 3]:
        for got, worst, parameter in worlds(ranks).run(
            f"{HERE}:clip", kind=kind, folder=str(tmp_path), shape=shape, by=by
        ):
            assert got == pytest.approx(want, rel=TOLERANCE), by
            assert worst <= sweep.GRADIENT_TOLERANCE, (by, parameter)


def one_bad_element(folder: str, parameter: str, value: float, scaler: bool) -> None:
    """Run by every rank: the last one has an element that is not finite in its own part of one gradient."""
    model = load("qwen3_moe", folder, {}, skip_nonfinite_steps=not scaler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
    inputs = {key: v.chunk(dist.get_world_size())[dist.get_rank()] for key, v in tiny.batch("qwen3_moe").items()}
    before = [p.to_local().clone() for p in model.parameters()]
    for bad in (True, False):
        grad_scaler.scale(model(**inputs).loss).backward()
        if bad and dist.get_rank() == dist.get_world_size() - 1:
            dict(model.named_parameters())[parameter].grad.to_local().view(-1)[0] = value
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(same) if bad else not any(same), bad
        assert len(optimizer.state) == (0 if bad else len(before)), "the optimizer's state is as it was too"


@pytest.mark.parametrize(
    ("parameter", "value", "scaler"),
    [
        ("model.layers.1.mlp.experts.down_proj", float("nan"), False),
        ("model.embed_tokens.weight", float("-inf"), False),
        ("model.layers.1.mlp.experts.down_proj", float("inf"), True),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(worlds, tmp_path, parameter, value, scaler):
    tiny.save("qwen3_moe", tmp_path)
    worlds(2).run(f"{HERE}:one_bad_element", folder=str(tmp_path), parameter=parameter, value=value, scaler=scaler)
