"""DeepEP V1's `Buffer` inside a node: 2, 4 or 8 ranks that write into each other's memory over NVLink.

The buffer holds a ring of rows a channel, whatever the batch. Rows arrive in order of source rank and token.
"""

from __future__ import annotations

import torch

from .deepep import ELSEWHERE, DeepEP, DeepEPPlan, Shared, _Pending

# A row travels in two halves, each of whole 16-byte words, through 8 KiB of shared memory that holds a barrier too.
_HIDDEN_STEP, _HIDDEN_MOST, _TOP_K_MOST = 16, 8176, 32


class DeepEPBuffer(DeepEP):
    """`deep_ep.Buffer`. See [`~automodel_moe.dispatch.Transport`] for the contract."""

    def _check(self, x_TH: torch.Tensor, top_k: int) -> None:
        hidden = x_TH.size(1)
        if hidden % _HIDDEN_STEP or hidden > _HIDDEN_MOST or top_k > _TOP_K_MOST:
            raise ValueError(
                f"dispatcher='deepep': Buffer carries rows of a multiple of {_HIDDEN_STEP} and at most {_HIDDEN_MOST} "
                f"numbers for at most {_TOP_K_MOST} experts a token, not hidden size {hidden} and top_k {top_k}: "
                f"{ELSEWHERE}."
            )

    def _configs(self):
        # Beside the sizes of the rings they say how many SMs a transfer takes. Every transfer gets its own: the
        # buffer is laid out by them.
        buffer = self.library.Buffer
        return buffer.get_dispatch_config(self.size), buffer.get_combine_config(self.size)

    def _fits(self, hidden: int, top_k: int) -> bool:
        return hidden <= self.shared.hidden

    def _open(self, hidden: int, top_k: int, rows: int) -> Shared:
        row_bytes = hidden * torch.bfloat16.itemsize
        n_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, self.size) for config in self._configs())
        # Not freed at exit: that would wait for ranks which may have ended, and the process' end frees it as well.
        buffer = self.library.Buffer(self.group, num_nvl_bytes=n_bytes, explicitly_destroy=True)
        return Shared(buffer, hidden, top_k, rows)

    def _layout(self, plan: DeepEPPlan) -> None:
        # Its event is not waited for: the dispatch follows it on the library's own stream.
        to_rank, _, to_expert, is_in_rank, _ = self.shared.buffer.get_dispatch_layout(
            plan.idx_TK, self.num_experts, async_finish=True, **self._asynchronous
        )
        plan.layout = {
            "num_tokens_per_rank": to_rank,
            "num_tokens_per_expert": to_expert,
            "is_token_in_rank": is_in_rank,
        }

    def _first(self, plan: DeepEPPlan, x_TH: torch.Tensor, weights_TK: torch.Tensor) -> _Pending:
        x_RH, idx_RK, weights_RK, pairs_e, plan.handle, event = self.shared.buffer.dispatch(
            x_TH,
            topk_idx=plan.idx_TK,
            topk_weights=weights_TK,
            config=self._configs()[0],
            async_finish=True,
            **plan.layout,
            **self._asynchronous,
        )
        plan.layout = None
        plan.pairs = sum(pairs_e)
        return _Pending(plan, x_RH, idx_RK, weights_RK, event)

    def _again(self, plan: DeepEPPlan, x_TH: torch.Tensor) -> _Pending:
        x_RH, _, _, _, _, event = self.shared.buffer.dispatch(
            x_TH, handle=plan.handle, config=self._configs()[0], async_finish=True, **self._asynchronous
        )
        return _Pending(plan, x_RH, None, None, event)

    def _back(self, plan: DeepEPPlan, y_RH: torch.Tensor, weights_RK: torch.Tensor | None) -> _Pending:
        y_TH, weights_TK, event = self.shared.buffer.combine(
            y_RH,
            plan.handle,
            topk_weights=weights_RK,
            config=self._configs()[1],
            async_finish=True,
            **self._asynchronous,
        )
        return _Pending(plan, y_TH, None, weights_TK, event)
