"""What a transport promises: it moves rows between the ranks of one expert-parallel group and knows nothing of experts
or autograd. The driver (`block.py`) runs each transfer's mirror in backward, along the forward's plan.

    plan    = transport.plan(idx_TK, x_TH, differentiable)      who sends what to whom; sizes start to travel
    pending = transport.dispatch_start(plan, x_TH, weights_TK)  each token goes once to each rank that needs it
    x_RH, weights_RK = transport.dispatch_finish(pending)
    pending = transport.combine_start(plan, y_RH, weights_RK)   the rows go back the way they came
    y_TH, weights_TK = transport.combine_finish(pending)        and are summed per token, unweighted, in float32

Dispatch's backward is a combine of the rows' and weights' gradients; combine's backward is a dispatch of the tokens'.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from .. import where

OUT_OF_STEP = (
    "is in another layer, or in another step, than this one: an error that some ranks alone have met can't be passed "
    "over; every rank must do the same steps."
)


@dataclass(frozen=True)
class Rows:
    """What a rank must compute, each token once.

    Attributes:
        x_RH: The rows, in the payload's dtype.
        idx_RK: Local expert ids in [0, e), -1 where a slot's expert is not on this rank.
        weights_RK: Routing weights, float32, 0 where idx is -1.
        n_pairs: How many slots are not -1, where the transport knows it on the host.
    """

    x_RH: torch.Tensor
    idx_RK: torch.Tensor
    weights_RK: torch.Tensor
    n_pairs: int | None = None


class Plan(ABC):
    """One forward's routing through one layer. Kept by autograd for the backward, never on a module."""

    layer: str = ""  # its name, for messages

    @property
    @abstractmethod
    def idx_RK(self) -> torch.Tensor:
        """Local expert ids of the rows that this rank receives; known once the first dispatch has finished."""

    @property
    @abstractmethod
    def n_pairs(self) -> int | None:
        """How many of `idx_RK`'s slots are not -1, if known on the host."""

    @property
    @abstractmethod
    def differentiable(self) -> bool:
        """Whether any rank of the group will run a backward: then all of them must."""


class Transport(ABC):
    """Moves rows between the ranks of `group`.

    Args:
        group (`ProcessGroup`): The expert-parallel group.
        num_local_experts (`int`): Experts a rank holds; rank r of the group holds [r * e, (r + 1) * e).
        max_tokens (`int`, *optional*): Tokens that a rank brings to a layer at most, for transports whose memory
            depends on it. By default they go by the first batch.
        payload (`torch.dtype`, *optional*): In what a forward's tokens travel. By default in their own dtype.

    Raises:
        `ValueError`: for a payload that this transport does not carry.
    """

    payloads: ClassVar[tuple[torch.dtype | None, ...]] = (None,)

    def __init__(
        self,
        group: ProcessGroup,
        num_local_experts: int,
        max_tokens: int | None = None,
        payload: torch.dtype | None = None,
    ):
        if payload not in self.payloads:
            raise ValueError(
                f'dispatch_dtype: {type(self).__name__} does not carry {payload}: use dispatcher="all_to_all", or '
                'leave dispatch_dtype at "auto".'
            )
        self.payload = payload
        self.group = group
        self.num_local_experts = num_local_experts
        self.max_tokens = max_tokens
        self.size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        self._plans = 0

    def _step(self) -> list[int]:
        """What must be equal on all ranks when they make a plan together: which layer, and its how manieth forward. A
        rank that has caught an error of its own and goes on with the next batch would else take part in the others'
        exchange with rows of another layer."""
        self._plans += 1
        return [zlib.crc32(where.here().layer.encode()), self._plans]

    @abstractmethod
    def plan(self, idx_TK: torch.Tensor, x_TH: torch.Tensor, differentiable: bool) -> Plan:
        """
        Args:
            idx_TK: Global expert ids, -1 for a slot that goes nowhere.
            x_TH: The tokens, for their shape and dtype alone.
            differentiable: Whether this rank will run a backward.
        """

    @abstractmethod
    def dispatch_start(
        self, plan: Plan, x_TH: torch.Tensor, weights_TK: torch.Tensor | None = None, again: bool = False
    ) -> Any:
        """Start sending tokens. The first dispatch of a plan carries the weights; the mirror of a combine has none,
        nor has a recompute, which sends the first one's tokens `again`, in the same payload."""

    @abstractmethod
    def dispatch_finish(self, pending: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(x_RH, weights_RK)`; the weights are None where the dispatch carried none."""

    @abstractmethod
    def combine_start(self, plan: Plan, y_RH: torch.Tensor, weights_RK: torch.Tensor | None = None) -> Any:
        """Start sending rows back. The mirror of a dispatch also brings the weights' gradients back."""

    @abstractmethod
    def combine_finish(self, pending: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(y_TH, weights_TK)`: rows summed per token in float32 and returned in their own dtype; weights float32."""
