"""Which position of a batch belongs to which sequence: several of them may be packed into a row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


class Sequences:
    """
    The sequences of a batch of B rows of S positions.

    Args:
        seq_BS (`torch.Tensor`): int32, the number of the sequence that a position belongs to, rising within a row; two
            rows never share a sequence, whatever the numbers.
    """

    def __init__(self, seq_BS: Tensor):
        self.seq_BS = seq_BS

    @classmethod
    def told_by(cls, arguments: Mapping[str, Any]) -> Sequences | None:
        """
        The sequences that the arguments of a base model's forward tell of: by `cu_seq_lens_q`, by `seq_idx`, or by
        `position_ids`, the last as transformers reads them for attention, where there is neither a mask nor a cache.
        The host doesn't wait for the device.
        """
        if arguments.get("cache") is not None or arguments.get("past_key_values") is not None:
            return None
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        cu_seqlens, seq_BS, position_ids = (arguments.get(n) for n in ("cu_seq_lens_q", "seq_idx", "position_ids"))
        if cu_seqlens is not None and inputs is not None:
            place = torch.arange(inputs.shape[:2].numel(), device=cu_seqlens.device)
            return cls(torch.searchsorted(cu_seqlens[1:].long(), place, right=True).int().view(inputs.shape[:2]))
        if seq_BS is not None:
            return cls(seq_BS.int())
        if position_ids is not None and position_ids.dim() == 2 and arguments.get("attention_mask") is None:
            begins = torch.diff(position_ids, dim=-1) != 1
            seq_BS = pad(begins.cumsum(-1), (1, 0)).int()
            return cls(seq_BS if inputs is None else seq_BS.expand(inputs.size(0), -1).contiguous())
        return None

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """int64 `[sequences + 1]`, rows taken one after the other: where each begins, then the number of positions.

        The host waits for the device, once a forward, whatever the number of layers; so it does for what follows.
        """
        begins_BS = pad(torch.diff(self.seq_BS, dim=-1) != 0, (1, 0), value=True)
        return pad(begins_BS.flatten().nonzero().flatten(), (0, 1), value=begins_BS.numel())

    @functools.cached_property
    def cu_seqlens_cpu(self) -> Tensor:
        """The same on the host."""
        return self.cu_seqlens.cpu()

    @property
    def packed(self) -> bool:
        """Whether any row holds more than one."""
        return self.cu_seqlens.numel() - 1 > self.seq_BS.size(0)
