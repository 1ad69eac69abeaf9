"""Tiny checkpoints: those of `tests.tiny`, and models that it doesn't cover since their experts aren't decorated."""

from __future__ import annotations

import torch
from transformers import (
    Glm4MoeForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    SarvamMoEConfig,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)

from tests import tiny

NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


def olmo_hybrid() -> PreTrainedConfig:
    return OlmoHybridConfig(**SMALL, **NO_IDS, num_hidden_layers=4, linear_key_head_dim=8, linear_value_head_dim=16)


def sarvam_moe() -> PreTrainedConfig:
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24}
    return SarvamMoEConfig(**SMALL, **NO_IDS, **sizes, n_routed_experts=8, num_experts_per_tok=2)


def step3p7() -> PreTrainedConfig:
    text = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24}
    text |= {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 8, "num_experts_per_tok": 2}
    text |= {"share_expert_dim": 24, "pad_token_id": 0}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    return Step3p7Config(text_config=text, vision_config=vision)


OWN = {
    "olmo_hybrid": (OlmoHybridForCausalLM, olmo_hybrid),
    "sarvam_moe": (Glm4MoeForCausalLM, sarvam_moe),
    "step3p7": (Step3p7ForConditionalGeneration, step3p7),
}


def model_class(kind: str) -> type[PreTrainedModel]:
    return OWN[kind][0] if kind in OWN else tiny.model_class(kind)


def write(kind: str, folder, dtype: torch.dtype = torch.float32, **overrides) -> None:
    """A random checkpoint in the Hub's keys."""
    if kind not in OWN:
        tiny.save(kind, folder, dtype, **overrides)
        return
    torch.manual_seed(0)
    cls, config = OWN[kind]
    model = cls(config())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder)
