"""DeepEP V2's `ElasticBuffer`: any number of ranks that divides the experts, in one node or several.

The buffer has a place for every row that the fullest rank may send, so it is as large as the largest batch. Rows come
in no fixed order unless `torch.use_deterministic_algorithms(True)` is set when the first batch is sent.
"""

from __future__ import annotations

import torch

from .deepep import ELSEWHERE, DeepEP, DeepEPPlan, Shared, _Pending

# A warp handles a row in steps of 32 16-byte words, and a token's experts with a lane each.
_HIDDEN_STEP, _TOP_K_MOST = 256, 32


class DeepEPElastic(DeepEP):
    """`deep_ep.ElasticBuffer`. See [`~automodel_moe.dispatch.Transport`] for the contract.

    Raises:
        `ValueError`: on every rank, from the first dispatch of a plan in which a rank brings more than `max_tokens`
            tokens; where that is None, more than the fullest rank brought to the first layer.
    """

    def _check(self, x_TH: torch.Tensor, top_k: int) -> None:
        hidden = x_TH.size(1)
        if hidden % _HIDDEN_STEP or top_k > _TOP_K_MOST:
            raise ValueError(
                f"dispatcher='deepep': ElasticBuffer carries rows of a multiple of {_HIDDEN_STEP} numbers for at most "
                f"{_TOP_K_MOST} experts a token, not hidden size {hidden} and top_k {top_k}: {ELSEWHERE}."
            )

    def _fits(self, hidden: int, top_k: int) -> bool:
        shared = self.shared
        return hidden <= shared.hidden and top_k <= shared.top_k and (self.max_tokens or 0) <= shared.rows

    def _open(self, hidden: int, top_k: int, rows: int) -> Shared:
        # The warm-up brings a token for each rank.
        rows = max(self.max_tokens or rows, self.size)
        buffer = self.library.ElasticBuffer(
            self.group,
            num_max_tokens_per_rank=rows,
            hidden=hidden,
            num_topk=top_k,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            # Not freed at exit: that would wait for ranks which may have ended, and the process' end frees it as well.
            explicitly_destroy=True,
        )
        return Shared(buffer, hidden, top_k, rows)

    def _layout(self, plan: DeepEPPlan) -> None:
        # Its dispatch counts by itself.
        pass

    def _first(self, plan: DeepEPPlan, x_TH: torch.Tensor, weights_TK: torch.Tensor) -> _Pending:
        idx_TK = plan.idx_TK
        assert idx_TK is not None, "only a plan's first dispatch carries the weights"
        if x_TH.size(0) > self.shared.rows:
            # The other ranks' kernels must not wait for this one until their time-out: they get nothing from it, and
            # then every rank raises.
            x_TH, weights_TK, idx_TK = x_TH[:1], weights_TK[:1], torch.full_like(idx_TK[:1], -1)
        x_RH, idx_RK, weights_RK, plan.handle, event = self.shared.buffer.dispatch(
            x_TH,
            topk_idx=idx_TK,
            topk_weights=weights_TK,
            num_experts=self.num_experts,
            num_sms=self.shared.buffer.get_theoretical_num_sms(self.num_experts, idx_TK.size(1)),
            async_with_compute_stream=True,
            **self._asynchronous,
        )
        plan.pairs = sum(plan.handle.num_recv_tokens_per_expert_list)
        return _Pending(plan, x_RH, idx_RK, weights_RK, event)

    def _check_settled(self, plan: DeepEPPlan) -> None:
        if plan.rows > self.shared.rows:
            made_for = "the first batch" if self.max_tokens is None else f"max_tokens={self.max_tokens}"
            raise ValueError(
                f"dispatcher='deepep': a rank brings {plan.rows} tokens to a layer, and the buffer, made for "
                f"{made_for}, holds {self.shared.rows} of each rank: pass moe_config={{'max_tokens': ...}} with the "
                f"run's largest batch size times sequence length, or {ELSEWHERE}."
            )

    def _again(self, plan: DeepEPPlan, x_TH: torch.Tensor) -> _Pending:
        x_RH, _, _, _, event = self.shared.buffer.dispatch(
            x_TH,
            handle=plan.handle,
            num_experts=self.num_experts,
            num_sms=plan.handle.num_sms,
            async_with_compute_stream=True,
            **self._asynchronous,
        )
        return _Pending(plan, x_RH, None, None, event)

    def _back(self, plan: DeepEPPlan, y_RH: torch.Tensor, weights_RK: torch.Tensor | None) -> _Pending:
        y_TH, weights_TK, event = self.shared.buffer.combine(
            y_RH, plan.handle, topk_weights=weights_RK, async_with_compute_stream=True, **self._asynchronous
        )
        return _Pending(plan, y_TH, None, weights_TK, event)
