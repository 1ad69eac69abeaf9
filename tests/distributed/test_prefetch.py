"""When gathers start, against when experts compute: an event log of one step over gloo ranks."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from automodel_moe import MoEAutoModel
from automodel_moe.block import experts_modules
from tests import tiny
from tests.distributed.sweep import GRADIENT_TOLERANCE, LOSS_TOLERANCE, reference, worst_gradient

LAYERS = 4


def mark(event: str) -> None:
    with record_function(event):
        pass


def mark_experts(experts: dict) -> None:
    """Events where each layer's experts begin and end, in forward and in backward."""

    def before(layer, module, args):
        mark(f"forward {layer} begins")
        args[0].register_hook(lambda grad: mark(f"backward {layer} ends"))

    def after(layer, module, args, output):
        mark(f"forward {layer} ends")
        output.register_hook(lambda grad: mark(f"backward {layer} begins"))

    for layer, module in enumerate(experts.values()):
        module.register_forward_pre_hook(lambda *a, layer=layer: before(layer, *a))
        module.register_forward_hook(lambda *a, layer=layer: after(layer, *a))


def step(folder: str, ep_size: int, ahead: int | str, checkpointing: bool = False) -> dict:
    made = torch.load(Path(folder) / "reference.pt")
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": ep_size, "prefetch": ahead})
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    mark_experts(experts_modules(model))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss = tiny.loss(model, {key: value.chunk(ranks)[rank] for key, value in made["inputs"].items()})
        loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    log = sorted((event.time_range.start, event.name) for event in profiled.events())
    wanted = ("FSDP::all_gather (", "forward ", "backward ")
    return {
        "log": [name for _, name in log if name.startswith(wanted)],
        "loss": abs(total / ranks - made["loss"]).item() / made["loss"].item(),
        "gradient": worst_gradient(model, made["gradients"]),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    reference("qwen3_moe", folder, num_hidden_layers=LAYERS)
    return str(folder)


def gathers(log: list[str], layer: int, unit: str = "") -> list[int]:
    """Where in the log the gathers of a layer start: the forward's and the backward's."""
    return [at for at, name in enumerate(log) if name == f"FSDP::all_gather (model.layers.{layer}{unit})"]


def check_parity(result: dict) -> None:
    assert result["loss"] <= LOSS_TOLERANCE
    assert result["gradient"][0] <= GRADIENT_TOLERANCE, result["gradient"][1]


@pytest.mark.parametrize("ahead", [0, "auto", 2])
def test_the_next_layers_gather_starts_before_this_layers_experts_end(worlds, checkpoint, ahead):
    for result in worlds(2).run(f"{__name__}:step", timeout=120, folder=checkpoint, ep_size=1, ahead=ahead):
        check_parity(result)
        log = result["log"]
        for layer in range(LAYERS):
            forward, backward = gathers(log, layer)  # once each, prefetched or not
            began = [other for other in range(LAYERS) if log.index(f"forward {other} begins") < forward]
            # The layers whose experts have begun before: all but the layer itself and those that start it early.
            assert len(began) == max(layer - {"auto": 1}.get(ahead, ahead), 0)
            if layer < LAYERS - 1 and ahead:
                assert backward < log.index(f"backward {layer + 1} begins")


@pytest.mark.parametrize("ep_size, ahead", [(2, "auto"), (1, 1)])
def test_recompute_and_experts_that_are_a_unit_of_their_own(worlds, checkpoint, ep_size, ahead):
    # Four ranks, EP 2: each expert is sharded over two of them, its layer over all.
    ranks = 2 * ep_size
    arguments = {"folder": checkpoint, "ep_size": ep_size, "ahead": ahead, "checkpointing": True}
    for result in worlds(ranks).run(f"{__name__}:step", timeout=120, **arguments):
        check_parity(result)
        if ep_size > 1:
            for layer in range(LAYERS - 1):
                later = gathers(result["log"], layer + 1, ".mlp.experts")[0]
                assert later < result["log"].index(f"forward {layer} begins")


def test_experts_that_nobody_gathers_are_left_to_fsdp2(worlds, checkpoint):
    for result in worlds(2).run(f"{__name__}:step", timeout=120, folder=checkpoint, ep_size=2, ahead="auto"):
        log = result["log"]
        assert gathers(log, 1)[0] > log.index("forward 0 ends")
