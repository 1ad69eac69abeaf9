"""The kernels of [`automodel_moe.kernels.gather_sum`]: one program a row, all of its K pairs in flight at once.

Each moves its bytes once: a row of y is summed in registers from its K rows of src and written in its final dtype;
the gradient reads dy once and writes the K scaled copies while it takes their dot products with src.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_sum(src_NH: Tensor, pos_RK: Tensor, weights_RK: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """See [`automodel_moe.kernels.gather_sum.gather_sum`]."""
    (R, K), H = pos_RK.shape, src_NH.shape[1]
    y_RH = src_NH.new_empty(R, H, dtype=dtype)
    if R > 0:
        block, num_warps = _row_block(H)
        _gather_sum[(R, triton.cdiv(H, block))](
            src_NH.contiguous(),
            pos_RK,
            pos_RK if weights_RK is None else weights_RK.contiguous(),
            y_RH,
            H,
            K,
            weights_RK is not None,
            _sum_dtype(src_NH),
            block,
            num_warps=num_warps,
        )
    return y_RH


def spread(dy_RH: Tensor, src_NH: Tensor, weights_RK: Tensor, pos_RK: Tensor) -> tuple[Tensor, Tensor]:
    """See [`automodel_moe.kernels.gather_sum.spread`]."""
    (R, K), H = pos_RK.shape, src_NH.shape[1]
    d_src_NH = torch.empty(src_NH.shape, dtype=src_NH.dtype, device=src_NH.device)
    d_weights_RK = torch.empty(R, K, dtype=weights_RK.dtype, device=src_NH.device)
    if R > 0:
        block, num_warps = _row_block(H)
        _spread[(R,)](
            dy_RH.contiguous(),
            src_NH.contiguous(),
            weights_RK.contiguous(),
            pos_RK,
            d_src_NH,
            d_weights_RK,
            H,
            K,
            triton.next_power_of_2(K),
            _sum_dtype(src_NH),
            block,
            num_warps=num_warps,
        )
    return d_src_NH, d_weights_RK


def gather_dots(dots_PN: Tensor, pos_RK: Tensor) -> Tensor:
    """See [`automodel_moe.kernels.gather_sum.gather_dots`]."""
    n_slots, (P, N) = pos_RK.numel(), dots_PN.shape
    out_RK = torch.empty(pos_RK.shape, dtype=dots_PN.dtype, device=dots_PN.device)
    if n_slots > 0:
        _gather_dots[(triton.cdiv(n_slots, 256),)](dots_PN.contiguous(), pos_RK, out_RK, n_slots, N, P, 256)
    return out_RK


def zero_tail_(x_NH: Tensor, bounds: Tensor) -> Tensor:
    """See [`automodel_moe.kernels.gather_sum.zero_tail_`]. `x_NH` must be contiguous."""
    N, H = x_NH.shape
    if N > 0:
        block, num_warps = _row_block(H)
        rows = 32
        _zero_tail[(triton.cdiv(N, rows),)](x_NH, bounds, N, H, bounds.shape[0] - 1, rows, block, num_warps=num_warps)
    return x_NH


def _row_block(H: int) -> tuple[int, int]:
    # 8 elements a thread, a 16-byte access in bfloat16.
    block = min(max(triton.next_power_of_2(H), 256), 2048)
    return block, block // 256


def _sum_dtype(src: Tensor) -> tl.dtype:
    return tl.float64 if src.dtype == torch.float64 else tl.float32


@triton.jit
def _gather_sum(
    src_ptr,
    pos_ptr,
    weights_ptr,
    y_ptr,
    H,
    K: tl.constexpr,
    has_weights: tl.constexpr,
    sum_dtype: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), sum_dtype)
    for k in tl.static_range(K):
        pos = tl.load(pos_ptr + row * K + k).to(tl.int64)
        part = tl.load(src_ptr + pos * H + h, mask=(h < H) & (pos >= 0), other=0).to(sum_dtype)
        if has_weights:
            part *= tl.where(pos >= 0, tl.load(weights_ptr + row * K + k), 0)
        total += part
    tl.store(y_ptr + row * H + h, total.to(y_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def _spread(
    dy_ptr,
    src_ptr,
    weights_ptr,
    pos_ptr,
    d_src_ptr,
    d_weights_ptr,
    H,
    K: tl.constexpr,
    K_block: tl.constexpr,
    sum_dtype: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    every_k = tl.arange(0, K_block)
    dots = tl.zeros((K_block,), sum_dtype)
    for start in range(0, H, block):
        h = start + tl.arange(0, block)
        dy = tl.load(dy_ptr + row * H + h, mask=h < H, other=0).to(sum_dtype)
        for k in tl.static_range(K):
            pos = tl.load(pos_ptr + row * K + k).to(tl.int64)
            live = (h < H) & (pos >= 0)
            weight = tl.load(weights_ptr + row * K + k)
            src = tl.load(src_ptr + pos * H + h, mask=live, other=0).to(sum_dtype)
            tl.store(d_src_ptr + pos * H + h, (weight * dy).to(d_src_ptr.dtype.element_ty), mask=live)
            # A dy of a dead slot may be NaN or infinite, and 0 times it is NaN.
            dot = tl.where(pos >= 0, tl.sum(src * dy, axis=0), 0)
            dots += tl.where(every_k == k, dot, 0)
    tl.store(d_weights_ptr + row * K + every_k, dots.to(d_weights_ptr.dtype.element_ty), mask=every_k < K)


@triton.jit(do_not_specialize=["n_slots", "N"])
def _gather_dots(dots_ptr, pos_ptr, out_ptr, n_slots, N, P: tl.constexpr, block: tl.constexpr):
    slot = tl.program_id(0) * block + tl.arange(0, block)
    pos = tl.load(pos_ptr + slot, mask=slot < n_slots, other=-1).to(tl.int64)
    total = tl.zeros((block,), dots_ptr.dtype.element_ty)
    for part in tl.static_range(P):
        total += tl.load(dots_ptr + N.to(tl.int64) * part + pos, mask=pos >= 0, other=0)
    tl.store(out_ptr + slot, total, mask=slot < n_slots)


@triton.jit(do_not_specialize=["N"])
def _zero_tail(x_ptr, bounds_ptr, N, H, n_experts, rows: tl.constexpr, block: tl.constexpr):
    first = tl.program_id(0) * rows
    n_live = tl.load(bounds_ptr + n_experts)
    if first + rows > n_live:
        for i in range(rows):
            row = (first + i).to(tl.int64)
            for start in range(0, H, block):
                h = start + tl.arange(0, block)
                zero = tl.zeros((block,), x_ptr.dtype.element_ty)
                tl.store(x_ptr + row * H + h, zero, mask=(h < H) & (row >= n_live) & (row < N))
