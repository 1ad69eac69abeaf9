"""The operations of the mixers on Triton kernels: this library's own and those of fla-core.

What a kernel module must have, so that another can take its place:

    causal_conv        SiLU(depthwise causal convolution)
    mamba_scan         S_t = exp(dt_t A) S_{t-1} + dt_t k_t ⊗ x_t;  y_t = q_t S_t + D x_t
    delta_scan         S_t = exp(decay_t) S_{t-1} + beta_t k_t ⊗ (v_t - exp(decay_t) k_t S_{t-1});  y_t = q_t S_t / √n
    gate_then_norm     RMSNorm in groups of channels of x * SiLU(gate)
    norm_then_gate     RMSNorm of x, times the activation of gate

`sequences` tells what is packed into a row, or is None. The scans take and give the state after the last position,
float32 `[B, h, n, p]`; the one that they give is None where `return_state` is false.

The legend of the shape suffixes is in [`automodel_moe.dense.linear_attention`].
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .sequences import Sequences

INSTALL = "pip install 'automodel-moe[hybrid]'"


def unsupported(mixer: Any, device: torch.device) -> str | None:
    """Why no kernel here can compute `mixer` on `device`, or `None`."""
    if device.type != "cuda":
        return f"the kernels need a CUDA device, and this is {device.type}"
    if isinstance(mixer.conv1d.weight, DTensor):
        return "its weights are tensor-parallel"
    if mixer.activation not in ("silu", "swish"):
        return f"the convolution is followed by SiLU, and here by {mixer.activation}"
    return None


def unsupported_mamba_scan(n: int, p: int) -> str | None:
    """Why `mamba_scan` can't take states of n x p, or `None`."""
    if {n, p} <= {16, 32, 64, 128}:
        return None
    return f"state and head sizes must be 16, 32, 64 or 128, and here are {n} and {p}"


def unsupported_delta_scan(device: torch.device) -> str | None:
    """Why `delta_scan` can't run on `device`, or `None`."""
    if find_spec("fla") is None:
        return f"fla-core is not installed, run {INSTALL}"
    triton = Version(version("triton"))
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    # fla-core's own check, which otherwise raises in the middle of a backward (its issue 640).
    if hopper and Version("3.4.0") <= triton < Version("3.7.1") and find_spec("tilelang") is None:
        return f"Triton {triton} computes fla's backward wrongly on Hopper; torch 2.13 brings one that doesn't"
    return None


def causal_conv(x_BSC: Tensor, conv: nn.Conv1d, sequences: Sequences | None) -> Tensor:
    """The same shape and dtype."""
    from ..kernels.causal_conv_triton import causal_conv_silu

    seq_BS = None if sequences is None else sequences.seq_BS
    return causal_conv_silu(x_BSC, conv.weight.squeeze(1), conv.bias, seq_BS)


def mamba_scan(
    xkq_BSC: Tensor,
    dt_BSh: Tensor,
    A_h: Tensor,
    D_h: Tensor,
    groups: int,
    state_size: int,
    state: Tensor | None,
    return_state: bool,
    sequences: Sequences | None,
) -> tuple[Tensor, Tensor | None]:
    """x `[h * p]`, k `[g * n]` and q `[g * n]` side by side; dt and A float32. -> `[B, S, h, p]`, the state"""
    from ..kernels.mamba_scan_triton import mamba_scan as kernel

    seq_BS = None if sequences is None else sequences.seq_BS
    return kernel(
        xkq_BSC,
        dt_BSh,
        A_h,
        D_h,
        seq_BS,
        state,
        groups=groups,
        state_size=state_size,
        return_state=return_state,
    )


def delta_scan(
    q_BSgn: Tensor,
    k_BSgn: Tensor,
    v_BShp: Tensor,
    decay_BSh: Tensor,
    beta_BSh: Tensor,
    state: Tensor | None,
    return_state: bool,
    sequences: Sequences | None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, 2024), q and k brought to length 1; decay is a logarithm."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tensors, lengths = [q_BSgn, k_BSgn, v_BShp, decay_BSh, beta_BSh], {}
    if sequences is not None and sequences.packed:
        # It takes packed sequences in one row; with the host's copy of the lengths no kernel waits for the device.
        tensors = [tensor.flatten(0, 1)[None] for tensor in tensors]
        lengths = {"cu_seqlens": sequences.cu_seqlens, "cu_seqlens_cpu": sequences.cu_seqlens_cpu}
    q, k, v, decay, beta = tensors
    y, state = chunk_gated_delta_rule(
        q,
        k,
        v,
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=return_state,
        use_qk_l2norm_in_kernel=True,
        **lengths,
    )
    return y.view_as(v_BShp), state


def gate_then_norm(x_BSC: Tensor, gate_BSC: Tensor, norm: Any) -> Tensor:
    """`norm` has `weight`, `variance_epsilon` and `group_size`, the channels that are normalised together."""
    from ..kernels.gated_norm_triton import gated_rms_norm

    return gated_rms_norm(x_BSC, gate_BSC, norm.weight, norm.group_size, norm.variance_epsilon)


def norm_then_gate(x_BShp: Tensor, gate_BShp: Tensor, norm: Any) -> Tensor:
    """`norm` has `weight`, `variance_epsilon` and the name of its `activation`; each head is normalised by itself."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x_BShp, gate_BShp, norm.weight, None, activation=norm.activation, eps=norm.variance_epsilon)
