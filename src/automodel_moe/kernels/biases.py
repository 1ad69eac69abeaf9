"""What biases add to a backward: sums of an expert's rows, and their share of the router's gradient."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def rows_sum(
    x: Tensor,
    bounds: Tensor,
    index_N: Tensor | None = None,
    slot_N: Tensor | None = None,
    weights_RK: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """
    The sum of each expert's rows of `x`, [e, C], in float32 and a fixed order, given in `dtype` (x's by default); 0
    for experts without rows. With `index_N`, `slot_N` and `weights_RK` the rows are `weights[slot] * x[index]`.
    """
    dtype = x.dtype if dtype is None else dtype
    if x.is_cuda:
        from .grouped_gemm_triton import rows_sum as kernel

        return kernel(x, bounds, dtype, index_N, slot_N, weights_RK)
    return rows_sum_reference(x, bounds, dtype, index_N, slot_N, weights_RK)


def rows_sum_reference(
    x: Tensor,
    bounds: Tensor,
    dtype: torch.dtype,
    index_N: Tensor | None = None,
    slot_N: Tensor | None = None,
    weights_RK: Tensor | None = None,
) -> Tensor:
    """[`rows_sum`] in plain torch."""
    rows = x.float() if index_N is None else x[index_N].float()
    if weights_RK is not None:
        rows = rows * weights_RK.reshape(-1)[slot_N, None]
    return torch.stack([rows[start:end].sum(0) for start, end in pairwise(bounds.tolist())]).to(dtype)


def bias_dots(dy_RH: Tensor, bias_eH: Tensor, idx_RK: Tensor) -> Tensor:
    """`<dy[r], bias[idx[r, k]]>`, float32 [R, K], 0 for a slot that routes nowhere. Every expert's, then the chosen
    ones: e columns of a GEMM cost less than K gathers of H."""
    dots_Re = dy_RH.float() @ bias_eH.float().T
    return dots_Re.gather(1, idx_RK.clamp(min=0).long()).masked_fill_(idx_RK < 0, 0)
