"""Sort the (row, slot) pairs of a batch by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """
    The live (row, slot) pairs of a batch, sorted by expert; stable, so rows stay in order within an expert.

    All of `int32`, which indexes tensors as it is and is what grouped GEMMs take.

    Attributes:
        slot_N: the pair's place in the flattened R x K routing, `row * K + k`.
        row_N: the pair's row, `slot_N // K`.
        pos_RK: where a slot's pair stands among the N, -1 for a slot that routes nowhere.
        bounds: e + 1 values; expert i has the pairs from `bounds[i]` up to `bounds[i + 1]`.
        has_tail (`bool`): whether pairs past `bounds[-1]` may follow. They stand for the slots that route nowhere,
            kept because their number is known on the device alone; nothing may be read from them.
    """

    slot_N: Tensor
    row_N: Tensor
    pos_RK: Tensor
    bounds: Tensor
    has_tail: bool


def sort_pairs(idx_RK: Tensor, n_experts: int, n_pairs: int | None = None) -> Pairs:
    """
    [`Pairs`] of a routing, without reading anything back to the host.

    Args:
        idx_RK (integer `Tensor`): expert ids in [0, `n_experts`), or -1 for a slot that routes nowhere.
        n_experts (`int`): the number of experts here.
        n_pairs (`int`, *optional*): how many slots are not -1, where the host knows it. Without it N is R x K.
    """
    if idx_RK.is_cuda:
        from .pairs_triton import sort_slots
    else:
        sort_slots = sort_slots_reference
    slot, row, pos_RK, bounds = sort_slots(idx_RK, n_experts)
    return Pairs(slot[:n_pairs], row[:n_pairs], pos_RK, bounds, has_tail=n_pairs is None)


def sort_slots_reference(idx_RK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`slot` and `row` (of all R x K slots, those of -1 last), `pos_RK` and `bounds` of [`Pairs`], in plain torch."""
    flat = idx_RK.reshape(-1)
    expert, slot = torch.sort(torch.where(flat < 0, n_experts, flat), stable=True)
    every = torch.arange(n_experts + 1, device=flat.device, dtype=expert.dtype)
    bounds = torch.searchsorted(expert, every, out_int32=True)
    place = torch.arange(slot.shape[0], device=flat.device, dtype=torch.int32)
    pos_RK = torch.empty_like(place).scatter_(0, slot, place).view_as(idx_RK).masked_fill_(idx_RK < 0, -1)
    slot = slot.int()
    return slot, slot // idx_RK.shape[1], pos_RK, bounds
