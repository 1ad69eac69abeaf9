"""Mamba-2's recurrence (Dao and Gu, 2024, "Transformers are SSMs") in chunks of L positions, forward and backward.

    S_t = exp(dt_t A) S_{t-1} + dt_t k_t ⊗ x_t        y_t = q_t S_t + D x_t

    forward    each chunk's own state; the states passed on from chunk to chunk; y from the state before a chunk and
               from the positions within it
    backward   the same states again, kept by nobody; the gradient of the state before each chunk, passed back; the
               gradients of q; all others

With a = the running sum of dt A within a chunk, what position j gives to position i is exp(a_i - a_j) <= 1: no
exponent is ever positive. A program takes several heads of one group, which share k and q, so that their gradients are
summed in registers: no atomics, a fixed order. Positions of another sequence of a packed row are masked.

Legend of the shape suffixes: B batch, S positions, C channels of x, k and q side by side, h heads, g groups of heads
that share k and q, n state size, p head size, c chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_L = 64
_HEADS = 8  # of one program, at most
_WARPS = 8  # of the programs that take several heads through the backward
_PASS = 512  # elements of a state that one program passes on


# As in quack.py: a graph break costs less than tracing the launches.
@torch.compiler.disable
def mamba_scan(
    xkq_BSC: Tensor,
    dt_BSh: Tensor,
    A_h: Tensor,
    D_h: Tensor,
    seq_BS: Tensor | None = None,
    state_Bhnp: Tensor | None = None,
    *,
    groups: int,
    state_size: int,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """
    Args:
        xkq_BSC (`Tensor`): x `[h * p]`, k `[g * n]` and q `[g * n]` of each position, n and p powers of two from 16.
        dt_BSh (`float32` `Tensor`): steps.
        A_h (`float32` `Tensor`): negative.
        D_h (`Tensor`): the weight of x itself in y.
        seq_BS (`int32` `Tensor`, *optional*): the number of the sequence that each position belongs to, rising.
        state_Bhnp (`float32` `Tensor`, *optional*): the state before the first position; it gets no gradient.
        groups, state_size (`int`): g and n.
        return_state (`bool`): whether to return the state after the last position, without a gradient.

    Returns:
        `[B, S, h, p]` in xkq's dtype, and the state, float32 `[B, h, n, p]`, or None.
    """
    y_BShp, state = _MambaScan.apply(
        xkq_BSC.contiguous(), dt_BSh.contiguous(), A_h, D_h, seq_BS, state_Bhnp, groups, state_size
    )
    return y_BShp, state if return_state else None


class _MambaScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        xkq_BSC: Tensor,
        dt_BSh: Tensor,
        A_h: Tensor,
        D_h: Tensor,
        seq_BS: Tensor | None,
        state_Bhnp: Tensor | None,
        groups: int,
        state_size: int,
    ) -> tuple[Tensor, Tensor]:
        sizes = _Sizes(xkq_BSC, dt_BSh, groups, state_size)
        states, _ = sizes.states(xkq_BSC, dt_BSh, A_h, seq_BS, state_Bhnp)
        y_BShp = xkq_BSC.new_empty(sizes.B, sizes.S, sizes.h, sizes.p)
        _output_kernel[sizes.grid_blocks](
            xkq_BSC, dt_BSh, A_h, D_h, seq_BS, states, y_BShp, **sizes.constants, num_warps=4, num_stages=1
        )
        ctx.save_for_backward(xkq_BSC, dt_BSh, A_h, D_h, seq_BS, state_Bhnp)
        ctx.sizes = sizes
        last = states[:, -1].clone()
        ctx.mark_non_differentiable(last)
        return y_BShp, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BShp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        xkq_BSC, dt_BSh, A_h, D_h, seq_BS, state_Bhnp = ctx.saved_tensors
        sizes: _Sizes = ctx.sizes
        dy_BShp = dy_BShp.contiguous()
        states, decays = sizes.states(xkq_BSC, dt_BSh, A_h, seq_BS, state_Bhnp)
        d_states = torch.empty_like(states)
        _state_gradient_kernel[sizes.grid_heads](
            xkq_BSC, dt_BSh, A_h, seq_BS, dy_BShp, d_states, **sizes.constants, num_warps=4, num_stages=1
        )
        passed_Bchb = decays.new_empty(*decays.shape, sizes.grid_pass[1])
        _pass_back_kernel[sizes.grid_pass](
            states, d_states, decays, passed_Bchb, sizes.c, sizes.h, SIZE=sizes.n * sizes.p, BLOCK=_PASS, num_warps=4
        )
        d_xkq_BSC = torch.empty_like(xkq_BSC)
        # Where a group's heads are too many for one program, each part of them has k's and q's gradient of its own.
        parts = sizes.h // sizes.g // sizes.constants["HEADS"]
        d_kq = xkq_BSC.new_empty(parts, sizes.B, sizes.S, 2 * sizes.g * sizes.n, dtype=torch.float32)
        d_dt_BSh = torch.empty_like(dt_BSh)
        d_A_Bch, d_D_Bch = dt_BSh.new_empty(2, sizes.B, sizes.c, sizes.h)
        _q_gradient_kernel[sizes.grid_blocks](
            xkq_BSC,
            dt_BSh,
            A_h,
            seq_BS,
            states,
            dy_BShp,
            d_xkq_BSC,
            d_kq,
            d_dt_BSh,
            **sizes.constants,
            num_warps=_WARPS,
            num_stages=1,
        )
        _kx_gradient_kernel[sizes.grid_blocks](
            xkq_BSC,
            dt_BSh,
            A_h,
            D_h,
            seq_BS,
            dy_BShp,
            d_states,
            passed_Bchb,
            d_xkq_BSC,
            d_kq,
            d_dt_BSh,
            d_A_Bch,
            d_D_Bch,
            **sizes.constants,
            BLOCKS=sizes.grid_pass[1],
            num_warps=_WARPS,
            num_stages=1,
        )
        if parts > 1:
            d_xkq_BSC[..., sizes.h * sizes.p :] = d_kq.sum(0)
        d_A_h, d_D_h = d_A_Bch.sum((0, 1)).to(A_h.dtype), d_D_Bch.sum((0, 1)).to(D_h.dtype)
        return d_xkq_BSC, d_dt_BSh, d_A_h, d_D_h, None, None, None, None


class _Sizes:
    """The numbers of one call, and its launches that forward and backward share."""

    def __init__(self, xkq_BSC: Tensor, dt_BSh: Tensor, groups: int, state_size: int):
        self.B, self.S, self.h = dt_BSh.shape
        self.g, self.n = groups, state_size
        self.p = (xkq_BSC.shape[2] - 2 * groups * state_size) // self.h
        self.c = triton.cdiv(self.S, _L)
        heads = next(n for n in range(min(_HEADS, self.h // self.g), 0, -1) if self.h // self.g % n == 0)
        self.constants = {"S": self.S, "H": self.h, "G": self.g, "N": self.n, "P": self.p, "L": _L, "HEADS": heads}
        self.grid_heads = (self.c, self.B, self.h)
        self.grid_blocks = (self.c, self.B, self.h // heads)
        self.grid_pass = (self.B * self.h, triton.cdiv(self.n * self.p, _PASS))

    def states(
        self, xkq_BSC: Tensor, dt_BSh: Tensor, A_h: Tensor, seq_BS: Tensor | None, state_Bhnp: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The states before each chunk and after the last, float32 `[B, c + 1, h, n, p]`; what passes each chunk."""
        states = dt_BSh.new_empty(self.B, self.c + 1, self.h, self.n, self.p)
        decays = dt_BSh.new_empty(self.B, self.c, self.h)
        _state_kernel[self.grid_heads](
            xkq_BSC, dt_BSh, A_h, seq_BS, states, decays, **self.constants, num_warps=4, num_stages=1
        )
        state_Bhnp = None if state_Bhnp is None else state_Bhnp.float().contiguous()
        _pass_kernel[self.grid_pass](
            states, decays, state_Bhnp, self.c, self.h, SIZE=self.n * self.p, BLOCK=_PASS, num_warps=4
        )
        return states, decays


