"""All-to-alls of a stated size: no rank's host reads a count, so it runs ahead of the device through all layers.

Every rank sends every other `row_capacity` rows, real ones first and nobody's after them (ids -1). A batch in which
some rank has more for another can't be sent. Whatever did travel then comes back as not-a-number on every rank, in
place of a sum that lacks rows, and the error is raised by the layer's next forward: the first time that the host can
know without waiting. What ranks tell each other once, at the first batch, `all_to_all` compares at each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import where
from .all_to_all import AllToAll, _Pending, _Plan
from .contract import Plan


@dataclass
class _PaddedPlan(_Plan):
    most: torch.Tensor | None = None  # rows that a rank has for another: the most of the group
    most_work: dist.Work | None = None  # until that is known on the device


class PaddedAllToAll(AllToAll):
    """See [`~automodel_moe.dispatch.Transport`] for the contract; all ranks must run a backward, or none.

    Args:
        row_capacity (`int`): Rows that a rank sends to another at most.

    Raises:
        `RuntimeError`: on every rank, from the plan after the one in which a rank had more rows for another.
    """

    _spare = 1

    def __init__(self, group: ProcessGroup, num_local_experts: int, row_capacity: int, **options: Any):
        super().__init__(group, num_local_experts, **options)
        self.row_capacity = row_capacity
        self._agreed: set[tuple[int, int, torch.dtype]] = set()
        self._most: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []  # of earlier plans, on their way here

    def plan(self, idx_TK: torch.Tensor, x_TH: torch.Tensor, differentiable: bool) -> _Plan:
        shape = (idx_TK.size(1), x_TH.size(1), x_TH.dtype)
        if shape not in self._agreed:
            self._settle(super().plan(idx_TK, x_TH, differentiable))  # compares what the ranks are about to send
            self._agreed.add(shape)
        self._check_earlier()
        n_tokens, top_k = idx_TK.shape
        device = idx_TK.device
        owner_TK = torch.where(idx_TK >= 0, idx_TK // self.num_local_experts, self.size)
        need_TP = torch.zeros(n_tokens, self.size + 1, dtype=torch.bool, device=device)
        need_PT = need_TP.scatter_(1, owner_TK, True)[:, : self.size].t()
        count_PT = need_PT.cumsum(1)
        # Every rank must know that one of them has too many, or they would part. Nobody waits for it here.
        most = count_PT.amax() if n_tokens else torch.zeros((), dtype=torch.long, device=device)
        layer = where.here().layer
        with where.exchange(layer, "sizes"):
            work = dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group, async_op=True)

        ids_TK = torch.cat([idx_TK, idx_TK.new_full((1, top_k), -1)])
        plan = _PaddedPlan(n_tokens, ids_TK, None, None, None, None, most=most, most_work=work)
        plan.layer, plan.any_differentiable, plan.pairs = layer, differentiable, None
        plan.send_sizes = plan.recv_sizes = [self.row_capacity] * self.size
        n_sent = self.size * self.row_capacity
        first_P1 = torch.arange(0, n_sent, self.row_capacity, device=device)[:, None]
        place_PT = torch.where(need_PT & (count_PT <= self.row_capacity), first_P1 + count_PT - 1, n_sent)
        token_N = torch.arange(n_tokens, device=device).repeat(self.size)
        token_S = torch.full((n_sent + 1,), n_tokens, device=device).scatter_(0, place_PT.reshape(-1), token_N)
        plan.token_S = token_S[:n_sent]
        plan.rank_S = torch.arange(n_sent, device=device) // self.row_capacity
        return plan

    def _check_earlier(self) -> None:
        for most, copied in self._most:
            if copied is not None:
                copied.synchronize()  # of a forward ago: it has been there for long
            if most > self.row_capacity:
                self._most = []
                raise RuntimeError(
                    f"{where.here().layer}: row_capacity={self.row_capacity}, but in the forward before this one a "
                    f"rank had {int(most)} rows for another. Its result was made not-a-number: go back to the last "
                    f"checkpoint with a row_capacity of at least {int(most)}, or leave it at None."
                )
        self._most = []

    def dispatch_start(
        self, plan: Plan, x_TH: torch.Tensor, weights_TK: torch.Tensor | None = None, again: bool = False
    ) -> _Pending:
        if weights_TK is not None:
            weights_TK = torch.cat([weights_TK, weights_TK.new_zeros(1, weights_TK.size(1))])
        return super().dispatch_start(plan, x_TH, weights_TK, again)

    def _rows_to_send(self, plan: _Plan, x_TH: torch.Tensor) -> torch.Tensor:
        assert plan.token_S is not None
        if not plan.n_tokens:
            return x_TH.new_zeros(plan.token_S.numel(), x_TH.size(1))
        return x_TH[plan.token_S.clamp(max=plan.n_tokens - 1)]  # what nobody asks for may as well be the last token

    def dispatch_finish(self, pending: _Pending) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_RH, weights_RK = super().dispatch_finish(pending)
        if weights_RK is None:
            return x_RH, None
        plan = pending.plan
        assert isinstance(plan, _PaddedPlan) and plan.most is not None and plan.most_work is not None
        with where.exchange(plan.layer, "sizes"):
            plan.most_work.wait()
        most, plan.most, plan.most_work = plan.most, None, None
        if most.is_cuda:
            here = torch.empty((), dtype=most.dtype, pin_memory=True)
            here.copy_(most, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self._most.append((here, copied))
        else:
            self._most.append((most, None))
        # By way of the weights: the smallest tensor that every result depends on.
        return x_RH, torch.where(most > self.row_capacity, torch.nan, weights_RK)
