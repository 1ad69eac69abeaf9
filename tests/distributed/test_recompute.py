"""Recompute levels over gloo ranks: what is exchanged, and that no gradient changes by a bit."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from automodel_moe import MoEAutoModel
from automodel_moe.block import experts_modules
from automodel_moe.dispatch.all_to_all import AllToAll
from tests import tiny
from tests.distributed.test_auto import full_grads, own_rows

HERE = __name__
LAYERS = 2  # of qwen3_moe's tiny configuration, each with experts


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


@contextmanager
def counting():
    """How often each phase of the transport runs."""
    seen, originals = Counter(), {}

    def counted(name, original):
        def phase(*args, **kwargs):
            seen[name] += 1
            return original(*args, **kwargs)

        return phase

    for name in ("plan", "dispatch_start", "combine_start"):
        originals[name] = getattr(AllToAll, name)
        setattr(AllToAll, name, counted(name, originals[name]))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(AllToAll, name, original)


def load(folder: str, recompute: str):
    """Two ranks share the experts; of four, pairs hold them sharded."""
    return MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2, "recompute": recompute}).train()


def counts(folder: str, recompute: str, flag: bool) -> dict[str, int]:
    model = load(folder, recompute)
    if flag:
        model.activation_checkpointing_enable()
    with counting() as seen:
        model(**own_rows(tiny.batch("qwen3_moe"))).loss.backward()
    return dict(seen)


# Forward and backward dispatch and combine once each; what a recompute adds is the rows' second send alone.
ONCE = {"plan": LAYERS, "dispatch_start": 2 * LAYERS, "combine_start": 2 * LAYERS}


@pytest.mark.parametrize(
    "recompute, flag, sent_again",
    [
        ("none", False, 0),
        ("experts", False, 0),
        ("layer", False, LAYERS),
        ("auto", True, LAYERS),
        ("experts", True, 0),
    ],
)
def test_sizes_are_exchanged_once_and_rows_sent_as_the_level_says(
    worlds, checkpoint_folder, recompute, flag, sent_again
):
    for seen in worlds(2).run(f"{HERE}:counts", folder=checkpoint_folder, recompute=recompute, flag=flag):
        assert seen == ONCE | {"dispatch_start": ONCE["dispatch_start"] + sent_again}


def gradients(folder: str, recompute: str, nested: bool = False) -> dict[str, torch.Tensor]:
    """Of two batches of other lengths and paddings: both forwards run before either backward, the first one twice."""
    model = load(folder, recompute)
    if nested:
        for layer in model.model.layers:
            mlp = layer.mlp
            options = {"use_reentrant": False, "context_fn": mlp.experts.automodel.recompute.contexts}
            mlp.forward = functools.partial(checkpoint, mlp.forward, **options)
    losses = []
    for seed, length in ((1, 12), (2, 7)):
        inputs = own_rows(tiny.batch("qwen3_moe", length=length, seed=seed))
        inputs["attention_mask"][:, : dist.get_rank() + seed] = 0
        losses.append(model(**inputs).loss)
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    return full_grads(model)


def same_gradients(folder: str, recompute: str, nested: bool = False) -> None:
    want = gradients(folder, "none")
    got = gradients(folder, recompute, nested)
    for name, grad in want.items():
        # The same operations on the same numbers in the same order.
        assert torch.equal(got[name], grad), f"{name}: off by {(got[name] - grad).abs().max()}"


@pytest.mark.parametrize(
    "ranks, recompute, nested",
    [(2, "experts", False), (2, "layer", False), (2, "layer", True), (4, "experts", False), (4, "layer", False)],
)
def test_forwards_in_flight_give_the_gradients_of_no_recompute(worlds, checkpoint_folder, ranks, recompute, nested):
    worlds(ranks).run(f"{HERE}:same_gradients", folder=checkpoint_folder, recompute=recompute, nested=nested)


def noisy(folder: str, recompute: str) -> None:
    """Routers that choose otherwise the second time, on one rank alone: a recompute that routed again would send other
    sizes than its peers await."""
    model = load(folder, recompute)
    seen: list[torch.Tensor] = []
    in_backward = False

    def choose_otherwise(gate, args, output):
        logits, weights, idx = output
        return (logits, weights, (idx + 1) % 8) if in_backward and dist.get_rank() == 0 else None

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(choose_otherwise)
    for experts in experts_modules(model).values():
        experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    loss = model(**own_rows(tiny.batch("qwen3_moe"))).loss
    in_backward = True
    loss.backward()
    forward, backward = seen[:LAYERS], seen[LAYERS:]
    assert len(backward) == LAYERS
    for then, now in zip(forward, reversed(backward), strict=True):
        assert torch.equal(then, now)


@pytest.mark.parametrize("recompute", ["experts", "layer"])
def test_a_recompute_goes_by_its_forwards_choice(worlds, checkpoint_folder, recompute):
    worlds(2).run(f"{HERE}:noisy", folder=checkpoint_folder, recompute=recompute)