@triton.jit
def _decay(dt_ptr, A_ptr, seq_ptr, b, c, head, t, S, H: tl.constexpr, L: tl.constexpr):
    """dt, the running sum a, its last value, and three masks: of the sequence of the position before the chunk, of
    that of the chunk's last position, and whether those two are the same."""
    dt = tl.load(dt_ptr + (b * S + t) * H + head, mask=t < S, other=0.0)
    log = dt * tl.load(A_ptr + head)
    a = tl.cumsum(log, 0)
    end = tl.sum(log, 0)
    if seq_ptr is None:
        before = t >= 0
        last = t >= 0
        through = end <= 0
    else:
        seq = tl.load(seq_ptr + b * S + t, mask=t < S, other=-1)
        # Before the first chunk lies what the caller gave: it belongs to the row's first sequence.
        seq_before = tl.load(seq_ptr + b * S + tl.maximum(c * L - 1, 0))
        seq_last = tl.load(seq_ptr + b * S + tl.minimum(c * L + L, S) - 1)
        before = seq == seq_before
        last = seq == seq_last
        through = seq_before == seq_last
    return dt, a, end, before, last, through


@triton.jit
def _within(a, seq_ptr, b, t, S, L: tl.constexpr):
    """exp(a_i - a_j) for j <= i of the same sequence, 0 elsewhere; [L, L]."""
    i = tl.arange(0, L)
    visible = i[:, None] >= i[None, :]
    if seq_ptr is not None:
        seq = tl.load(seq_ptr + b * S + t, mask=t < S, other=-1)
        visible = visible & (seq[:, None] == seq[None, :])
    return tl.exp(tl.where(visible, a[:, None] - a[None, :], float("-inf")))


