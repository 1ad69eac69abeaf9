"""Which activation an experts module has, found by what it computes and not by what it is called.

Kernels can fuse three families. A module's own `_apply_gate`, or its `act_fn` where it has no gate, is called with a
few numbers on the CPU; they give the family's constants, and many more numbers must then agree. Whatever agrees with
none of them (a norm inside, parameters of its own, another function) is left to be called as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

GLU, SILU, RELU2 = "glu", "silu", "relu2"


@dataclass(frozen=True)
class Gate:
    """
    An activation that kernels know. Frozen and hashable: it becomes part of a kernel.

    Attributes:
        kind (`str`): with g cut at `limit` from above and u at +-`limit`:

            - `"glu"`: `g * sigmoid(alpha * g) * (u + beta)` of a gate g and an up-projection u.
            - `"silu"`: `g * sigmoid(alpha * g)`, no gate.
            - `"relu2"`: `max(g, 0) ** 2`, no gate.
        interleaved (`bool`): whether g and u are even and odd columns, not the first half and the second.
    """

    kind: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    interleaved: bool = False

    @property
    def has_gate(self) -> bool:
        return self.kind == GLU


_found: WeakKeyDictionary[Any, Gate | None] = WeakKeyDictionary()


@torch.compiler.disable
def known_gate(experts: Any) -> Gate | None:
    """The activation of `experts` as a [`Gate`], `None` where it is of no known family. Looked for once a module."""
    if experts not in _found:
        _found[experts] = _find(experts)
    return _found[experts]


def apply(gate: Gate, h_NJ: Tensor) -> Tensor:
    """What a [`Gate`] stands for, in plain torch: [N, J] to [N, I], J = 2I with a gate and I without."""
    if gate.kind == RELU2:
        return torch.relu(h_NJ).square()
    if gate.kind == SILU:
        return h_NJ * torch.sigmoid(gate.alpha * h_NJ)
    g_NI, u_NI = (h_NJ[..., ::2], h_NJ[..., 1::2]) if gate.interleaved else h_NJ.chunk(2, dim=-1)
    g_NI, u_NI = g_NI.clamp(max=gate.limit), u_NI.clamp(min=-gate.limit, max=gate.limit)
    return g_NI * torch.sigmoid(gate.alpha * g_NI) * (u_NI + gate.beta)


def _find(experts: Any) -> Gate | None:
    interleaved = experts.has_gate and not experts.is_concatenated

    def ask(g: list[float], u: list[float]) -> Tensor:
        halves = torch.tensor([g, u], dtype=torch.float64)
        if not experts.has_gate:
            return experts.act_fn(halves[0])
        return experts._apply_gate((halves.T if interleaved else halves).reshape(1, -1))[0]

    points = torch.linspace(-30, 30, 601, dtype=torch.float64)
    shuffled = points[torch.randperm(601, generator=torch.Generator().manual_seed(0))]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            candidates = _solve_glu(ask, interleaved) if experts.has_gate else [Gate(RELU2), *_solve_silu(ask)]
            given = ask(points.tolist(), shuffled.tolist())
    except (RuntimeError, TypeError, ValueError):
        return None  # it takes no vector of any width, or its parameters live on another device
    halves = torch.stack([points, shuffled])
    h_1J = (halves.T if interleaved else halves).reshape(1, -1) if experts.has_gate else points[None]
    for gate in candidates:
        # Some modules compute in float32 whatever they are given.
        if torch.allclose(apply(gate, h_1J)[0], given.double(), rtol=1e-5, atol=1e-6):
            return gate
    return None


def _solve_glu(ask: Any, interleaved: bool) -> list[Gate]:
    # At a g that no limit cuts, the result is linear in u up to the limit: its slope there is g * sigmoid(alpha * g).
    g, big = 0.25, 1e3
    lower, middle, upper, lowest, highest = ask([g] * 5, [-g, 0.0, g, -big, big]).double().tolist()
    share = (upper - lower) / (2 * g * g)
    if not 0 < share < 1:
        return []
    limit = (highest - lowest) / (2 * g * share)
    limit = math.inf if limit > 0.999 * big else limit
    alpha, beta = math.log(share / (1 - share)) / g, middle / (g * share)
    # Constants that were written down in a few digits come back as they were written.
    return [Gate(GLU, float(f"{alpha:.4g}"), round(beta, 4) + 0.0, float(f"{limit:.5g}"), interleaved)]


def _solve_silu(ask: Any) -> list[Gate]:
    share = ask([1.0], [0.0]).double().item()
    return [Gate(SILU, float(f"{math.log(share / (1 - share)):.5g}"))] if 0 < share < 1 else []
