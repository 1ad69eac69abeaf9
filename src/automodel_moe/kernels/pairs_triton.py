"""A stable counting sort of slots by expert, in three launches.

The experts are few and known, so no sorting network is needed: `_count` finds each slot's rank among its expert's in a
block of slots, and the block's number of each; `_scan` sums those numbers over the blocks before, an expert at a time;
`_place` adds the two to where the expert starts. Every slot has one place and its order never depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Slots a program handles: each is compared with all before it in the block, and a block has a row of counts.
_BLOCK = 128


def sort_slots(idx_RK: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See [`automodel_moe.kernels.pairs.sort_slots_reference`], to which this is equal bit for bit."""
    idx_RK = idx_RK.contiguous()
    n_slots, device = idx_RK.numel(), idx_RK.device
    slot, row = (torch.empty(n_slots, dtype=torch.int32, device=device) for _ in range(2))
    pos_RK = torch.empty(idx_RK.shape, dtype=torch.int32, device=device)
    if n_slots == 0:
        return slot, row, pos_RK, torch.zeros(n_experts + 1, dtype=torch.int32, device=device)
    bounds = torch.empty(n_experts + 1, dtype=torch.int32, device=device)
    n_blocks = triton.cdiv(n_slots, _BLOCK)
    bins = max(16, triton.next_power_of_2(n_experts))
    counts = torch.empty(n_blocks + 1, bins, dtype=torch.int32, device=device)  # the last row: over all blocks
    _count[(n_blocks,)](idx_RK, counts, pos_RK, n_slots, _BLOCK, bins)
    _scan[(bins // 16,)](counts, n_blocks, bins, 16, 256, num_warps=8)
    _place[(n_blocks,)](
        idx_RK, counts, slot, row, pos_RK, bounds, n_slots, n_blocks, idx_RK.shape[1], n_experts, _BLOCK, bins
    )
    return slot, row, pos_RK, bounds


@triton.jit(do_not_specialize=["n_slots"])
def _count(idx_ptr, counts_ptr, rank_ptr, n_slots, block: tl.constexpr, bins: tl.constexpr):
    pid = tl.program_id(0)
    here = tl.arange(0, block)
    slot = pid * block + here
    # A slot that routes nowhere has its rank among those; one past the end changes nothing after it.
    expert = tl.load(idx_ptr + slot, mask=slot < n_slots, other=-1).to(tl.int32)
    rank = tl.zeros((block,), tl.int32)
    for start in range(0, block, 32):
        other = start + tl.arange(0, 32)
        theirs = tl.load(idx_ptr + pid * block + other, mask=pid * block + other < n_slots, other=-1).to(tl.int32)
        same = (theirs[None, :] == expert[:, None]) & (other[None, :] < here[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    tl.store(rank_ptr + slot, rank, mask=slot < n_slots)
    tl.store(counts_ptr + pid * bins + tl.arange(0, bins), tl.histogram(expert, bins, mask=expert >= 0))


@triton.jit(do_not_specialize=["n_blocks"])
def _scan(counts_ptr, n_blocks, bins: tl.constexpr, some: tl.constexpr, chunk: tl.constexpr):
    bin = tl.program_id(0) * some + tl.arange(0, some)
    total = tl.zeros((some,), tl.int32)
    for first in range(0, n_blocks, chunk):
        block = first + tl.arange(0, chunk)
        place = counts_ptr + block[:, None] * bins + bin[None, :]
        counts = tl.load(place, mask=(block < n_blocks)[:, None], other=0)
        before = total[None, :] + tl.cumsum(counts, axis=0) - counts
        tl.store(place, before, mask=(block < n_blocks)[:, None])
        total += tl.sum(counts, axis=0)
    tl.store(counts_ptr + n_blocks * bins + bin, total)


@triton.jit(do_not_specialize=["n_slots", "n_blocks"])
def _place(
    idx_ptr,
    counts_ptr,
    slot_ptr,
    row_ptr,
    pos_ptr,
    bounds_ptr,
    n_slots,
    n_blocks,
    K: tl.constexpr,
    n_experts: tl.constexpr,
    block: tl.constexpr,
    bins: tl.constexpr,
):
    pid = tl.program_id(0)
    bin = tl.arange(0, bins)
    total = tl.load(counts_ptr + n_blocks * bins + bin)
    ends = tl.cumsum(total, axis=0)
    tl.store(bounds_ptr + 1 + bin, ends, mask=(pid == 0) & (bin < n_experts))
    tl.store(bounds_ptr, 0, mask=pid == 0)
    before = tl.load(counts_ptr + pid * bins + bin)
    slot = pid * block + tl.arange(0, block)
    inside = slot < n_slots
    expert = tl.load(idx_ptr + slot, mask=inside, other=-1).to(tl.int32)
    live = expert >= 0
    first = tl.gather(ends - total + before, tl.maximum(expert, 0), axis=0)
    # Slots that route nowhere follow the live ones, in order.
    first = tl.where(live, first, tl.sum(total, axis=0) + pid * block - tl.sum(before, axis=0))
    place = first + tl.load(pos_ptr + slot, mask=inside, other=0)
    tl.store(slot_ptr + place, slot, mask=inside)
    tl.store(row_ptr + place, slot // K, mask=inside)
    tl.store(pos_ptr + slot, tl.where(live, place, -1), mask=inside)
