"""A stable counting sort of slots by expert, in two launches.

The experts are few and known, so no comparison is needed: `_count` counts each expert's slots in each block of slots;
`_place` sums, for its own block, the counts of all experts before and of the same expert in earlier blocks, and adds a
slot's rank inside the block. Every slot has one place and no atomics are used: the order never depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Slots a program handles: few enough programs that each can sum all of the others' counts.
_BLOCK = 512


def sort_slots(idx_RK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See [`automodel_moe.kernels.pairs.sort_slots_reference`], to which this is equal bit for bit."""
    idx_RK = idx_RK.contiguous()
    n_slots, device = idx_RK.numel(), idx_RK.device
    if n_slots == 0:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.view(idx_RK.shape), torch.zeros(n_experts + 1, dtype=torch.int32, device=device)
    n_blocks = triton.cdiv(n_slots, _BLOCK)
    bins = max(16, triton.next_power_of_2(n_experts))
    chunk = min(_BLOCK, max(16, 8192 // bins))
    counts = torch.empty(n_blocks, bins, dtype=torch.int32, device=device)
    slot = torch.empty(n_slots, dtype=torch.int32, device=device)
    pos_RK = torch.empty(idx_RK.shape, dtype=torch.int32, device=device)
    bounds = torch.empty(n_experts + 1, dtype=torch.int32, device=device)
    _count[(n_blocks,)](idx_RK, counts, n_slots, _BLOCK, bins, chunk, num_warps=8)
    _place[(n_blocks,)](
        idx_RK, counts, slot, pos_RK, bounds, n_slots, n_experts, n_blocks, _BLOCK, bins, chunk, num_warps=8
    )
    return slot, pos_RK, bounds


@triton.jit
def _load(idx_ptr, start, n_slots, bins: tl.constexpr, chunk: tl.constexpr):
    # A slot past the end counts as one that routes nowhere: -1 is no bin.
    slot = start + tl.arange(0, chunk)
    expert = tl.load(idx_ptr + slot, mask=slot < n_slots, other=-1).to(tl.int32)
    hit = (expert[:, None] == tl.arange(0, bins)[None, :]).to(tl.int32)
    return slot, expert >= 0, hit


@triton.jit
def _count(idx_ptr, counts_ptr, n_slots, block: tl.constexpr, bins: tl.constexpr, chunk: tl.constexpr):
    pid = tl.program_id(0)
    count = tl.zeros((bins,), tl.int32)
    for start in range(pid * block, (pid + 1) * block, chunk):
        _, _, hit = _load(idx_ptr, start, n_slots, bins, chunk)
        count += tl.sum(hit, axis=0)
    tl.store(counts_ptr + pid * bins + tl.arange(0, bins), count)


@triton.jit
def _place(
    idx_ptr,
    counts_ptr,
    slot_ptr,
    pos_ptr,
    bounds_ptr,
    n_slots,
    n_experts,
    n_blocks,
    block: tl.constexpr,
    bins: tl.constexpr,
    chunk: tl.constexpr,
):
    pid = tl.program_id(0)
    bin = tl.arange(0, bins)
    total = tl.zeros((bins,), tl.int32)
    earlier = tl.zeros((bins,), tl.int32)
    for first in range(0, n_blocks, chunk):
        other = first + tl.arange(0, chunk)
        counts = tl.load(counts_ptr + other[:, None] * bins + bin[None, :], mask=(other < n_blocks)[:, None], other=0)
        total += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where((other < pid)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    tl.store(bounds_ptr + 1 + bin, ends, mask=(pid == 0) & (bin < n_experts))
    tl.store(bounds_ptr, 0, mask=pid == 0)

    n_live = tl.sum(total, axis=0)
    live_before = tl.sum(earlier, axis=0)
    next_place = ends - total + earlier
    for start in range(pid * block, (pid + 1) * block, chunk):
        slot, live, hit = _load(idx_ptr, start, n_slots, bins, chunk)
        before = tl.cumsum(hit, axis=0) - hit
        place = tl.sum(hit * (before + next_place[None, :]), axis=1)
        next_place += tl.sum(hit, axis=0)
        # Slots that route nowhere follow the live ones, in order: a slot's rank among them is its own number less
        # the live slots before it.
        is_live = live.to(tl.int32)
        dead_place = n_live + slot - (live_before + tl.cumsum(is_live, axis=0) - is_live)
        live_before += tl.sum(is_live, axis=0)
        inside = slot < n_slots
        tl.store(slot_ptr + tl.where(live, place, dead_place), slot, mask=inside)
        tl.store(pos_ptr + slot, tl.where(live, place, -1), mask=inside)
