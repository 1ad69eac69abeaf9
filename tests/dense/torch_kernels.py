"""`automodel_moe.dense.triton_kernels` in plain torch, position by position: slow, on any device, in any dtype."""

from itertools import pairwise

import torch
from torch.nn.functional import conv1d, silu


def unsupported(mixer, device):
    return None


def unsupported_mamba_scan(n, p):
    return None


def unsupported_delta_scan(device):
    return None


def _apart(function, sequences, *tensors):
    """The function on each sequence alone, its results one after the other."""
    if sequences is None:
        return function(*tensors)
    spans = list(pairwise(sequences.cu_seqlens.tolist()))
    rows = [tensor.flatten(0, 1)[None] for tensor in tensors]
    return torch.cat([function(*(row[:, a:b] for row in rows)) for a, b in spans], dim=1).unflatten(
        1, sequences.seq_BS.shape
    )[0]


def causal_conv(x_BSC, conv, sequences):
    def convolve(x_BSC):
        y_BCS = conv1d(x_BSC.mT, conv.weight, conv.bias, padding=conv.weight.size(-1) - 1, groups=conv.weight.size(0))
        return silu(y_BCS[..., : x_BSC.size(1)].mT)

    return _apart(convolve, sequences, x_BSC)


def mamba_scan(xkq_BSC, dt_BSh, A_h, D_h, groups, state_size, state, return_state, sequences):
    heads = dt_BSh.size(2)
    width = [xkq_BSC.size(2) - 2 * groups * state_size, *[groups * state_size] * 2]
    last = []

    def scan(xkq_BSC, dt_BSh):
        x_BSC, k_BSC, q_BSC = xkq_BSC.split(width, dim=-1)
        x_BShp = x_BSC.unflatten(-1, (heads, -1))
        k_BShn, q_BShn = (
            t.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2) for t in (k_BSC, q_BSC)
        )
        S_Bhnp = x_BSC.new_zeros(*k_BShn[:, 0].shape, x_BShp.size(-1)) if state is None else state
        out = []
        for x, k, q, dt in zip(*(t.unbind(1) for t in (x_BShp, k_BShn, q_BShn, dt_BSh)), strict=True):
            S_Bhnp = (dt * A_h).exp()[..., None, None] * S_Bhnp + k[..., None] * (dt[..., None] * x)[..., None, :]
            out.append((q[..., None] * S_Bhnp).sum(-2) + D_h[:, None] * x)
        last.append(S_Bhnp)
        return torch.stack(out, dim=1).to(xkq_BSC.dtype)

    y_BShp = _apart(scan, sequences, xkq_BSC, dt_BSh)
    return y_BShp, last[-1] if return_state else None


def _unit(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_scan(q_BSgn, k_BSgn, v_BShp, decay_BSh, beta_BSh, state, return_state, sequences):
    last = []

    def scan(q_BSgn, k_BSgn, v_BShp, decay_BSh, beta_BSh):
        B, _, h, p = v_BShp.shape
        n = q_BSgn.size(-1)
        q_BShn, k_BShn = (_unit(t).repeat_interleave(h // t.size(2), dim=2) for t in (q_BSgn, k_BSgn))
        S_Bhnp = q_BShn.new_zeros(B, h, n, p) if state is None else state
        out = []
        tensors = (q_BShn, k_BShn, v_BShp, decay_BSh, beta_BSh)
        for q, k, v, decay, beta in zip(*(t.unbind(1) for t in tensors), strict=True):
            S_Bhnp = decay.exp()[..., None, None] * S_Bhnp
            delta = beta[..., None] * (v - (k[..., None] * S_Bhnp).sum(-2))
            S_Bhnp = S_Bhnp + k[..., None] * delta[..., None, :]
            out.append((q[..., None] * S_Bhnp).sum(-2) / n**0.5)
        last.append(S_Bhnp)
        return torch.stack(out, dim=1).to(v_BShp.dtype)

    y_BShp = _apart(scan, sequences, q_BSgn, k_BSgn, v_BShp, decay_BSh, beta_BSh)
    return y_BShp, last[-1] if return_state else None


def _rms(x, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def gate_then_norm(x_BSC, gate_BSC, norm):
    groups = (x_BSC * silu(gate_BSC)).unflatten(-1, (-1, norm.group_size))
    return norm.weight * _rms(groups, norm.variance_epsilon).flatten(-2)


def norm_then_gate(x_BShp, gate_BShp, norm):
    return norm.weight * _rms(x_BShp, norm.variance_epsilon) * silu(gate_BShp)
