# ruff: noqa: E741, SIM108 (I is the experts' width; a kernel's static branch reads best as one)
"""GEMMs over rows sorted by expert, with what can ride in a GEMM riding there: gathers, activations, row weights.

Four kernels. Three of them have rows as their M, one program a tile of one expert's rows and of the output's columns:

    rows_gemm       c = a[row] @ w + bias                                        a down projection, and dx
    act_gemm        h = a[row] @ w + bias, act(h)                                 the up projection
    d_act_gemm      da = dy[row] @ w, dh = weight * da * act'(h), weight * act(h), <act(h), da>

and `weight_gemm` has them as its K: left[row]ᵀ @ right[row] of each expert.

How many rows an expert has is known on the device alone, so `row_tiles` lays out which tile has which expert's rows,
and as many programs start as the worst routing could need; those left over return at once. A tile's last rows may
belong to the next expert: they are read (the address is clamped to the expert's last row) and not written.

Rows are read through pointers where they are gathered, which Hopper's copy engine can't do, and by the copy engine
(TMA) where they are not and the block shape says so. A layout's `[e, B, A]` or `[e, A, B]` weight is read as it is.

Suffixes: M, N, K are a GEMM's own here; sizes of the model are compile-time constants, numbers of rows are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Blocks:
    """
    How a kernel cuts its work.

    Attributes:
        m, n, k (`int`): of the output's rows and columns, and of the contraction a step.
        warps, stages (`int`): as Triton has them. An index that is loaded first takes a stage of its own.
        tma (`bool`): whether what isn't gathered is read by Hopper's copy engine.
        registers (`int`, *optional*): at most so many a thread, where that lets two programs share a multiprocessor.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# --- which rows a tile has -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowTiles:
    """`(expert, first row)` of each tile of at most `m` rows, -1 past the last; and where each expert's rows end."""

    tile_T2: Tensor
    bounds: Tensor
    m: int


def row_tiles(bounds: Tensor, n_rows: int, m: int) -> RowTiles:
    """Cut the rows `bounds[i]` to `bounds[i + 1]` of each expert into tiles of `m`; one launch, no host read."""
    n_experts = bounds.shape[0] - 1
    n_tiles = triton.cdiv(n_rows, m) + min(n_experts, n_rows)
    tile_T2 = torch.empty(n_tiles, 2, dtype=torch.int32, device=bounds.device)
    block = 32
    bins = triton.next_power_of_2(n_experts)
    _row_tiles[(triton.cdiv(n_tiles, block),)](bounds, tile_T2, n_tiles, n_experts, m, block, bins)
    return RowTiles(tile_T2, bounds, m)


@triton.jit(do_not_specialize=["n_tiles"])
def _row_tiles(
    bounds_ptr, tile_ptr, n_tiles, n_experts: tl.constexpr, m: tl.constexpr, block: tl.constexpr, bins: tl.constexpr
):
    expert = tl.arange(0, bins)
    first = tl.load(bounds_ptr + expert, mask=expert < n_experts, other=0)
    end = tl.load(bounds_ptr + expert + 1, mask=expert < n_experts, other=0)
    count = (end - first + m - 1) // m
    tiles_end = tl.cumsum(count, axis=0)
    tile = tl.program_id(0) * block + tl.arange(0, block)
    mine = (tile[:, None] >= (tiles_end - count)[None, :]) & (tile[:, None] < tiles_end[None, :])
    row = first[None, :] + (tile[:, None] - (tiles_end - count)[None, :]) * m
    # One expert at most is a tile's own.
    owner = tl.sum(tl.where(mine, expert[None, :] + 1, 0), axis=1) - 1
    tl.store(tile_ptr + 2 * tile, owner, mask=tile < n_tiles)
    tl.store(tile_ptr + 2 * tile + 1, tl.sum(tl.where(mine, row, 0), axis=1), mask=tile < n_tiles)


# --- pieces of a row GEMM --------------------------------------------------------------------------------------------


