"""Blocks whose shared experts run while tokens travel.

transformers' blocks call their shared experts before `experts(...)` or after it returns; that they may run in between
needs the block's consent. Each class here is one way to write such a block, and `SHARED` names the blocks that
transformers writes so, word for word; any other block runs as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Beside:
    """
    Work that the driver may do while a transfer is under way. It runs once, by whoever calls first.

    Args:
        function (`Callable`): What to run. It must need nothing of what travels.
        args: Its arguments.
    """

    def __init__(self, function: Callable[..., torch.Tensor], *args: Any):
        self.work: Callable[[], torch.Tensor] | None = functools.partial(function, *args)
        self.result: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self.work is not None:
            self.result, self.work = self.work(), None
        assert self.result is not None
        return self.result


def _experts(
    experts: Any, x_TH: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor, beside: Beside
) -> torch.Tensor:
    """`experts(x, idx, weights)`, with work to do meanwhile."""
    experts.automodel.beside = beside
    try:
        return experts(x_TH, idx_TK, weights_TK)
    finally:
        experts.automodel.beside = None


class SharedExperts:
    """Shared experts, added to what is routed."""

    @staticmethod
    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights_TK, idx_TK = block.gate(hidden_states)
        shared = Beside(block.shared_experts, hidden_states)
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        return _experts(block.experts, x_TH, idx_TK, weights_TK, shared).view(*hidden_states.shape) + shared()


class LatentExperts:
    """The same, where the routed experts work in a smaller space of their own."""

    @staticmethod
    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights_TK, idx_TK = block.gate(hidden_states)
        shared = Beside(block.shared_experts, hidden_states)
        latent_TL = block.fc1_latent_proj(hidden_states.view(-1, hidden_states.shape[-1]))
        routed_TL = _experts(block.experts, latent_TL, idx_TK, weights_TK, shared)
        return block.fc2_latent_proj(routed_TL).view(*hidden_states.shape) + shared()


class GatedSharedExpert:
    """One shared expert, scaled by a gate of its own."""

    @staticmethod
    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights_TK, idx_TK = block.gate(x_TH)
        shared = Beside(GatedSharedExpert._shared, block, x_TH)
        return (_experts(block.experts, x_TH, idx_TK, weights_TK, shared) + shared()).view(hidden_states.shape)

    @staticmethod
    def _shared(block: Any, x_TH: torch.Tensor) -> torch.Tensor:
        return F.sigmoid(block.shared_expert_gate(x_TH)) * block.shared_expert(x_TH)


class ScaledExperts:
    """Shared experts, added to what is routed and scaled."""

    @staticmethod
    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights_TK, idx_TK = block.gate(x_TH)
        shared = Beside(block.shared_experts, x_TH)
        routed_TH = _experts(block.experts, x_TH, idx_TK, weights_TK, shared) * block.routed_scaling_factor
        return (routed_TH + shared()).view(hidden_states.shape)


class SharedExpert:
    """One shared expert, added as it is."""

    @staticmethod
    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights_TK, idx_TK = block.gate(x_TH)
        shared = Beside(block.shared_expert, x_TH)
        return (_experts(block.experts, x_TH, idx_TK, weights_TK, shared) + shared()).view(hidden_states.shape)


# The class of a block -> the way it is written. A test compares each with its first.
SHARED: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "DeepseekV3MoE",
            "AXK2MoE",
            "BailingHybridMoE",
            "DeepseekOcr2TextMoe",
            "DeepseekV2Moe",
            "DeepseekV32MoE",
            "Dots1MoE",
            "Dots3NoteTextMoE",
            "ExaoneMoeSparseMoEBlock",
            "Glm4MoeMoE",
            "Glm4MoeLiteMoE",
            "Glm4vMoeTextMoE",
            "Glm5NextTextMoE",
            "GlmMoeDsaMoE",
            "HYV4MoE",
            "HYV4VLMoE",
            "KimiLinearMoE",
            "Kolibri1SparseMoeBlock",
            "Mistral4MoE",
            "MistralLarge4TextMoE",
            "SolarOpenMoE",
            "UnlimitedOcrTextMoe",
        ),
        SharedExperts,
    ),
    **dict.fromkeys(
        (
            "Qwen2MoeSparseMoeBlock",
            "Qwen3NextSparseMoeBlock",
            "Qwen3OmniMoeTalkerTextSparseMoeBlock",
            "Qwen3_5MoeSparseMoeBlock",
            "Qwen4ExpTextSparseMoeBlock",
        ),
        GatedSharedExpert,
    ),
    **dict.fromkeys(("LagunaSparseMoeBlock", "MiniMaxM3VLSparseMoeBlock"), ScaledExperts),
    **dict.fromkeys(("FlintSparseMoeBlock", "LaraMiniSparseMoeBlock"), SharedExpert),
    "NemotronHMoE": LatentExperts,
}


def install(model: nn.Module) -> None:
    """Rewrite, in place, the forwards of the blocks that `SHARED` names, unless someone has replaced them already."""
    for module in model.modules():
        way = SHARED.get(type(module).__name__.removeprefix("FSDP"))
        if way is not None and "forward" not in vars(module):
            # No closure: a copy of the model runs its own block.
            vars(module)["forward"] = functools.partial(way.forward, module)
