"""Around transformers' own `from_pretrained`: check the checkpoint first, then load what is sharded right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import LoadStateDictConfig

from . import preflight
from .guard import Guard, fill_empty, guarded, inspect
from .headers import CheckpointError, Entry, read_entries
from .patching import patched
from .plan import Group, make_plan, settle_transposes
from .quantized import ragged_blocks


@dataclass
class _Session:
    prepare_model: Callable[[PreTrainedModel], None]
    is_experts: Callable[[nn.Module], bool]
    prepared: PreTrainedModel | None = field(default=None)

    def prepare(self, model: PreTrainedModel) -> None:
        if self.prepared is not model:
            self.prepared = model
            self.prepare_model(model)


# Set wherever the wrappers below are active.
_session: ContextVar[_Session] = ContextVar("loading")


@contextmanager
def loading(
    prepare_model: Callable[[PreTrainedModel], None], is_experts: Callable[[nn.Module], bool] = preflight.is_experts
) -> Iterator[None]:
    """
    While active, `from_pretrained` calls of this context (this thread, this task) load through the checks and guards.

    Args:
        prepare_model (`Callable`):
            Called once with each model, built and still on the meta device, before transformers resolves its parallel
            plans. With no `distributed_config` there are no plans, and it is called before the weights are read.
        is_experts (`Callable`, *optional*):
            Tells the modules whose parameters the checkpoint must fill. By default those that transformers dispatches
            through its experts registry.

    `from_pretrained` then raises `CheckpointError` on every rank, before a weight is read, for a truncated file, for
    experts that are missing, in excess or of another shape, and for what can't be sharded right.
    """
    token = _session.set(_Session(prepare_model, is_experts))
    try:
        with ExitStack() as stack:
            stack.enter_context(patched(PreTrainedModel, "maybe_distribute_model", _maybe_distribute_model))
            stack.enter_context(patched(PreTrainedModel, "_load_pretrained_model", _load_pretrained_model))
            stack.enter_context(ragged_blocks())
            yield
    finally:
        _session.reset(token)


def _maybe_distribute_model(original, model, *args, **kwargs):
    # The only place between a model's construction and the resolution of its plans.
    _session.get().prepare(model)
    return original(model, *args, **kwargs)


def _load_pretrained_model(original, model, state_dict, checkpoint_files, load_config, expected_keys=None):
    session = _session.get()
    # An adapter names the keys it expects: the model around it is loaded already.
    if expected_keys is not None:
        return original(model, state_dict, checkpoint_files, load_config, expected_keys=expected_keys)
    session.prepare(model)
    if checkpoint_files is None and not state_dict:
        # No checkpoint at all: the caller draws every weight.
        loaded = original(model, state_dict, checkpoint_files, load_config)
        # It notes that no conversion was used, as for a checkpoint that needs none; a save would write fused experts.
        del vars(model)["_weight_conversions"]
        return loaded
    plan, entries, guard = examine(model, state_dict, checkpoint_files, load_config, session.is_experts)
    with guarded(model, guard):
        loading_info, offload_index = original(model, state_dict, checkpoint_files, load_config)
    fill_empty(model, guard, loading_info)
    # What transformers keeps in float32 although both the checkpoint and the load are in another dtype.
    loaded = model.state_dict()
    vars(model)["_kept_from"] = {
        key: load_config.dtype
        for group in plan.values()
        for key in group.keys
        if entries[key].dtype == load_config.dtype != loaded[group.targets[0]].dtype
    }
    return loading_info, offload_index


def examine(
    model: PreTrainedModel,
    state_dict: dict[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: LoadStateDictConfig,
    is_experts: Callable[[nn.Module], bool] = preflight.is_experts,
) -> tuple[dict[str, Group], dict[str, Entry], Guard]:
    """
    Check a checkpoint against the model from its headers alone. A collective for a sharded model.

    Returns:
        What becomes which parameter, what the checkpoint holds, and what must not be loaded as transformers would.

    Raises:
        `CheckpointError`: on every rank.
    """
    state = model.state_dict()
    sharded = any(isinstance(value, DTensor) for value in state.values())
    with same_on_every_rank(sharded):
        entries = read_entries(checkpoint_files, state_dict)
        plan = make_plan(model, load_config.weight_mapping, entries, state)
        settle_transposes(load_config.weight_mapping or [], plan, entries, state)
        preflight.check_experts(model, plan, entries, state, is_experts, load_config.ignore_mismatched_sizes)
        return plan, entries, inspect(plan, entries, state)


@contextmanager
def same_on_every_rank(sharded: bool) -> Iterator[None]:
    """Raise what one rank raised on every rank, there as a `CheckpointError`: a file may be bad on one node's disk
    alone."""
    problem: Exception | None = None
    sharded = sharded and dist.is_initialized()
    try:
        yield
    except Exception as error:
        if not sharded:
            raise
        problem = error
    if sharded:
        messages: list[str | None] = [None] * dist.get_world_size()
        known = problem is None or isinstance(problem, CheckpointError)
        text = f"{problem}" if known else f"{type(problem).__name__}: {problem}"
        dist.all_gather_object(messages, None if problem is None else text)
        if problem is not None and not known:
            raise problem
        first = next((message for message in messages if message is not None), None)
        if first is not None:
            raise CheckpointError(first) from problem
