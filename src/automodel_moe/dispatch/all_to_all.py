"""The transport that needs nothing but torch.distributed (NCCL, gloo): two uneven all-to-alls a transfer.

A token whose K experts live on m ranks is sent m times, not K times: with 8 of 128 experts over 8 ranks that is 4.67
remote copies instead of 7. Its ids and weights travel beside it, so that the receiving rank needs no second look-up.
With `payload=torch.float8_e4m3fn` the tokens of forward travel in eight bits (`fp8.py`); what comes back, and both
transfers of backward, keep the rows' own dtype.
The one host read a layer is the sizes that an uneven all-to-all wants; everything else stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from .. import where
from . import fp8
from .contract import OUT_OF_STEP, Plan, Transport

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, fp8.DTYPE)


@dataclass
class _Plan(Plan):
    n_tokens: int
    idx_TK: torch.Tensor | None  # these four are let go once the rows are on their way: autograd keeps the plan
    need_PT: torch.Tensor | None  # which rank needs which token
    sent_PC: torch.Tensor | None  # what this rank tells each other one: see `AllToAll.plan`
    received_PC: torch.Tensor | None
    work: dist.Work | None
    # Known once the sizes have arrived.
    send_sizes: list[int] = field(default_factory=list)
    recv_sizes: list[int] = field(default_factory=list)
    token_S: torch.Tensor | None = None  # the token of each row sent, grouped by receiving rank
    rank_S: torch.Tensor | None = None  # and that rank; let go like the four above
    local_idx_RK: torch.Tensor | None = None
    pairs: int | None = 0
    any_differentiable: bool = False

    @property
    def idx_RK(self) -> torch.Tensor:
        assert self.local_idx_RK is not None, "the first dispatch of this plan has not finished"
        return self.local_idx_RK

    @property
    def n_pairs(self) -> int | None:
        return self.pairs

    @property
    def differentiable(self) -> bool:
        return self.any_differentiable


@dataclass
class _Pending:
    plan: _Plan
    rows: torch.Tensor
    extra: torch.Tensor | None
    works: list[dist.Work]
    packed: tuple[int, torch.dtype] | None = None  # hidden size and dtype of rows that travel in eight bits


class AllToAll(Transport):
    """Uneven all-to-alls over torch.distributed. See [`~automodel_moe.dispatch.Transport`] for the contract."""

    payloads: ClassVar = (None, fp8.DTYPE)
    _spare = 0  # places after the last token, for rows that are nobody's

    def plan(self, idx_TK: torch.Tensor, x_TH: torch.Tensor, differentiable: bool) -> _Plan:
        n_tokens, top_k = idx_TK.shape
        device = idx_TK.device
        # A slot of id -1 belongs to a rank past the last one, whose column is then dropped.
        owner_TK = torch.where(idx_TK >= 0, idx_TK // self.num_local_experts, self.size)
        need_TP = torch.zeros(n_tokens, self.size + 1, dtype=torch.bool, device=device)
        need_PT = need_TP.scatter_(1, owner_TK, True)[:, : self.size].t().contiguous()
        pairs_P = torch.zeros(self.size + 1, dtype=torch.long, device=device)
        pairs_P.scatter_add_(0, owner_TK.reshape(-1), torch.ones_like(owner_TK.reshape(-1)))
        # Each rank learns what it must agree on with its peers in the exchange that it needs anyway: whether anyone
        # will run a backward (a collective in it that one rank skips is a hang), and the shape and dtype of a row.
        dtype = _DTYPES.index(self.payload or x_TH.dtype)
        facts = [int(differentiable), top_k, x_TH.size(1), dtype, *self._step()]
        sent_PC = pairs_P.new_empty(self.size, 2 + len(facts))
        sent_PC[:, 0], sent_PC[:, 1] = need_PT.sum(1), pairs_P[: self.size]
        # Filled, not copied: a tensor made from host numbers makes the host wait for the device.
        for column, fact in enumerate(facts, start=2):
            sent_PC[:, column].fill_(fact)
        received_PC = torch.empty_like(sent_PC)
        layer = where.here().layer
        with where.exchange(layer, "sizes"):
            work = dist.all_to_all_single(received_PC, sent_PC, group=self.group, async_op=True)
        plan = _Plan(n_tokens, idx_TK, need_PT, sent_PC, received_PC, work)
        plan.layer = layer
        return plan

    def _settle(self, plan: _Plan) -> None:
        """Wait for the sizes, the layer's one host read, and lay out the rows to send."""
        if plan.work is None:
            return
        assert plan.need_PT is not None and plan.sent_PC is not None and plan.received_PC is not None
        with where.exchange(plan.layer, "sizes"):
            plan.work.wait()
            sent, received = torch.stack([plan.sent_PC, plan.received_PC]).tolist()
        plan.work = None
        for rank, row in enumerate(received):
            if row[6:] != sent[self.rank][6:]:
                raise RuntimeError(f"{plan.layer}: expert-parallel rank {rank} {OUT_OF_STEP}")
            if row[3:] != sent[self.rank][3:]:
                raise RuntimeError(
                    f"expert-parallel rank {rank} sends rows of (top_k, hidden size, dtype) = "
                    f"{(*row[3:5], _DTYPES[row[5]])}, rank {self.rank} of "
                    f"{(*sent[self.rank][3:5], _DTYPES[sent[self.rank][5]])}: every rank must run the same model in "
                    "the same dtype (and autocast) in the same step."
                )
        plan.send_sizes = [row[0] for row in sent]
        plan.recv_sizes = [row[0] for row in received]
        plan.pairs = sum(row[1] for row in received)
        plan.any_differentiable = any(row[2] for row in received)
        # token_S without `nonzero`, which would read a size on the host again: each needed (rank, token) writes its
        # token at its running count; all others write to one place past the end.
        n_sent = sum(plan.send_sizes)
        need_N = plan.need_PT.reshape(-1)
        place_N = torch.where(need_N, need_N.cumsum(0) - 1, n_sent)
        token_N = torch.arange(plan.need_PT.size(1), device=need_N.device).repeat(self.size)
        plan.token_S = token_N.new_empty(n_sent + 1).scatter_(0, place_N, token_N)[:n_sent]
        ranks_P = torch.arange(self.size, device=need_N.device)
        plan.rank_S = torch.repeat_interleave(ranks_P, plan.sent_PC[:, 0], output_size=n_sent)

    def _exchange(
        self, plan: _Plan, phase: str, rows: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> tuple[torch.Tensor, dist.Work]:
        received = rows.new_empty(sum(out_sizes), rows.size(1))
        # gloo knows no 16-bit floats: the bytes are what travels.
        out, into = received.view(torch.uint8), rows.contiguous().view(torch.uint8)
        with where.exchange(plan.layer, phase):
            work = dist.all_to_all_single(out, into, out_sizes, in_sizes, group=self.group, async_op=True)
        return received, work

    def dispatch_start(
        self, plan: Plan, x_TH: torch.Tensor, weights_TK: torch.Tensor | None = None, again: bool = False
    ) -> _Pending:
        assert isinstance(plan, _Plan)
        self._settle(plan)
        assert plan.token_S is not None
        x_SH, packed = self._rows_to_send(plan, x_TH), None
        if self.payload is not None and (again or weights_TK is not None):
            # Packed row by row after the choice: a token that goes to m ranks is packed m times, which is still less
            # than packing what goes nowhere.
            x_SH, packed = fp8.pack(x_SH), (x_TH.size(1), x_TH.dtype)
        x_RH, work = self._exchange(plan, "dispatch", x_SH, plan.recv_sizes, plan.send_sizes)
        if weights_TK is None:
            return _Pending(plan, x_RH, None, [work], packed)
        # Ids and weights share a message: int32 ids, and the weights' bits beside them.
        assert plan.idx_TK is not None and plan.rank_S is not None, "a plan's first dispatch carries the weights"
        local_SK = plan.idx_TK[plan.token_S] - plan.rank_S[:, None] * self.num_local_experts
        here_SK = (local_SK >= 0) & (local_SK < self.num_local_experts)
        idx_SK = torch.where(here_SK, local_SK, -1).int()
        weights_SK = torch.where(here_SK, weights_TK[plan.token_S].float(), 0.0)
        message_SM = torch.cat([idx_SK, weights_SK.view(torch.int32)], dim=1)
        message_RM, message_work = self._exchange(plan, "dispatch", message_SM, plan.recv_sizes, plan.send_sizes)
        plan.idx_TK = plan.need_PT = plan.sent_PC = plan.received_PC = plan.rank_S = None
        return _Pending(plan, x_RH, message_RM, [work, message_work], packed)

    def dispatch_finish(self, pending: _Pending) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._wait(pending, "dispatch")
        x_RH = pending.rows if pending.packed is None else fp8.unpack(pending.rows, *pending.packed)
        if pending.extra is None:
            return x_RH, None
        idx_RK, bits_RK = pending.extra.chunk(2, dim=1)
        pending.plan.local_idx_RK = idx_RK.long()
        return x_RH, bits_RK.contiguous().view(torch.float32)

    def combine_start(self, plan: Plan, y_RH: torch.Tensor, weights_RK: torch.Tensor | None = None) -> _Pending:
        assert isinstance(plan, _Plan)
        y_SH, work = self._exchange(plan, "combine", y_RH, plan.send_sizes, plan.recv_sizes)
        if weights_RK is None:
            return _Pending(plan, y_SH, None, [work])
        weights_SK, weights_work = self._exchange(
            plan, "combine", weights_RK.float(), plan.send_sizes, plan.recv_sizes
        )
        return _Pending(plan, y_SH, weights_SK, [work, weights_work])

    def combine_finish(self, pending: _Pending) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._wait(pending, "combine")
        y_TH = self._sum_per_token(pending.plan, pending.rows)
        weights_TK = None if pending.extra is None else self._sum_per_token(pending.plan, pending.extra)
        return y_TH, weights_TK

    def _rows_to_send(self, plan: _Plan, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH[plan.token_S]

    def _wait(self, pending: _Pending, phase: str) -> None:
        with where.exchange(pending.plan.layer, phase):
            for work in pending.works:
                work.wait()

    def _sum_per_token(self, plan: _Plan, rows_SH: torch.Tensor) -> torch.Tensor:
        # A token occurs once among one rank's rows, so no two adds of a pass meet, and the sum runs in rank order
        # every time.
        assert plan.token_S is not None
        sum_dtype = torch.promote_types(rows_SH.dtype, torch.float32)
        total_TH = rows_SH.new_zeros(plan.n_tokens + self._spare, rows_SH.size(1), dtype=sum_dtype)
        for token_s, rows_sH in zip(plan.token_S.split(plan.send_sizes), rows_SH.split(plan.send_sizes), strict=True):
            total_TH.index_add_(0, token_s, rows_sH.to(sum_dtype))
        return total_TH[: plan.n_tokens].to(rows_SH.dtype)
