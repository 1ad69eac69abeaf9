"""A Mamba-2 mixer: one projection, a causal convolution, the scan, a gated norm.

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
    return kernels.unsupported(mixer, device) or kernels.unsupported_mamba_scan(mixer.ssm_state_size, mixer.head_dim)


def forward(
    kernels: Any, mixer: Any, x_BSH: Tensor, mask_BS: Tensor | None, sequences: Any, cache: Any | None
) -> Tensor:
    """A transformers Mamba-2 mixer's forward on `kernels`; the contract of those is in `triton_kernels`."""
    S = x_BSH.size(1)
    state = None if cache is None else cache.get_recurrent_state(mixer.layer_idx, state_idx=0)
    projected = mixer.in_proj(masked(x_BSH, mask_BS))
    gate_BSC, xkq_BSC, dt_BSh = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    if cache is not None:
        # Comes back with the positions before these in front, where the cache has seen any.
        xkq_BSC = cache.update_conv_state(
            xkq_BSC.transpose(1, 2), mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size
        ).transpose(1, 2)
    xkq_BSC = masked(kernels.causal_conv(xkq_BSC, mixer.conv1d, sequences)[:, -S:], mask_BS)
    low, high = mixer.time_step_limit
    y_BShp, state = kernels.mamba_scan(
        xkq_BSC,
        softplus(dt_BSh.float() + mixer.dt_bias.float()).clamp(low, high),
        -mixer.A_log.float().exp(),
        mixer.D,
        mixer.n_groups,
        mixer.ssm_state_size,
        None if state is None else state.transpose(2, 3),  # the cache keeps values before keys
        cache is not None,
        sequences,
    )
    if cache is not None:
        cache.update_recurrent_state(state.transpose(2, 3), layer_idx=mixer.layer_idx)
    return mixer.out_proj(kernels.gate_then_norm(y_BShp.flatten(2), gate_BSC, mixer.norm).to(x_BSH.dtype))
