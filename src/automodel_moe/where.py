"""Where this rank is, layer and phase, for the messages of a job that one rank has left waiting.

The transports say when they exchange; hooks on the experts modules say which layer runs; `trainer/watch.py` tells the
other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

OUTSIDE = "outside of the MoE layers"


@dataclass(frozen=True)
class Place:
    """A place in the step.

    Attributes:
        layer: Name of the experts module; empty outside of all of them.
        phase: What runs: "experts", or the exchange in progress.
        since: When it was entered, in `time.monotonic()` seconds.
        exchanging: Whether this rank waits for others here.
    """

    layer: str = ""
    phase: str = ""
    since: float = 0.0
    exchanging: bool = False

    def __str__(self) -> str:
        return f"in {self.layer}, {self.phase}" if self.layer else self.phase or OUTSIDE


# A process is one rank, and a rank is at one place.
_here = Place()
_who: Callable[[], str] = str


def here() -> Place:
    """Where this rank is now."""
    return _here


def ask(who: Callable[[], str]) -> None:
    """Have errors of exchanges carry what `who` then finds out about the other ranks."""
    global _who
    _who = who


@contextmanager
def exchange(layer: str, phase: str) -> Iterator[None]:
    """
    Collective calls of a layer, and waits for them. Nothing else belongs in here: whatever fails is put down to the
    other ranks.

    Raises:
        `RuntimeError`: in place of the collective's own, which it keeps as its cause, with layer, phase and the ranks
            that are gone.
    """
    global _here
    before = _here
    direction = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
    _here = Place(layer, f"{phase} ({direction})", time.monotonic(), exchanging=True)
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # this rank's own
    except RuntimeError as error:
        raise RuntimeError(f"The exchange with the other ranks failed {_here}. {_who()}".rstrip()) from error
    finally:
        _here = before


def follow(modules: dict[str, Any]) -> None:
    """Hook experts modules, given by name, so that `here` knows when they run."""
    for name, module in modules.items():
        module.register_forward_pre_hook(partial(_enter, name), prepend=True)
        module.register_forward_hook(_leave, always_call=True)


def _enter(name: str, module: nn.Module, args: tuple) -> None:
    global _here
    _here = Place(name, "experts", time.monotonic())


def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    global _here
    # A forward that has failed stays where it was: that is what the others will ask for. A recompute, in backward,
    # always leaves by an exception.
    if output is not None or torch._C._current_graph_task_id() != -1:
        _here = Place("", f"after {_here.layer}", time.monotonic())