@triton.jit
def _left(a, row_M, first, k, K: tl.constexpr, block_k: tl.constexpr, tma: tl.constexpr):
    if tma:
        tile = a.load([first, k])
    else:
        k_K = k + tl.arange(0, block_k)
        place = a + row_M[:, None] * K + k_K[None, :]
        if K % block_k == 0:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=(k_K < K)[None, :], other=0)
    return tile


@triton.jit
def _right(
    w,
    expert,
    n,
    n_end,
    k,
    N: tl.constexpr,
    K: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    k_contiguous: tl.constexpr,
    masked: tl.constexpr,
    tma: tl.constexpr,
):
    """[block_k, block_n] of an expert's weight, stored [N, K] if `k_contiguous`, else [K, N]."""
    if tma:
        if k_contiguous:
            tile = w.load([expert * N + n, k]).T
        else:
            tile = w.load([expert * K + k, n])
    else:
        k_K = k + tl.arange(0, block_k)
        n_N = n + tl.arange(0, block_n)
        if k_contiguous:
            place = w + expert.to(tl.int64) * (N * K) + n_N[None, :] * K + k_K[:, None]
        else:
            place = w + expert.to(tl.int64) * (N * K) + k_K[:, None] * N + n_N[None, :]
        if masked:
            tile = tl.load(place, mask=(n_N < n_end)[None, :] & (k_K < K)[:, None], other=0)
        else:
            tile = tl.load(place)
    return tile


@triton.jit
def _where(tile_ptr, bounds_ptr, index_ptr, blocks_n, block_m: tl.constexpr, gathers: tl.constexpr):
    """The tile of this program: its expert, its rows (as they are stored and as they are read), its column block."""
    pid = tl.program_id(0)
    tile = pid // blocks_n
    expert = tl.load(tile_ptr + 2 * tile)
    first = tl.load(tile_ptr + 2 * tile + 1)
    end = tl.load(bounds_ptr + tl.maximum(expert, 0) + 1)
    row_M = first + tl.arange(0, block_m)
    # Never past the expert's last row: what stands there may be uninitialised, and its index may point anywhere.
    source_M = tl.minimum(row_M, tl.maximum(end - 1, 0))
    if gathers:
        source_M = tl.load(index_ptr + source_M)
    return expert, first, end, row_M, source_M.to(tl.int64), pid % blocks_n


# --- c = a[row] @ w + bias -------------------------------------------------------------------------------------------


@triton.jit
def _rows_gemm(
    a,
    w,
    c_ptr,
    bias_ptr,
    tile_ptr,
    bounds_ptr,
    index_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    k_contiguous: tl.constexpr,
    gathers: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    a_tma: tl.constexpr,
    w_tma: tl.constexpr,
):
    blocks_n: tl.constexpr = (N + block_n - 1) // block_n
    masked: tl.constexpr = N % block_n != 0 or K % block_k != 0
    expert, first, end, row_M, source_M, column = _where(tile_ptr, bounds_ptr, index_ptr, blocks_n, block_m, gathers)
    if expert < 0:
        return
    n = column * block_n
    acc = tl.zeros((block_m, block_n), tl.float32)
    for k in range(0, K, block_k):
        left = _left(a, source_M, first, k, K, block_k, a_tma)
        right = _right(w, expert, n, N, k, N, K, block_n, block_k, k_contiguous, masked, w_tma)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    n_N = n + tl.arange(0, block_n)
    if has_bias:
        acc += tl.load(bias_ptr + expert * N + n_N, mask=n_N < N, other=0).to(tl.float32)[None, :]
    place = c_ptr + row_M.to(tl.int64)[:, None] * N + n_N[None, :]
    tl.store(place, acc.to(c_ptr.dtype.element_ty), mask=(row_M < end)[:, None] & (n_N < N)[None, :])


