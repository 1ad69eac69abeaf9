"""The mixers of hybrid models (Mamba-2, gated delta rule) on kernels that need no compiler to install.

transformers looks for compiled packages when it is imported and computes without them in plain torch, several times
slower; it keeps packed sequences apart only with those packages, and only where `seq_idx` or `cu_seq_lens_q` is passed
along. Here each mixer of a loaded model gets a forward of its own:

- `"triton"`: Triton kernels, with packed sequences, padding masks and caches;
- `"model"`: the mixer's own forward, as transformers has it, once for each packed sequence.

One token at a time (generation) is always the mixer's own forward.

Legend of the shape suffixes: B batch, S positions, C channels, H hidden, h heads, g groups of heads that share a key,
n key or state size, p value size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.accelerate import force_accelerate_hooks

from ..say import say_once
from . import gated_delta, mamba, triton_kernels
from .sequences import Sequences


@dataclass(frozen=True)
class Mixer:
    """
    One kind of mixer.

    Attributes:
        compute (`Callable`): `compute(kernels, mixer, x_BSH, mask_BS, sequences, cache) -> y_BSH`.
        unsupported (`Callable`): `unsupported(kernels, mixer, device) -> str | None`, a reason where it can't compute.
        packages (`tuple[str, ...]`): what transformers' own forward needs to be fast.
    """

    compute: Callable[..., Tensor]
    unsupported: Callable[..., str | None]
    packages: tuple[str, ...]


def _delta(project: Callable) -> Mixer:
    compute = functools.partial(gated_delta.forward, project)
    return Mixer(compute, gated_delta.unsupported, ("fla", "causal_conv1d"))


_MAMBA2 = Mixer(mamba.forward, mamba.unsupported, ("mamba_ssm", "causal_conv1d"))

# The modules that are known, by the name of their class.
MIXERS: Mapping[str, Mixer] = {
    "NemotronHMamba2Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "Qwen3NextGatedDeltaNet": _delta(gated_delta.joint),
    "Qwen3_5MoeGatedDeltaNet": _delta(gated_delta.separate),
    "Qwen4ExpTextGatedDeltaNet": _delta(gated_delta.separate),
}


def install(model: PreTrainedModel, choice: str) -> None:
    """Give each known mixer of a loaded model its forward; a model without any is left as it is.

    Args:
        model (`PreTrainedModel`): The model.
        choice (`str`): `MoEConfig.linear_attention`.
    """
    mixers = [module for module in model.modules() if _name(module) in MIXERS]
    for module in mixers:
        # accelerate's device hooks keep under the first name what they wrap.
        name = "_old_forward" if "_old_forward" in vars(module) else "forward"
        vars(module)[name] = functools.partial(_forward, module, choice=choice)
    if mixers:
        model.base_model.register_forward_pre_hook(_note_sequences, with_kwargs=True)


def _name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # what FSDP2 puts before a class it shards


def _note_sequences(base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    # Handed down as an argument, not kept aside: a layer's recompute gets it again, whatever ran in between.
    sequences = Sequences.told_by(kwargs)
    return None if sequences is None else (args, kwargs | {"packed_sequences": sequences})


@force_accelerate_hooks("conv1d")
def _forward(
    mixer: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    packed_sequences: Sequences | None = None,
    *,
    choice: str,
    **kwargs: Any,
) -> Tensor:
    """The forward of a mixer: `hidden_states` is `[B, S, H]`, so is the result."""
    own = type(mixer).forward
    sequences = None if cache is not None else packed_sequences
    one_by_one = cache is not None and hidden_states.size(1) == 1
    if not one_by_one and _use_triton(choice, mixer, hidden_states.device):
        compute = MIXERS[_name(mixer)].compute
        return compute(triton_kernels, mixer, hidden_states, attention_mask, sequences, cache)
    if sequences is None or not sequences.packed:
        return own(mixer, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
    x_1TH = hidden_states.flatten(0, 1)[None]
    bounds = pairwise(sequences.cu_seqlens_cpu.tolist())
    return torch.cat([own(mixer, x_1TH[:, a:b]) for a, b in bounds], dim=1).view_as(hidden_states)


def _use_triton(choice: str, mixer: nn.Module, device: torch.device) -> bool:
    if choice == "model":
        return False
    name = _name(mixer)
    reason = MIXERS[name].unsupported(triton_kernels, mixer, device)
    if choice == "triton":
        if reason:
            raise ValueError(
                f"linear_attention='triton' can't run {name} on {device}: {reason}. Use linear_attention=\"auto\"."
            )
        return True
    if reason is None:
        say_once(f"linear_attention='auto': triton for {name}")
        return True
    packages = MIXERS[name].packages
    how = f"by transformers, with {' and '.join(packages)}"
    if any(find_spec(package) is None for package in packages):
        how = "in plain torch, several times slower"
    say_once(f"linear_attention='auto': {name} runs {how} ({reason})")
    return False
