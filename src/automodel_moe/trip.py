"""One forward's way to the experts and back inside autograd, in the transport's four phases.

Each phase is an autograd function of its own, so that what a caller runs between a start and its finish runs beside
the transfer, and its backward beside the mirrored one: the engine takes, of what is ready, what was made last.

    forward    dispatch_start  ..  dispatch_finish     experts     combine_start   ..  combine_finish
    backward   combine_finish  ..  combine_start       experts     dispatch_finish ..  dispatch_start
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .dispatch import Plan, Rows, Transport
from .recompute import Received


class Trip:
    """
    Args:
        transport (`Transport`): What carries the rows.
        plan (`Plan`): The plan of this forward's dispatch.
        before (`Received`, *optional*): In a recompute, what the forward received: rows that were kept are not sent
            again, nor are weights ever.
    """

    def __init__(self, transport: Transport, plan: Plan, before: Received | None = None):
        self.transport, self.plan, self.before = transport, plan, before
        self.pending: Any = None  # the transfer in flight, forward's or backward's

    # A start returns what ties its finish to it in the graph. The caller holds it: the graph holds this object, which
    # must not hold the graph in turn.

    def dispatch_start(self, x_TH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        # Where this rank's own inputs need no gradient, the anchor keeps the exchange in the graph all the same: every
        # rank of the group must run the same collectives in backward.
        anchor = x_TH.new_zeros((), requires_grad=torch.is_grad_enabled())
        return _DispatchStart.apply(x_TH, weights_TK, anchor, self)

    def dispatch_finish(self, started: torch.Tensor) -> Rows:
        x_RH, weights_RK = _DispatchFinish.apply(started, self)
        return Rows(x_RH, self.plan.idx_RK, weights_RK, self.plan.n_pairs)

    def combine_start(self, y_RH: torch.Tensor) -> torch.Tensor:
        # A recompute ends as soon as it has what it is for, most often before the combine's result is asked for, and
        # nobody would finish what it had started.
        return y_RH if self.before is not None else _CombineStart.apply(y_RH, self)

    def combine_finish(self, started: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            started = _CombineStart.apply(started, self)
        return _CombineFinish.apply(started, self)

    def take(self) -> Any:
        """The transfer in flight, which the caller finishes."""
        pending, self.pending = self.pending, None
        return pending


class _DispatchStart(torch.autograd.Function):
    """Tokens and weights set out for their experts' ranks; in backward their gradients arrive."""

    @staticmethod
    def forward(ctx, x_TH, weights_TK, anchor, trip):
        ctx.trip, ctx.dtypes = trip, (x_TH.dtype, weights_TK.dtype)
        if trip.before is None:
            trip.pending = trip.transport.dispatch_start(trip.plan, x_TH, weights_TK)
        elif trip.before.x_RH is None:
            trip.pending = trip.transport.dispatch_start(trip.plan, x_TH, again=True)
        return anchor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        dx_TH, dweights_TK = ctx.trip.transport.combine_finish(ctx.trip.take())
        return dx_TH.to(ctx.dtypes[0]), dweights_TK.to(ctx.dtypes[1]), None, None


class _DispatchFinish(torch.autograd.Function):
    """Rows and weights arrive; in backward their gradients set out along the same plan."""

    @staticmethod
    def forward(ctx, token, trip):
        ctx.trip, before = trip, trip.before
        # A recompute ends with the last tensor saved: with one saved here, all ranks come past this exchange or none,
        # though a rank without rows may save nothing further on.
        ctx.save_for_backward(token)
        if before is None:
            return trip.transport.dispatch_finish(trip.take())
        x_RH = before.x_RH if trip.pending is None else trip.transport.dispatch_finish(trip.take())[0]
        return x_RH.detach(), before.weights_RK.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_RH, dweights_RK):
        ctx.trip.pending = ctx.trip.transport.combine_start(ctx.trip.plan, dx_RH, dweights_RK)
        return dx_RH.new_zeros(()), None


class _CombineStart(torch.autograd.Function):
    """Rows set out for their tokens' ranks; in backward the gradients of the rows arrive."""

    @staticmethod
    def forward(ctx, y_RH, trip):
        ctx.trip = trip
        trip.pending = trip.transport.combine_start(trip.plan, y_RH)
        return y_RH.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        return ctx.trip.transport.dispatch_finish(ctx.trip.take())[0], None


class _CombineFinish(torch.autograd.Function):
    """Rows arrive and are summed per token; in backward the tokens' gradient sets out along the plan."""

    @staticmethod
    def forward(ctx, token, trip):
        ctx.trip = trip
        return trip.transport.combine_finish(trip.take())[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        ctx.trip.pending = ctx.trip.transport.dispatch_start(ctx.trip.plan, dy_TH)
        return dy_TH.new_zeros(()), None