def rows_gemm(
    a: Tensor,
    weight: Tensor,
    tiles: RowTiles,
    n_rows: int,
    blocks: Blocks,
    *,
    transposed: bool,
    index_N: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """
    `a[index] @ weight[expert] + bias[expert]`, [n_rows, N]; rows of no expert are left unwritten.

    Args:
        a: [R, K], gathered by `index_N`, or [n_rows, K].
        weight: [e, K, N] if `transposed`, else [e, N, K].
        tiles: [`row_tiles`] of `blocks.m` rows.
    """
    K, N = weight.shape[1:] if transposed else weight.shape[:0:-1]
    c = torch.empty(n_rows, N, dtype=a.dtype, device=a.device)
    a_tma, w_tma = blocks.tma and index_N is None and _tma(a), blocks.tma and _tma(weight) and K % blocks.k == 0
    _rows_gemm[(tiles.tile_T2.shape[0] * triton.cdiv(N, blocks.n),)](
        TensorDescriptor.from_tensor(a, [blocks.m, blocks.k]) if a_tma else a,
        _describe(weight, transposed, blocks) if w_tma else weight,
        c, bias, tiles.tile_T2, tiles.bounds, index_N,
        N, K, not transposed, index_N is not None, bias is not None,
        blocks.m, blocks.n, blocks.k, a_tma, w_tma,
        **blocks.options,
    )  # fmt: skip
    return c


def _tma(tensor: Tensor) -> bool:
    # What a tensor map asks of an operand: rows of whole 16 bytes, from a 16-byte boundary.
    return (tensor.shape[-1] * tensor.element_size()) % 16 == 0 and tensor.data_ptr() % 16 == 0


def _describe(weight: Tensor, transposed: bool, blocks: Blocks, n: int | None = None) -> Any:
    shape = [blocks.k, n or blocks.n] if transposed else [n or blocks.n, blocks.k]
    return TensorDescriptor.from_tensor(weight.view(-1, weight.shape[2]), shape)


# --- activations -----------------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _activate(g, u, kind: tl.constexpr, alpha: tl.constexpr, beta: tl.constexpr, limit: tl.constexpr):
    if kind == "relu2":
        positive = tl.maximum(g, 0)
        a = positive * positive
    elif kind == "silu":
        a = g * _sigmoid(alpha * g)
    else:
        if limit is not None:
            g = tl.minimum(g, limit)
            u = tl.minimum(tl.maximum(u, -limit), limit)
        a = g * _sigmoid(alpha * g) * (u + beta)
    return a


@triton.jit
def _d_activate(g, u, kind: tl.constexpr, alpha: tl.constexpr, beta: tl.constexpr, limit: tl.constexpr):
    """The activation and its derivatives by g and by u (the latter is 0 without a gate)."""
    if kind == "relu2":
        positive = tl.maximum(g, 0)
        a, by_g, by_u = positive * positive, 2 * positive, tl.zeros_like(g)
    elif kind == "silu":
        share = _sigmoid(alpha * g)
        a, by_g, by_u = g * share, share + alpha * g * share * (1 - share), tl.zeros_like(g)
    else:
        g_cut, u_cut = g, u
        if limit is not None:
            g_cut = tl.minimum(g, limit)
            u_cut = tl.minimum(tl.maximum(u, -limit), limit)
        share = _sigmoid(alpha * g_cut)
        by_u = g_cut * share
        a = by_u * (u_cut + beta)
        by_g = (u_cut + beta) * (share + alpha * by_u * (1 - share))
        if limit is not None:
            # As torch.clamp has it: at the limit itself the gradient still passes.
            by_g = tl.where(g <= limit, by_g, 0)
            by_u = tl.where((u >= -limit) & (u <= limit), by_u, 0)
    return a, by_g, by_u


def _constants(gate: Any) -> tuple[str, float, float, float | None]:
    return gate.kind, gate.alpha, gate.beta, None if gate.limit == float("inf") else gate.limit


# --- h = a[row] @ w + bias, act(h) -----------------------------------------------------------------------------------


@triton.jit
def _act_gemm(
    a,
    w,
    h_ptr,
    act_ptr,
    bias_ptr,
    tile_ptr,
    bounds_ptr,
    index_ptr,
    I: tl.constexpr,
    K: tl.constexpr,
    k_contiguous: tl.constexpr,
    interleaved: tl.constexpr,
    has_bias: tl.constexpr,
    stores_h: tl.constexpr,
    kind: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    w_tma: tl.constexpr,
):
    """A block has `block_n` columns of act(h): gate's and up's columns of them are one program's."""
    gated: tl.constexpr = kind == "glu"
    J: tl.constexpr = 2 * I if gated else I
    blocks_n: tl.constexpr = (I + block_n - 1) // block_n
    masked: tl.constexpr = I % block_n != 0 or K % block_k != 0
    expert, first, end, row_M, source_M, column = _where(tile_ptr, bounds_ptr, index_ptr, blocks_n, block_m, True)
    if expert < 0:
        return
    n = column * block_n
    n_N = n + tl.arange(0, block_n)
    live = (row_M < end)[:, None] & (n_N < I)[None, :]
    row_M = row_M.to(tl.int64)
    if gated and interleaved:
        j_J = 2 * n + tl.arange(0, 2 * block_n)
        both = tl.zeros((block_m, 2 * block_n), tl.float32)
        for k in range(0, K, block_k):
            left = _left(a, source_M, first, k, K, block_k, False)
            right = _right(w, expert, 2 * n, J, k, J, K, 2 * block_n, block_k, k_contiguous, masked, w_tma)
            both = tl.dot(left, right, both, input_precision="ieee")
        if has_bias:
            both += tl.load(bias_ptr + expert * J + j_J, mask=j_J < J, other=0).to(tl.float32)[None, :]
        if stores_h:
            live_J = (row_M < end)[:, None] & (j_J < J)[None, :]
            tl.store(h_ptr + row_M[:, None] * J + j_J[None, :], both.to(h_ptr.dtype.element_ty), mask=live_J)
        g, u = tl.split(tl.reshape(both, (block_m, block_n, 2)))
    else:
        g = tl.zeros((block_m, block_n), tl.float32)
        u = tl.zeros((block_m, block_n), tl.float32)
        for k in range(0, K, block_k):
            left = _left(a, source_M, first, k, K, block_k, False)
            right = _right(w, expert, n, I, k, J, K, block_n, block_k, k_contiguous, masked, w_tma)
            g = tl.dot(left, right, g, input_precision="ieee")
            if gated:
                right_u = _right(w, expert, I + n, J, k, J, K, block_n, block_k, k_contiguous, masked, w_tma)
                u = tl.dot(left, right_u, u, input_precision="ieee")
        if has_bias:
            g += tl.load(bias_ptr + expert * J + n_N, mask=n_N < I, other=0).to(tl.float32)[None, :]
            if gated:
                u += tl.load(bias_ptr + expert * J + I + n_N, mask=n_N < I, other=0).to(tl.float32)[None, :]
        if stores_h:
            place = h_ptr + row_M[:, None] * J + n_N[None, :]
            tl.store(place, g.to(h_ptr.dtype.element_ty), mask=live)
            if gated:
                tl.store(place + I, u.to(h_ptr.dtype.element_ty), mask=live)
    act = _activate(g, u, kind, alpha, beta, limit)
    tl.store(act_ptr + row_M[:, None] * I + n_N[None, :], act.to(act_ptr.dtype.element_ty), mask=live)


def act_gemm(
    x_RH: Tensor,
    weight: Tensor,
    tiles: RowTiles,
    index_N: Tensor,
    blocks: Blocks,
    *,
    gate: Any,
    transposed: bool,
    bias: Tensor | None,
    stores_h: bool,
) -> tuple[Tensor | None, Tensor]:
    """
    `h = x[index] @ weight[expert] + bias[expert]` and `act(h)`: [N, J], or `None` unless `stores_h`, and [N, I].

    Args:
        x_RH: rows, gathered by `index_N`.
        weight: [e, H, J] if `transposed`, else [e, J, H].
        gate ([`~automodel_moe.experts.gates.Gate`]): the activation; `J` is 2I with a gate and I without.
        blocks: `n` counts columns of `act(h)`.
    """
    H, J = weight.shape[1:] if transposed else weight.shape[:0:-1]
    I, N = J // 2 if gate.has_gate else J, index_N.shape[0]
    h_NJ = torch.empty(N, J, dtype=x_RH.dtype, device=x_RH.device) if stores_h else None
    act_NI = torch.empty(N, I, dtype=x_RH.dtype, device=x_RH.device)
    # A box of columns may reach past an expert's: into the other half, whose columns are then not stored.
    w_tma = blocks.tma and _tma(weight) and H % blocks.k == 0
    _act_gemm[(tiles.tile_T2.shape[0] * triton.cdiv(I, blocks.n),)](
        x_RH,
        _describe(weight, transposed, blocks, blocks.n * (1 + gate.interleaved)) if w_tma else weight,
        h_NJ, act_NI, bias, tiles.tile_T2, tiles.bounds, index_N,
        I, H, not transposed, gate.interleaved, bias is not None, stores_h, *_constants(gate),
        blocks.m, blocks.n, blocks.k, w_tma,
        **blocks.options,
    )  # fmt: skip
    return h_NJ, act_NI


# --- da = dy[row] @ w, dh, weight * act(h), <act(h), da> -------------------------------------------------------------


@triton.jit(do_not_specialize=["n_pairs"])
def _d_act_gemm(
    dy,
    w,
    h_ptr,
    weights_ptr,
    dh_ptr,
    act_ptr,
    dots_ptr,
    tile_ptr,
    bounds_ptr,
    index_ptr,
    slot_ptr,
    n_pairs,
    I: tl.constexpr,
    K: tl.constexpr,
    k_contiguous: tl.constexpr,
    interleaved: tl.constexpr,
    stores_act: tl.constexpr,
    kind: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    w_tma: tl.constexpr,
):
    gated: tl.constexpr = kind == "glu"
    J: tl.constexpr = 2 * I if gated else I
    blocks_n: tl.constexpr = (I + block_n - 1) // block_n
    masked: tl.constexpr = I % block_n != 0 or K % block_k != 0
    expert, first, end, row_M, source_M, column = _where(tile_ptr, bounds_ptr, index_ptr, blocks_n, block_m, True)
    if expert < 0:
        return
    n = column * block_n
    da = tl.zeros((block_m, block_n), tl.float32)
    for k in range(0, K, block_k):
        left = _left(dy, source_M, first, k, K, block_k, False)
        right = _right(w, expert, n, I, k, I, K, block_n, block_k, k_contiguous, masked, w_tma)
        da = tl.dot(left, right, da, input_precision="ieee")
    inside_M = row_M < end
    weight_M = tl.load(weights_ptr + tl.load(slot_ptr + row_M, mask=inside_M, other=0), mask=inside_M, other=0)
    # A quarter of the columns at a time: h, da and all that comes of them would not fit the registers at once.
    low, high = _halves(da, block_m, block_n)
    quarters = _halves(low, block_m, block_n // 2) + _halves(high, block_m, block_n // 2)
    dots_M = tl.zeros((block_m,), tl.float32)
    for i in tl.static_range(4):
        dots_M += _d_act_columns(
            quarters[i], weight_M, h_ptr, dh_ptr, act_ptr, row_M.to(tl.int64), inside_M, n + i * (block_n // 4),
            I, J, interleaved, stores_act, kind, alpha, beta, limit, block_m, block_n // 4,
        )  # fmt: skip
    tl.store(dots_ptr + column.to(tl.int64) * n_pairs + row_M, dots_M, mask=inside_M)


@triton.jit
def _halves(x, M: tl.constexpr, N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _d_act_columns(
    da,
    weight_M,
    h_ptr,
    dh_ptr,
    act_ptr,
    row_M,
    inside_M,
    n,
    I: tl.constexpr,
    J: tl.constexpr,
    interleaved: tl.constexpr,
    stores_act: tl.constexpr,
    kind: tl.constexpr,
    alpha: tl.constexpr,
    beta: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Some columns of the results, stored; returns their part of <act(h), da>."""
    gated: tl.constexpr = kind == "glu"
    dtype = dh_ptr.dtype.element_ty
    n_N = n + tl.arange(0, block_n)
    live = inside_M[:, None] & (n_N < I)[None, :]
    scaled = da * weight_M[:, None]
    if gated and interleaved:
        j_J = 2 * n + tl.arange(0, 2 * block_n)
        place = row_M[:, None] * J + j_J[None, :]
        live_J = inside_M[:, None] & (j_J < J)[None, :]
        g, u = tl.split(tl.reshape(tl.load(h_ptr + place, mask=live_J, other=0), (block_m, block_n, 2)))
        act, by_g, by_u = _d_activate(g.to(tl.float32), u.to(tl.float32), kind, alpha, beta, limit)
        dh = tl.reshape(tl.join((scaled * by_g).to(dtype), (scaled * by_u).to(dtype)), (block_m, 2 * block_n))
        tl.store(dh_ptr + place, dh, mask=live_J)
    else:
        place = row_M[:, None] * J + n_N[None, :]
        g = tl.load(h_ptr + place, mask=live, other=0).to(tl.float32)
        u = g
        if gated:
            u = tl.load(h_ptr + place + I, mask=live, other=0).to(tl.float32)
        act, by_g, by_u = _d_activate(g, u, kind, alpha, beta, limit)
        tl.store(dh_ptr + place, (scaled * by_g).to(dtype), mask=live)
        if gated:
            tl.store(dh_ptr + place + I, (scaled * by_u).to(dtype), mask=live)
    if stores_act:
        tl.store(act_ptr + row_M[:, None] * I + n_N[None, :], (act * weight_M[:, None]).to(dtype), mask=live)
    return tl.sum(tl.where(live, act * da, 0), axis=1)


def d_act_gemm(
    dy_RH: Tensor,
    weight: Tensor,
    h_NJ: Tensor,
    weights_RK: Tensor,
    tiles: RowTiles,
    index_N: Tensor,
    slot_N: Tensor,
    blocks: Blocks,
    *,
    gate: Any,
    transposed: bool,
    stores_act: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """
    With `da = dy[index] @ weight[expert]`: `dh = weights[slot] * da * act'(h)`, [N, J]; `weights[slot] * act(h)`,
    [N, I], or `None` unless `stores_act`; and `<act(h), da>` in parts that are yet to be summed, float32 [parts, N].

    Args:
        dy_RH: rows, gathered by `index_N`.
        weight: the down projection, [e, I, H] if `transposed`, else [e, H, I].
    """
    I, H = weight.shape[1:] if transposed else weight.shape[:0:-1]
    N, dtype, device = h_NJ.shape[0], dy_RH.dtype, dy_RH.device
    dh_NJ = torch.empty_like(h_NJ)
    act_NI = torch.empty(N, I, dtype=dtype, device=device) if stores_act else None
    columns = triton.cdiv(I, blocks.n)
    dots = torch.empty(columns, N, dtype=torch.float32, device=device)
    w_tma = blocks.tma and _tma(weight) and H % blocks.k == 0
    _d_act_gemm[(tiles.tile_T2.shape[0] * columns,)](
        dy_RH, _describe(weight, not transposed, blocks) if w_tma else weight,
        h_NJ, weights_RK, dh_NJ, act_NI, dots, tiles.tile_T2, tiles.bounds, index_N, slot_N, N,
        I, H, transposed, gate.interleaved, stores_act, *_constants(gate),
        blocks.m, blocks.n, blocks.k, w_tma,
        **blocks.options,
    )  # fmt: skip
    return dh_NJ, act_NI, dots


# --- left[row]ᵀ @ right[row] of each expert --------------------------------------------------------------------------


@triton.jit
def _pair_rows(
    x,
    index_ptr,
    r,
    end,
    c,
    C: tl.constexpr,
    block_r: tl.constexpr,
    block_c: tl.constexpr,
    gathers: tl.constexpr,
    tma: tl.constexpr,
    masked: tl.constexpr,
):
    """[block_r, block_c] of rows from r on; zeros past `end` if `masked`."""
    if tma:
        tile = x.load([r, c])
    else:
        r_R = r + tl.arange(0, block_r)
        c_C = c + tl.arange(0, block_c)
        if gathers:
            if masked:
                row = tl.load(index_ptr + r_R, mask=r_R < end, other=0).to(tl.int64)
            else:
                row = tl.load(index_ptr + r_R).to(tl.int64)
        else:
            row = r_R.to(tl.int64)
        place = x + row[:, None] * C + c_C[None, :]
        if masked:
            tile = tl.load(place, mask=(r_R < end)[:, None] & (c_C < C)[None, :], other=0)
        elif C % block_c != 0:
            tile = tl.load(place, mask=(c_C < C)[None, :], other=0)
        else:
            tile = tl.load(place)
    return tile


@triton.jit
def _weight_gemm(
    left,
    right,
    left_tail,
    right_tail,
    out_ptr,
    bounds_ptr,
    index_ptr,
    A: tl.constexpr,
    B: tl.constexpr,
    gathers_left: tl.constexpr,
    gathers_right: tl.constexpr,
    block_a: tl.constexpr,
    block_b: tl.constexpr,
    block_r: tl.constexpr,
    group: tl.constexpr,
    left_tma: tl.constexpr,
    right_tma: tl.constexpr,
):
    blocks_a: tl.constexpr = (A + block_a - 1) // block_a
    blocks_b: tl.constexpr = (B + block_b - 1) // block_b
    pid = tl.program_id(0)
    expert = pid // (blocks_a * blocks_b)
    place = pid % (blocks_a * blocks_b)
    # `group` blocks of A at a time against every block of B: neighbours in time share what the cache holds.
    wide = place // (group * blocks_b)
    height = tl.minimum(blocks_a - wide * group, group)
    a = (wide * group + place % (group * blocks_b) % height) * block_a
    b = (place % (group * blocks_b) // height) * block_b
    start = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    whole = start + (end - start) // block_r * block_r
    acc = tl.zeros((block_a, block_b), tl.float32)
    for r in range(start, whole, block_r):
        left_RA = _pair_rows(left, index_ptr, r, end, a, A, block_r, block_a, gathers_left, left_tma, False)
        right_RB = _pair_rows(right, index_ptr, r, end, b, B, block_r, block_b, gathers_right, right_tma, False)
        acc = tl.dot(left_RA.T, right_RB, acc, input_precision="ieee")
    # The last rows apart: past them stand another expert's, or memory that nothing wrote, and 0 times NaN is NaN.
    if whole < end:
        left_RA = _pair_rows(left_tail, index_ptr, whole, end, a, A, block_r, block_a, gathers_left, False, True)
        right_RB = _pair_rows(right_tail, index_ptr, whole, end, b, B, block_r, block_b, gathers_right, False, True)
        acc = tl.dot(left_RA.T, right_RB, acc, input_precision="ieee")
    a_A = a + tl.arange(0, block_a)
    b_B = b + tl.arange(0, block_b)
    place = out_ptr + expert.to(tl.int64) * (A * B) + a_A[:, None] * B + b_B[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(a_A < A)[:, None] & (b_B < B)[None, :])


def weight_gemm(
    left: Tensor, right: Tensor, bounds: Tensor, index_N: Tensor, blocks: Blocks, *, gathers: str, dtype: torch.dtype
) -> Tensor:
    """
    `left[rows]ᵀ @ right[rows]` of each expert's rows: [e, A, B] in `dtype`, an exact 0 for experts without rows.

    Args:
        left: [R or N, A]; `gathers="left"`: gathered by `index_N`.
        right: [N or R, B]; `gathers="right"`: gathered by `index_N`.
    """
    A, B, e = left.shape[1], right.shape[1], bounds.shape[0] - 1
    out = torch.empty(e, A, B, dtype=dtype, device=left.device)
    left_tma = blocks.tma and gathers != "left" and _tma(left)
    right_tma = blocks.tma and gathers != "right" and _tma(right)
    _weight_gemm[(e * triton.cdiv(A, blocks.m) * triton.cdiv(B, blocks.n),)](
        TensorDescriptor.from_tensor(left, [blocks.k, blocks.m]) if left_tma else left,
        TensorDescriptor.from_tensor(right, [blocks.k, blocks.n]) if right_tma else right,
        left, right, out, bounds, index_N,
        A, B, gathers == "left", gathers == "right",
        blocks.m, blocks.n, blocks.k, 8, left_tma, right_tma,
        **blocks.options,
    )  # fmt: skip
    return out


# --- sums of an expert's rows ----------------------------------------------------------------------------------------


@triton.jit
def _rows_sum(
    x_ptr, weights_ptr, out_ptr, bounds_ptr, index_ptr, slot_ptr,
    C: tl.constexpr, gathers: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    c_C = tl.program_id(1) * block_c + tl.arange(0, block_c)
    start = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    total = tl.zeros((block_r, block_c), tl.float32)
    for r in range(start, end, block_r):
        r_R = r + tl.arange(0, block_r)
        row = r_R
        if gathers:
            row = tl.load(index_ptr + r_R, mask=r_R < end, other=0)
        place = x_ptr + row.to(tl.int64)[:, None] * C + c_C[None, :]
        part = tl.load(place, mask=(r_R < end)[:, None] & (c_C < C)[None, :], other=0).to(tl.float32)
        if gathers:
            slot = tl.load(slot_ptr + r_R, mask=r_R < end, other=0)
            part *= tl.load(weights_ptr + slot, mask=r_R < end, other=0)[:, None]
        total += part
    tl.store(out_ptr + expert * C + c_C, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=c_C < C)


def rows_sum(
    x: Tensor,
    bounds: Tensor,
    dtype: torch.dtype,
    index_N: Tensor | None = None,
    slot_N: Tensor | None = None,
    weights_RK: Tensor | None = None,
) -> Tensor:
    """
    The sum of each expert's rows of `x`, or of `weights[slot] * x[index]`: [e, C] in `dtype`, in float32 and a fixed
    order; 0 for experts without rows.
    """
    e, C = bounds.shape[0] - 1, x.shape[1]
    out = torch.empty(e, C, dtype=dtype, device=x.device)
    _rows_sum[(e, triton.cdiv(C, 64))](x, weights_RK, out, bounds, index_N, slot_N, C, index_N is not None, 64, 64)
    return out


# --- the table -------------------------------------------------------------------------------------------------------

_HOPPER = {
    "act": Blocks(128, 128, 64, warps=8, stages=4, tma=True),
    "up": Blocks(128, 256, 64, warps=8, stages=3, tma=True),
    "down": Blocks(128, 128, 64, warps=4, stages=3, tma=True),
    "d_act": Blocks(128, 256, 64, warps=8, stages=3, tma=True),
    "dx": Blocks(128, 256, 64, warps=8, stages=3, tma=True),
    "d_down": Blocks(128, 256, 64, warps=8, stages=5, tma=True),
    "d_up": Blocks(128, 128, 64, warps=4, stages=5, tma=True),
}
# 48 KiB of shared memory: what consumer cards have beside the data centre's.
_AMPERE = {name: Blocks(128, 128, 32, warps=8, stages=3) for name in _HOPPER} | {
    "act": Blocks(128, 64, 32, warps=8, stages=3)
}


def blocks_for(device: torch.device) -> dict[str, Blocks]:
    """Block shapes by kernel; a fixed table, so that no step is spent on trying."""
    return _HOPPER if torch.cuda.get_device_capability(device)[0] == 9 else _AMPERE
