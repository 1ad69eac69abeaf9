"""Batches and routings at the edge: loss, logits and gradients as one process of plain transformers has them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.distributed.sweep import GRADIENT_TOLERANCE, LAYOUTS, LOSS_TOLERANCE, load, worst_gradient

ROWS = 4
# What each kind calls its number of experts.
KINDS = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}


@dataclass(frozen=True)
class Case:
    """One edge.

    - `config` overrides the tiny configuration; `one_expert_a_rank` sets its number of experts.
    - `favoured` experts take every token of every layer.
    - `kept` tokens of each row are real, the others padding on the side `padding`.
    - `trained` is a pattern of the parameters that keep their gradient; the others are frozen.
    - `embeds` feeds `inputs_embeds` that need no gradient in place of ids.
    """

    config: dict[str, Any] = field(default_factory=dict)
    one_expert_a_rank: bool = False
    favoured: tuple[int, ...] = ()
    length: int = 12
    kept: tuple[int, ...] | None = None
    padding: str = "right"
    trained: str = ""
    embeds: bool = False


CASES = {
    "experts of a rank get no token": Case(favoured=(0, 1)),
    "all tokens to one expert": Case({"num_experts_per_tok": 1}, favoured=(5,)),
    "top-k 1": Case({"num_experts_per_tok": 1}),
    "top-k of all experts": Case({"num_experts_per_tok": 8}),
    "one expert a rank": Case(one_expert_a_rank=True),
    "mostly padding on the right": Case(kept=(1, 2, 12, 1)),
    "mostly padding on the left": Case(kept=(1, 2, 12, 1), padding="left"),
    # transformers' attention can't view a batch of no rows: a rank without tokens is one whose rows are all padding.
    "a rank has no token": Case(kept=(12, 7, 0, 0)),
    "sequence length 1": Case(length=1),
    "embeddings frozen": Case(trained="layers"),
    "only experts trained": Case(trained=r"\.experts\."),
    "only routers trained": Case(trained="router|gate.weight"),
    "inputs_embeds without gradient": Case(embeds=True),
}


def favour(model: transformers.PreTrainedModel, experts: tuple[int, ...]) -> None:
    """Make every token of every layer choose `experts`: the first hidden feature is made large and positive
    everywhere, and the routers are made to look at it."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 5.0
        for key, p in model.named_parameters():
            if re.search(r"(router|gate)\.weight$", key):
                p[:, 0] = -10.0
                p[list(experts), 0] = 10.0


def batch(kind: str, case: Case, model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = tiny.batch(kind, rows=ROWS, length=case.length)
    if case.kept is not None:
        place = torch.arange(case.length)
        kept = torch.tensor(case.kept)[:, None]
        mask = place < kept if case.padding == "right" else place >= case.length - kept
        inputs["attention_mask"] = mask.long()
        inputs["labels"].masked_fill_(~mask, -100)
    if case.embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return inputs


def loss_and_logits(model, inputs: dict[str, torch.Tensor], n_labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the rows' labels, over all ranks' number of labels: right too for a rank that has none. Each
    position is scored against its own label, so that a sequence of one token has a loss."""
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False).logits
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    return summed / n_labels, logits.detach()[inputs["labels"] != -100]


def freeze(model: transformers.PreTrainedModel, trained: str) -> None:
    for key, p in model.named_parameters():
        p.requires_grad_(bool(re.search(trained, key)))


def reference(kind: str, case: Case, ranks: int, folder: Path) -> torch.Tensor:
    """Write the case's checkpoint and what one process makes of it; returns the first layer's choices, `[T, K]`."""
    config = case.config | ({KINDS[kind]: ranks} if case.one_expert_a_rank else {})
    model = tiny.build(kind, **config)
    if case.favoured:
        favour(model, case.favoured)
    model.save_pretrained(folder)
    model = type(model).from_pretrained(folder, experts_implementation="eager", dtype=torch.float32)
    freeze(model, case.trained)
    inputs = batch(kind, case, model)
    chosen: list[torch.Tensor] = []
    experts = next(m for m in model.modules() if type(m).__name__ == tiny.experts_class(kind))
    experts.register_forward_pre_hook(
        lambda module, arguments: chosen.append(arguments[1].reshape(ROWS, case.length, -1))
    )
    n_labels = int((inputs["labels"] != -100).sum())
    loss, logits = loss_and_logits(model, inputs, n_labels)
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    made = {"inputs": inputs, "loss": loss.detach(), "logits": logits, "gradients": gradients}
    torch.save(made, folder / "reference.pt")
    return chosen[0][inputs["attention_mask"].bool()]


def step(kind: str, case: Case, layout: str, folder: str) -> dict[str, Any]:
    """Run by every rank: the case through the sharded model."""
    made = torch.load(Path(folder) / "reference.pt")
    model = load(kind, Path(folder), LAYOUTS[layout])
    freeze(model, case.trained)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    labels = made["inputs"]["labels"].chunk(ranks)
    inputs = {key: value.chunk(ranks)[rank] for key, value in made["inputs"].items()}
    n_labels = [int((part != -100).sum()) for part in labels]
    loss, logits = loss_and_logits(model, inputs, sum(n_labels))
    # FSDP2 takes the mean over the ranks of what is a sum.
    (loss * ranks).backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    worst, parameter = worst_gradient(model, made["gradients"])
    return {
        "loss": abs(total - made["loss"]).item() / made["loss"].item(),
        "logits": (logits - made["logits"].split(n_labels)[rank]).abs().sum().item(),
        "gradient": worst,
        "parameter": parameter,
    }


@pytest.mark.parametrize("layout", ["EP 2", "EP 4"])
@pytest.mark.parametrize("edge", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_edge(worlds, tmp_path, kind, edge, layout):
    case, ranks = CASES[edge], LAYOUTS[layout].ranks
    chosen = reference(kind, case, ranks, tmp_path)
    if case.favoured:
        assert set(chosen.flatten().tolist()) == set(case.favoured), "the routing that this case is about"
    for result in worlds(ranks).run(
        f"{__name__}:step", timeout=90, kind=kind, case=case, layout=layout, folder=str(tmp_path)
    ):
        assert result["loss"] <= LOSS_TOLERANCE
        # A few hundred logits of size 1, each off by a few roundings of float32.
        assert result["logits"] <= 1e-6 * ROWS * case.length * tiny.VOCAB
        assert result["gradient"] <= GRADIENT_TOLERANCE, result["parameter"]
