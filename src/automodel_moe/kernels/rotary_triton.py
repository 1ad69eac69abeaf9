"""Rotation of halves, forward and backward: one program a position, all heads of q and k in it.

A position's cos and sin are loaded once; of the columns of a head, `x1 | x2 | rest` with x1 and x2 W / 2 wide,

    y1 = x1 * cos1 - x2 * sin1,  y2 = x2 * cos2 + x1 * sin2,  rest as it is

and backward is the transposed map. Both halves of cos and sin are read, since tables need not repeat themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, shared_table: bool, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """
    q and k rotated, in new tensors.

    Args:
        q (`Tensor`), k (`Tensor`): `[B, N, S, D]`, in any layout, each with its own N.
        cos (`Tensor`), sin (`Tensor`): `[1 or B, S, W]`, W columns to rotate; with `shared_table` half as many.
        backward (`bool`): apply the transposed map, which takes the results' gradients to the inputs'.
    """
    B, _, S, D = q.shape
    half = cos.shape[-1] if shared_table else cos.shape[-1] // 2
    q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
    outputs = torch.empty_like(q), torch.empty_like(k)
    strides = [t.stride(i) for t in (q, k, *outputs) for i in range(3)]
    table_strides = [(0 if t.shape[0] == 1 else t.stride(0), t.stride(1)) for t in (cos, sin)]
    blocks = triton.next_power_of_2(half), triton.next_power_of_2(max(D - 2 * half, 1))
    _rotate[(B * S,)](
        q,
        k,
        *outputs,
        cos,
        sin,
        S,
        q.shape[1],
        k.shape[1],
        half,
        D,
        *strides,
        *table_strides[0],
        *table_strides[1],
        0 if shared_table else half,
        backward,
        2 * half < D,
        *blocks,
        min(8, max(1, 1024 // blocks[0])),
        num_warps=4,
    )
    return outputs


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    S,
    n_q,
    n_k,
    half,
    D,
    q_b,
    q_n,
    q_s,
    k_b,
    k_n,
    k_s,
    q_out_b,
    q_out_n,
    q_out_s,
    k_out_b,
    k_out_n,
    k_out_s,
    cos_b,
    cos_s,
    sin_b,
    sin_s,
    second,
    backward: tl.constexpr,
    has_rest: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    heads: tl.constexpr,
):
    b = (tl.program_id(0) // S).to(tl.int64)
    s = (tl.program_id(0) % S).to(tl.int64)
    d = tl.arange(0, half_block)
    cos_row = cos_ptr + b * cos_b + s * cos_s
    sin_row = sin_ptr + b * sin_b + s * sin_s
    live = d < half
    cos1 = tl.load(cos_row + d, mask=live, other=0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_row + second + d, mask=live, other=0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_row + d, mask=live, other=0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_row + second + d, mask=live, other=0).to(tl.float32)[None, :]
    if backward:
        sin1, sin2 = -sin2, -sin1
    x = q_ptr + b * q_b + s * q_s
    y = q_out_ptr + b * q_out_b + s * q_out_s
    _heads(x, y, q_n, q_out_n, n_q, half, D, cos1, cos2, sin1, sin2, has_rest, half_block, rest_block, heads)
    x = k_ptr + b * k_b + s * k_s
    y = k_out_ptr + b * k_out_b + s * k_out_s
    _heads(x, y, k_n, k_out_n, n_k, half, D, cos1, cos2, sin1, sin2, has_rest, half_block, rest_block, heads)


@triton.jit
def _heads(
    x_ptr,
    y_ptr,
    x_n,
    y_n,
    n_heads,
    half,
    D,
    cos1,
    cos2,
    sin1,
    sin2,
    has_rest: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    heads: tl.constexpr,
):
    d = tl.arange(0, half_block)[None, :]
    for start in range(0, n_heads, heads):
        n = (start + tl.arange(0, heads))[:, None]
        live = (n < n_heads) & (d < half)
        x1 = tl.load(x_ptr + n * x_n + d, mask=live, other=0).to(tl.float32)
        x2 = tl.load(x_ptr + n * x_n + half + d, mask=live, other=0).to(tl.float32)
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
        tl.store(y_ptr + n * y_n + d, y1.to(y_ptr.dtype.element_ty), mask=live)
        tl.store(y_ptr + n * y_n + half + d, y2.to(y_ptr.dtype.element_ty), mask=live)
        if has_rest:
            r = 2 * half + tl.arange(0, rest_block)[None, :]
            live = (n < n_heads) & (r < D)
            rest = tl.load(x_ptr + n * x_n + r, mask=live, other=0)
            tl.store(y_ptr + n * y_n + r, rest, mask=live)