@triton.jit
def _dot(x, y):
    # float32 as exact as it comes: what trains in float32 asks for that.
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _state_kernel(
    xkq_ptr,
    dt_ptr,
    A_ptr,
    seq_ptr,
    states_ptr,
    decays_ptr,
    S,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
):
    c, b, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, n, p = c * L + tl.arange(0, L), tl.arange(0, N), tl.arange(0, P)
    row = xkq_ptr + (b * S + t) * (H * P + 2 * G * N)
    dt, a, end, _before, last, through = _decay(dt_ptr, A_ptr, seq_ptr, b, c, head, t, S, H, L)
    x = tl.load(row[:, None] + head * P + p[None, :], mask=(t < S)[:, None], other=0.0)
    k_NL = tl.load(row[None, :] + H * P + head // (H // G) * N + n[:, None], mask=(t < S)[None, :], other=0.0)
    weight = tl.where(last, tl.exp(end - a) * dt, 0.0)
    state = _dot(k_NL, (x * weight[:, None]).to(x.dtype))
    n_chunks = tl.num_programs(0)
    slot = ((b * (n_chunks + 1) + c + 1) * H + head) * N * P
    tl.store(states_ptr + slot + n[:, None] * P + p[None, :], state)
    tl.store(decays_ptr + (b * n_chunks + c) * H + head, tl.where(through, tl.exp(end), 0.0))


@triton.jit
def _pass_kernel(states_ptr, decays_ptr, first_ptr, n_chunks, H, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Slot 0 is the state before the first chunk; slot c + 1 holds chunk c's own and becomes the state after it."""
    b, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    if first_ptr is not None:
        state = tl.load(first_ptr + (b * H + head) * SIZE + e, mask=e < SIZE)
    slots = states_ptr + (b * (n_chunks + 1) * H + head) * SIZE + e
    tl.store(slots, state, mask=e < SIZE)
    for c in range(n_chunks):
        slots += H * SIZE
        state = tl.load(decays_ptr + (b * n_chunks + c) * H + head) * state + tl.load(slots, mask=e < SIZE)
        tl.store(slots, state, mask=e < SIZE)


@triton.jit
def _pass_back_kernel(
    states_ptr, d_states_ptr, decays_ptr, passed_ptr, n_chunks, H, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Slot c holds what chunk c's outputs give to the state before it and becomes the gradient of that state. What
    passes a chunk, decay * <state before, gradient of the state after>, comes out in one part a program."""
    b, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    block, n_blocks = tl.program_id(1), tl.num_programs(1)
    e = block * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.zeros([BLOCK], tl.float32)
    slots = ((b * (n_chunks + 1) + n_chunks) * H + head) * SIZE + e
    tl.store(d_states_ptr + slots, gradient, mask=e < SIZE)
    for i in range(n_chunks):
        slots -= H * SIZE
        chunk = (b * n_chunks + n_chunks - 1 - i) * H + head
        gradient *= tl.load(decays_ptr + chunk)
        passed = tl.sum(gradient * tl.load(states_ptr + slots, mask=e < SIZE, other=0.0), 0)
        tl.store(passed_ptr + chunk * n_blocks + block, passed)
        gradient += tl.load(d_states_ptr + slots, mask=e < SIZE, other=0.0)
        tl.store(d_states_ptr + slots, gradient, mask=e < SIZE)


@triton.jit
def _output_kernel(
    xkq_ptr,
    dt_ptr,
    A_ptr,
    D_ptr,
    seq_ptr,
    states_ptr,
    y_ptr,
    S,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
):
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, n, p = c * L + tl.arange(0, L), tl.arange(0, N), tl.arange(0, P)
    row = xkq_ptr + (b * S + t) * (H * P + 2 * G * N)
    group = block * HEADS // (H // G)
    k_NL = tl.load(row[None, :] + H * P + group * N + n[:, None], mask=(t < S)[None, :], other=0.0)
    q = tl.load(row[:, None] + H * P + (G + group) * N + n[None, :], mask=(t < S)[:, None], other=0.0)
    scores = _dot(q, k_NL)
    for i in range(HEADS):
        head = block * HEADS + i
        dt, a, _end, before, _last, _through = _decay(dt_ptr, A_ptr, seq_ptr, b, c, head, t, S, H, L)
        x = tl.load(row[:, None] + head * P + p[None, :], mask=(t < S)[:, None], other=0.0)
        slot = ((b * (tl.num_programs(0) + 1) + c) * H + head) * N * P
        state = tl.load(states_ptr + slot + n[:, None] * P + p[None, :])
        weights = scores * _within(a, seq_ptr, b, t, S, L) * dt[None, :]
        y = _dot(weights.to(x.dtype), x)
        y += _dot(q, state.to(x.dtype)) * tl.where(before, tl.exp(a), 0.0)[:, None]
        y += tl.load(D_ptr + head).to(tl.float32) * x
        tl.store(y_ptr + ((b * S + t[:, None]) * H + head) * P + p[None, :], y, mask=(t < S)[:, None])


@triton.jit
def _state_gradient_kernel(
    xkq_ptr,
    dt_ptr,
    A_ptr,
    seq_ptr,
    dy_ptr,
    d_states_ptr,
    S,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
):
    c, b, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, n, p = c * L + tl.arange(0, L), tl.arange(0, N), tl.arange(0, P)
    row = xkq_ptr + (b * S + t) * (H * P + 2 * G * N)
    _dt, a, _end, before, _last, _through = _decay(dt_ptr, A_ptr, seq_ptr, b, c, head, t, S, H, L)
    dy = tl.load(dy_ptr + ((b * S + t[:, None]) * H + head) * P + p[None, :], mask=(t < S)[:, None], other=0.0)
    q_NL = tl.load(row[None, :] + H * P + (G + head // (H // G)) * N + n[:, None], mask=(t < S)[None, :], other=0.0)
    weight = tl.where(before, tl.exp(a), 0.0)
    gradient = _dot(q_NL, (dy * weight[:, None]).to(dy.dtype))
    slot = ((b * (tl.num_programs(0) + 1) + c) * H + head) * N * P
    tl.store(d_states_ptr + slot + n[:, None] * P + p[None, :], gradient)


@triton.jit
def _q_gradient_kernel(
    xkq_ptr,
    dt_ptr,
    A_ptr,
    seq_ptr,
    states_ptr,
    dy_ptr,
    d_xkq_ptr,
    d_kq_ptr,
    d_dt_ptr,
    S,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
):
    """q's gradient; and each position's <q, its gradient> for every head, which d_dt holds until the next kernel."""
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, n, p = c * L + tl.arange(0, L), tl.arange(0, N), tl.arange(0, P)
    valid = (t < S)[:, None]
    row = (b * S + t) * (H * P + 2 * G * N)
    group = block * HEADS // (H // G)
    k = tl.load(xkq_ptr + row[:, None] + H * P + group * N + n[None, :], mask=valid, other=0.0)
    q = tl.load(xkq_ptr + row[:, None] + H * P + (G + group) * N + n[None, :], mask=valid, other=0.0)
    d_q = tl.zeros([L, N], tl.float32)
    for i in range(HEADS):
        head = block * HEADS + i
        dt, a, _end, before, _last, _through = _decay(dt_ptr, A_ptr, seq_ptr, b, c, head, t, S, H, L)
        x_PL = tl.load(xkq_ptr + row[None, :] + head * P + p[:, None], mask=(t < S)[None, :], other=0.0)
        at_y = ((b * S + t[:, None]) * H + head) * P + p[None, :]
        dy = tl.load(dy_ptr + at_y, mask=valid, other=0.0)
        slot = ((b * (tl.num_programs(0) + 1) + c) * H + head) * N * P
        state_PN = tl.load(states_ptr + slot + n[None, :] * P + p[:, None])
        d_scores = _dot(dy, x_PL) * _within(a, seq_ptr, b, t, S, L) * dt[None, :]
        d_q_head = _dot(dy, state_PN.to(dy.dtype)) * tl.where(before, tl.exp(a), 0.0)[:, None]
        d_q_head += _dot(d_scores.to(k.dtype), k)
        tl.store(d_dt_ptr + (b * S + t) * H + head, tl.sum(q * d_q_head, 1), mask=t < S)
        d_q += d_q_head
    if H // G == HEADS:
        at_q = d_xkq_ptr + row[:, None] + H * P + (G + group) * N + n[None, :]
    else:
        place = (block % (H // G // HEADS) * tl.num_programs(1) + b) * S + t[:, None]
        at_q = d_kq_ptr + place * (2 * G * N) + (G + group) * N + n[None, :]
    tl.store(at_q, d_q, mask=valid)


@triton.jit
def _kx_gradient_kernel(
    xkq_ptr,
    dt_ptr,
    A_ptr,
    D_ptr,
    seq_ptr,
    dy_ptr,
    d_states_ptr,
    passed_ptr,
    d_xkq_ptr,
    d_kq_ptr,
    d_dt_ptr,
    d_A_ptr,
    d_D_ptr,
    S,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The gradients of k, x, dt, A and D. Scores and their gradients are [j, i] here: what j gives to i."""
    c, b, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_chunks = tl.num_programs(0)
    t, n, p = c * L + tl.arange(0, L), tl.arange(0, N), tl.arange(0, P)
    valid = (t < S)[:, None]
    row = (b * S + t) * (H * P + 2 * G * N)
    group = block * HEADS // (H // G)
    k = tl.load(xkq_ptr + row[:, None] + H * P + group * N + n[None, :], mask=valid, other=0.0)
    q = tl.load(xkq_ptr + row[:, None] + H * P + (G + group) * N + n[None, :], mask=valid, other=0.0)
    d_k = tl.zeros([L, N], tl.float32)
    for i in range(HEADS):
        head = block * HEADS + i
        dt, a, end, _before, last, _through = _decay(dt_ptr, A_ptr, seq_ptr, b, c, head, t, S, H, L)
        to_last = tl.where(last, tl.exp(end - a), 0.0)
        within_ji = tl.trans(_within(a, seq_ptr, b, t, S, L))
        x = tl.load(xkq_ptr + row[:, None] + head * P + p[None, :], mask=valid, other=0.0)
        at_y = ((b * S + t[:, None]) * H + head) * P + p[None, :]
        dy = tl.load(dy_ptr + at_y, mask=valid, other=0.0)
        slot = ((b * (n_chunks + 1) + c + 1) * H + head) * N * P
        d_state = tl.load(d_states_ptr + slot + n[:, None] * P + p[None, :]).to(k.dtype)

        d_v_state = _dot(k, d_state) * to_last[:, None]
        d_v = _dot((_dot(k, tl.trans(q)) * within_ji).to(dy.dtype), dy) + d_v_state
        d_scores_ji = (_dot(x, tl.trans(dy)) * within_ji * dt[:, None]).to(q.dtype)
        d_k_within = _dot(d_scores_ji, q)
        d_k += d_k_within + _dot(x, tl.trans(d_state)) * (to_last * dt)[:, None]

        # The gradient of each position's dt A: of every pair of positions that it lies between, of every way from an
        # input before it to the state after the chunk or from the state before to an output after it, and of what
        # passes the chunk. Pairs on one side of it cancel: both kernels sum the same rounded products.
        at_dt = (b * S + t) * H + head
        to_outputs = tl.load(d_dt_ptr + at_dt, mask=t < S, other=0.0) - tl.sum(k * d_k_within, 1)
        from_inputs = tl.sum(x * d_v_state, 1) * dt
        chunk = (b * n_chunks + c) * H + head
        passed = tl.sum(tl.load(passed_ptr + chunk * BLOCKS + tl.arange(0, BLOCKS)), 0)
        d_log = tl.cumsum(to_outputs, 0, reverse=True) + tl.cumsum(from_inputs, 0) - from_inputs + passed
        d_dt = tl.load(A_ptr + head) * d_log + tl.sum(x * d_v, 1)
        tl.store(d_dt_ptr + at_dt, d_dt, mask=t < S)
        tl.store(d_A_ptr + chunk, tl.sum(d_log * dt, 0))
        tl.store(d_D_ptr + chunk, tl.sum(tl.sum(x.to(tl.float32) * dy, 1), 0))
        d_x = dt[:, None] * d_v + tl.load(D_ptr + head).to(tl.float32) * dy
        tl.store(d_xkq_ptr + row[:, None] + head * P + p[None, :], d_x, mask=valid)
    if H // G == HEADS:
        at_k = d_xkq_ptr + row[:, None] + H * P + group * N + n[None, :]
    else:
        place = (block % (H // G // HEADS) * tl.num_programs(1) + b) * S + t[:, None]
        at_k = d_kq_ptr + place * (2 * G * N) + group * N + n[None, :]
    tl.store(at_k, d_k, mask=valid)
