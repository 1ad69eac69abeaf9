"""A gated-delta-rule mixer: projections, a causal convolution, the scan, a gated norm.

The legend of the shape suffixes is in [`automodel_moe.dense.linear_attention`].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .masking import masked


def unsupported(kernels: Any, mixer: Any, device: torch.device) -> str | None:
    """Why `kernels` can't compute the mixer on `device`, or `None`."""
    return kernels.unsupported(mixer, device) or kernels.unsupported_delta_scan(device)


def joint(mixer: Any, x_BSH: Tensor) -> tuple[Tensor, ...]:
    """Two projections, their rows ordered by key head."""
    *qkv, gate_BShp, beta_BSh, dt_BSh = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(x_BSH), mixer.in_proj_ba(x_BSH)
    )
    return torch.cat([part.flatten(2) for part in qkv], dim=-1), gate_BShp, beta_BSh, dt_BSh


def separate(mixer: Any, x_BSH: Tensor) -> tuple[Tensor, ...]:
    """Four projections."""
    gate_BShp = mixer.in_proj_z(x_BSH).unflatten(-1, (mixer.num_v_heads, mixer.head_v_dim))
    return mixer.in_proj_qkv(x_BSH), gate_BShp, mixer.in_proj_b(x_BSH), mixer.in_proj_a(x_BSH)


def forward(
    project: Any, kernels: Any, mixer: Any, x_BSH: Tensor, mask_BS: Tensor | None, sequences: Any, cache: Any | None
) -> Tensor:
    """A transformers gated-delta mixer's forward on `kernels`; the contract of those is in `triton_kernels`.

    `project(mixer, x_BSH)` gives the convolution's input `[B, S, C]`, the gate and the logits of beta and of dt.
    """
    S = x_BSH.size(1)
    state = None if cache is None else cache.get_recurrent_state(mixer.layer_idx, state_idx=0)
    conv_BSC, gate_BShp, beta_BSh, dt_BSh = project(mixer, masked(x_BSH, mask_BS))
    if cache is not None:
        # Comes back with the positions before these in front, where the cache has seen any.
        conv_BSC = cache.update_conv_state(
            conv_BSC.transpose(1, 2), mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size
        ).transpose(1, 2)
    conv_BSC = kernels.causal_conv(conv_BSC, mixer.conv1d, sequences)[:, -S:]
    q, k, v = conv_BSC.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    y_BShp, state = kernels.delta_scan(
        q.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim)),
        k.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim)),
        v.unflatten(-1, (mixer.num_v_heads, mixer.head_v_dim)),
        -mixer.A_log.float().exp() * softplus(dt_BSh.float() + mixer.dt_bias),
        beta_BSh.sigmoid(),
        state,
        cache is not None,
        sequences,
    )
    if cache is not None:
        cache.update_recurrent_state(state, layer_idx=mixer.layer_idx)
    return mixer.out_proj(kernels.norm_then_gate(y_BShp, gate_BShp, mixer.norm).flatten(2))
