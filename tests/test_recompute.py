"""Recompute levels in one process: what turns checkpointing on, and what a recompute leaves behind."""

from __future__ import annotations

import functools
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, modeling_utils

from automodel_moe import MoEAutoModel, MoEConfig
from automodel_moe.recompute import Kept, experts_arguments
from tests import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


def load(checkpoint, recompute="auto"):
    return MoEAutoModel.from_pretrained(checkpoint, moe_config={"recompute": recompute}).train()


@pytest.fixture
def unpinned(monkeypatch):
    """transformers' `offload` asks for pinned memory, which torch has beside an accelerator alone."""
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **options: save_on_cpu(pin_memory=False))


def checkpointed(model) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.model.layers]


@pytest.mark.parametrize(
    "recompute, on",
    [("auto", False), ("none", False), ("activation", False), ("experts", True), ("layer", True)],
)
def test_the_level_alone_decides_where_no_flag_does(checkpoint, recompute, on):
    assert checkpointed(load(checkpoint, recompute)) == [on, on]


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
@pytest.mark.parametrize("recompute", ["auto", "experts"])
def test_the_trainers_flag_and_its_options(checkpoint, unpinned, tmp_path, name, recompute):
    model = load(checkpoint, recompute)
    options = {name: True, f"{name}_kwargs": {"every_n_layers": 2, "offload": True, "use_reentrant": True}}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **options
    )
    row = {key: value[0] for key, value in tiny.batch("qwen3_moe").items()}
    Trainer(model, arguments, train_dataset=[row] * 8).train()
    assert checkpointed(model) == [True, False], "every second layer"


@pytest.mark.parametrize("recompute", ["none", "activation"])
@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_the_flag_against_a_level_without_checkpointing_raises(checkpoint, recompute, name):
    with pytest.raises(ValueError, match=f"recompute='{recompute}' and activation checkpointing"):
        getattr(load(checkpoint, recompute), name)()


def test_a_config_that_turns_it_on(checkpoint):
    config = tiny.config("qwen3_moe")
    config.gradient_checkpointing = True
    model = MoEAutoModel.from_config(config)
    recompute = model.model.layers[0].mlp.experts.automodel.recompute
    assert model.model.layers[0]._gradient_checkpointing_func.keywords["context_fn"] == recompute.contexts


def gradients(model, losses=1) -> dict[str, torch.Tensor]:
    for seed in range(losses):
        inputs = tiny.batch("qwen3_moe", seed=seed)
        inputs["attention_mask"][:, : seed + 2] = 0
        model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"every_n_layers": 2}, {"mine": True}])
@pytest.mark.parametrize("recompute", ["experts", "layer"])
def test_gradients_are_those_of_no_recompute(checkpoint, unpinned, recompute, options):
    want = gradients(load(checkpoint, "none"))
    model = load(checkpoint, recompute)
    entered = []
    if options.get("mine"):
        options = {"activation_checkpointing_kwargs": {"context_fn": functools.partial(users_contexts, entered)}}
    model.activation_checkpointing_enable(**options)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, want[name]), name  # the same operations on the same numbers
    assert entered == ([] if not options.get("activation_checkpointing_kwargs") else ["user's"] * 2)


def users_contexts(entered: list[str]):
    entered.append("user's")
    return nullcontext(), nullcontext()


def test_routing_is_kept_not_decided_again(checkpoint):
    model = load(checkpoint, "layer")
    seen, in_backward = [], False

    def choose_otherwise(gate, args, output):
        logits, weights, idx = output
        return (logits, weights * 2, (idx + 1) % 8) if in_backward else None

    experts = model.model.layers[0].mlp.experts
    model.model.layers[0].mlp.gate.register_forward_hook(choose_otherwise)
    experts.register_forward_pre_hook(lambda module, args: seen.append(args[1:]))
    loss = model(**tiny.batch("qwen3_moe")).loss
    in_backward = True
    loss.backward()
    (idx, weights), (idx_again, weights_again) = seen
    assert torch.equal(idx, idx_again) and torch.equal(weights, weights_again)


def test_nothing_is_kept_once_the_backward_is_over(checkpoint, monkeypatch):
    kept = []
    init = Kept.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(Kept, "__init__", noted)
    gradients(load(checkpoint, "experts"), losses=3)
    gc.collect()
    assert len(kept) == 3 * 2 and not any(ref() for ref in kept)


@pytest.mark.parametrize("arguments", [{}, {"experts_implementation": "eager"}])
def test_a_level_that_would_not_be_used_is_refused(checkpoint, arguments):
    config = AutoModelForCausalLM.from_pretrained(checkpoint).config
    if not arguments:
        config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    with pytest.raises(ValueError, match="recompute='layer'"):
        MoEAutoModel.from_config(config, moe_config=MoEConfig(recompute="layer"), **arguments)


def test_an_experts_call_of_another_form_is_refused():
    assert experts_arguments((1, 2), {"top_k_weights": 3}) == (1, 2, 3)
    for args, kwargs in (((1, 2, 3, 4), {}), ((1, 2, 3), {"scale": 4}), ((1, 2), {})):
        with pytest.raises(TypeError, match="is called with"):
            experts_arguments(args, kwargs)
