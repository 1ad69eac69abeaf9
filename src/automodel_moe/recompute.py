"""What a layer's recompute finds kept of its forward, so that it neither routes again nor exchanges sizes again.

    recompute     layers checkpointed    kept of a MoE block until its backward
    "none"        no                     everything
    "activation"  no                     everything but what the experts can compute again from their rows
    "experts"     yes                    the routing, the transport's plan, and the rows received
    "layer"       yes                    the routing and the plan: the rows are sent a second time

The routing is the masked top-k indices and the weights, here and as received. All of it is kept per forward, in the
contexts that `torch.utils.checkpoint` holds for one checkpointed region, so that several forwards may be in flight,
each recomputed along its own plan; nothing stays on a module.

A recompute is there for the values that the forward's graph saved, and its own graph is thrown away. It repeats the
router for the values that the router's gradient needs; what the router would choose is not asked, so that arithmetic
that differs in its last bit can't send a token elsewhere than its forward did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .dispatch import Plan, Rows
from .say import say_once

if TYPE_CHECKING:
    from .block import RoutedTokens

CHECKPOINTED = ("experts", "layer")  # the levels that checkpoint layers


@dataclass
class Received:
    """What a dispatch brought, and along which plan; the shape suffixes are those of `block.py`."""

    plan: Plan
    weights_RK: torch.Tensor
    x_RH: torch.Tensor | None  # at the level "experts"


@dataclass
class Kept:
    """What one call of an experts module leaves for its recompute; nothing is received without expert parallelism."""

    idx_TK: torch.Tensor
    weights_TK: torch.Tensor
    received: list[Received] = field(default_factory=list)  # one a part of the batch


@dataclass
class _Tape:
    """One forward of a checkpointed region: the mask that it ran with, and its calls of experts modules in order."""

    routed_BS: torch.Tensor | None
    calls: list[Kept] = field(default_factory=list)


@dataclass
class Recompute:
    """The checkpointed region that runs now, if one does. One instance a model.

    Args:
        routed (`RoutedTokens`): Whose mask a recompute runs under: another forward's may have come since.
        keep_rows (`bool`): Whether received rows are kept.
    """

    routed: RoutedTokens
    keep_rows: bool
    _tape: _Tape | None = field(default=None, repr=False)
    _call: Kept | None = field(default=None, repr=False)  # of the experts module that runs now
    _next: int | None = field(default=None, repr=False)  # which call a recompute comes to; None in a forward

    @property
    def received(self) -> list[Received]:
        """In a recompute: what the forward of the call that runs now received. Else empty."""
        return [] if self._call is None or self._next is None else self._call.received

    def keep(self, plan: Plan, rows: Rows) -> None:
        """Note what the call that runs now has received, if a recompute will ask for it."""
        if self._call is not None and self._next is None:
            x_RH = rows.x_RH.detach() if self.keep_rows else None
            self._call.received.append(Received(plan, rows.weights_RK.detach(), x_RH))

    def contexts(self) -> tuple[Any, Any]:
        """`context_fn` of `torch.utils.checkpoint`: for the forward, and for its recompute."""
        if self._tape is not None:
            # A region within a region: the outer one's forward and recompute both come by here, so that its tape
            # serves, from this call on.
            place = len(self._tape.calls) if self._next is None else self._next
            return nullcontext(), _Region(self, self._tape, place)
        tape = _Tape(self.routed.routed_BS)
        return _Region(self, tape, None), _Region(self, tape, 0)

    def keep_choice(self, experts: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Pre-hook of an experts module, after the one that masks padding."""
        if self._tape is None:
            return None
        x_TH, idx_TK, weights_TK = experts_arguments(args, kwargs)
        if self._next is None:
            self._call = Kept(idx_TK, weights_TK.detach())
            self._tape.calls.append(self._call)
            return None
        self._call = self._tape.calls[self._next]
        self._next += 1
        # What needed a gradient must need one again: functions save their inputs accordingly.
        weights_then_TK = self._call.weights_TK.detach().requires_grad_(weights_TK.requires_grad)
        return (x_TH, self._call.idx_TK, weights_then_TK), {}


class _Region:
    """A context in which `Recompute` writes or reads one tape. Entered anew by every recompute: a graph that is
    retained has several."""

    def __init__(self, recompute: Recompute, tape: _Tape, start: int | None):
        self.recompute, self.tape, self.start = recompute, tape, start

    def __enter__(self) -> None:
        now = self.recompute
        self.before = now._tape, now._next, now.routed.routed_BS
        now._tape, now._next, now.routed.routed_BS = self.tape, self.start, self.tape.routed_BS

    def __exit__(self, *error: object) -> None:
        now = self.recompute
        now._tape, now._next, now.routed.routed_BS = self.before
        now._call = None
        del self.before


def experts_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(hidden_states, top_k_index, top_k_weights)` of a call of an experts module, however it names them."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or arguments.keys() != set(names):
        raise TypeError(
            f"An experts module is called with ({', '.join(names)}), not with {len(args)} arguments and "
            f"{sorted(kwargs)}: this version of transformers, or this model's own code, is not supported."
        )
    x_TH, idx_TK, weights_TK = (arguments[name] for name in names)
    return x_TH, idx_TK, weights_TK


# --- switching it on -------------------------------------------------------------------------------------------------


def install(model: PreTrainedModel, recompute: Recompute, level: str) -> None:
    """Have layer checkpointing of this model, whoever turns it on and by whichever of transformers' names, keep what
    `level` says; and turn it on where the level itself asks for it."""
    # No closure: a copy of the model copies what is bound within, and so enables itself and not the original.
    vars(model)["_activation_checkpointing_enable"] = functools.partial(_enable, model, recompute, level)
    # It may be on already, from a checkpoint's config.
    if level in CHECKPOINTED or model.is_activation_checkpointing:
        model.activation_checkpointing_enable()


def _enable(
    model: PreTrainedModel,
    recompute: Recompute,
    level: str,
    options: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A model's `_activation_checkpointing_enable`."""
    if level not in ("auto", *CHECKPOINTED):
        raise ValueError(
            f"moe_config: recompute={level!r} and activation checkpointing (activation_checkpointing=True, or its "
            "older name gradient_checkpointing=True) contradict each other: leave out one of the two, or choose "
            "recompute='layer' or 'experts'."
        )
    options = dict(kwargs.pop("activation_checkpointing_kwargs", options) or {})
    if options.get("use_reentrant"):
        say_once("use_reentrant=True: using the non-reentrant form, which can keep each forward's routing.")
    if "context_fn" in options:
        options["context_fn"] = functools.partial(_both_contexts, recompute.contexts, options["context_fn"])
    options = {"context_fn": recompute.contexts} | options | {"use_reentrant": False}
    type(model)._activation_checkpointing_enable(model, options, *args, **kwargs)


def _both_contexts(own: Callable[[], tuple[Any, Any]], users: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Two `context_fn`s of `torch.utils.checkpoint` as one."""
    (own_forward, own_recompute), (users_forward, users_recompute) = own(), users()
    return _Entered(own_forward, users_forward), _Entered(own_recompute, users_recompute)


class _Entered:
    """Several contexts as one, entered in order."""

    def __init__(self, *contexts: Any):
        self.contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)
