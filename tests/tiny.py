"""Tiny models: one for every experts class that the installed transformers decorates.

    tiny.names()                    every kind, e.g. "qwen3_moe", "gpt_oss", "qwen3_omni_moe_talker"
    tiny.config("qwen3_moe")        its smallest configuration, of the real config class
    tiny.save("qwen3_moe", folder)  a seeded random checkpoint in the Hub's own keys
    tiny.batch("qwen3_moe")         token ids, mask and labels that its forward takes

A kind is found by scanning transformers' modeling files, so a new release brings its new kinds by itself: the fields
that most configurations share are shrunk by `_SMALL`, and what one kind needs beyond that is its row in `_KINDS`.
Every kind has two layers or a few more (at least one with experts), 8 experts where its rules allow, top-k 2.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 96

# Heads, experts, widths and the vocabulary divide by 4, so that every layout of 2 and 4 ranks can cut them; the
# vocabulary alone must not fit the special tokens of a real one, hence the token ids at the end.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "moe_hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # More than the sequences that the tests feed: then sparse attention selects everything and has no near ties.
    "index_topk": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "sliding_window_size": 8,
    # The default 0.02 would leave a 32-wide model with activations near zero, and gradients with it.
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # The vision and audio towers of a multimodal kind: never run by a batch of text.
    "depth": 1,
    "num_heads": 2,
    "image_size": 32,
    "out_hidden_size": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": 32,
    "downsample_hidden_size": 8,
    "deepstack_visual_indexes": [0],
}


@dataclass(frozen=True)
class _Kind:
    """What one kind needs beyond `_SMALL`.

    `model` is the class that loads it, where it isn't the module's first ...ForCausalLM or
    ...ForConditionalGeneration. `fields` are the (text) configuration's; those of a sub-configuration are a dict
    under its name.
    """

    model: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_DENSE_AND_SPARSE = ["dense", "sparse"]
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}

# Towers that are never run need only be small.
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 32,
}
_SAM = {"output_channels": 8, "downsample_channels": [16, 32], "mlp_dim": 32, "global_attn_indexes": [0]}

_KINDS: dict[str, _Kind] = {
    "afmoe": _Kind(fields={"global_attn_every_n_layers": 2}),
    "aria": _Kind("AriaTextForCausalLM"),
    "bailing_hybrid": _Kind(fields={"layer_types": _LINEAR_AND_FULL}),
    "beam": _Kind(fields={"layer_types": _SLIDING_AND_FULL, "mlp_layer_types": _DENSE_AND_SPARSE}),
    "cohere2_moe": _Kind(fields={"sliding_window_pattern": 2, "logit_scale": 1.0}),
    "deepseek_v4": _Kind(
        fields={
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 1,
            "o_groups": 2,
            "o_lora_rank": 16,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["hash_moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        }
    ),
    "deepseek_ocr2": _Kind(
        fields={
            "text_config": {"mlp_layer_types": _DENSE_AND_SPARSE},
            "vision_config": {"sam_config": _SAM, "encoder_config": {"num_key_value_heads": 4}},
        }
    ),
    "diffusion_gemma": _Kind(
        "DiffusionGemmaForBlockDiffusion",
        {
            "canvas_length": 12,
            "text_config": {"layer_types": _SLIDING_AND_FULL, "global_head_dim": 8},
            "vision_config": {"model_type": "gemma4_vision", **_TOWER},
        },
    ),
    "ernie4_5_vl_moe": _Kind(
        fields={
            "text_config": {
                "moe_intermediate_size": [24, 24],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            }
        }
    ),
    "exaone_moe": _Kind(fields={"layer_types": _SLIDING_AND_FULL}),
    "flint": _Kind(fields={"mlp_only_layers": [0]}),
    "gemma4": _Kind(
        fields={
            "enable_moe_block": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 8,
            "layer_types": _SLIDING_AND_FULL,
        }
    ),
    "glm4v_moe": _Kind(
        fields={
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 1.0,
                    "mrope_section": [2, 1, 1],
                }
            }
        }
    ),
    "glm5_next": _Kind(
        fields={
            "text_config": {
                "qk_rope_head_dim": 0,
                "head_dim": 0,
                "layer_types": ["linear_attention", "indexed_attention"],
                "mlp_layer_types": _DENSE_AND_SPARSE,
            }
        }
    ),
    "granitemoehybrid": _Kind(fields=_MAMBA2 | {"layer_types": _LINEAR_AND_FULL}),
    "hy_v4_vl": _Kind(
        fields={
            "text_config": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            }
        }
    ),
    "inkling": _Kind(
        fields={
            "layer_types": ["hybrid_sliding", "hybrid"],
            "logits_mup_width_multiplier": 1.0,
            # With the default 8 the gradient of the experts' scale is a difference of near equals.
            "route_scale": 1.0,
        }
    ),
    "inkling2": _Kind(
        fields={
            "layer_types": ["hybrid_sliding", "hybrid"],
            "unpadded_vocab_size": VOCAB,
            "n_layers_per_attn_res_block": 1,
        }
    ),
    "inkling2_loop": _Kind(
        fields={
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "unpadded_vocab_size": VOCAB,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        }
    ),
    "jamba": _Kind(
        fields={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
        }
    ),
    "kimi_linear": _Kind(fields={"layer_types": _LINEAR_AND_FULL}),
    "kolibri1": _Kind(fields={"layer_types": _SLIDING_AND_FULL}),
    # With wider weights the decay of its linear attention saturates, and float32 keeps five digits of its gradient.
    "lara_mini": _Kind(fields={"initializer_range": 0.1}),
    "lfm2_moe": _Kind(fields={"layer_types": ["conv", "full_attention"]}),
    "mistral_large4": _Kind(fields={"vision_config": {"model_type": "pixtral", "patch_size": 16, **_TOWER}}),
    "muse_spark": _Kind(
        fields={
            "projector_hidden_size": 32,
            "text_config": {"layer_types": _SLIDING_AND_FULL},
            "audio_config": {"num_hidden_layers": 1, "patch_sizes": [2], "hidden_sizes": [32], "depths": [1]},
        }
    ),
    "nemotron_h": _Kind(
        fields={
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "num_hidden_layers": None,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        }
    ),
    "openai_privacy_filter": _Kind("OpenAIPrivacyFilterForTokenClassification"),
    "qwen3_5_moe": _Kind(fields={"layer_types": _LINEAR_AND_FULL}),
    "qwen3_next": _Kind(fields={"layer_types": _LINEAR_AND_FULL}),
    "qwen3_omni_moe_talker": _Kind(
        "Qwen3OmniMoeTalkerForConditionalGeneration",
        # The first three are read by the model's code, though they are no fields of its configurations.
        {
            "text_config": {"shared_expert_intermediate_size": 24},
            "vocab_size": VOCAB,
            "spatial_merge_size": 2,
            "thinker_hidden_size": 32,
            "num_code_groups": 2,
        },
    ),
    "qwen3_omni_moe_thinker": _Kind(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        # Read by the model's code, though it is no field of its configuration.
        {"vision_start_token_id": 151652},
    ),
    "qwen4_exp": _Kind(
        fields={
            "layer_types": ["linear_attention", "indexed_attention"],
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
        },
    ),
    "unlimited_ocr": _Kind(fields={"vision_config": {"sam_config": _SAM}}),
    "zaya": _Kind(fields={"num_experts_per_tok": 1, "router_hidden_size": 16}),
}


@dataclass(frozen=True)
class _Found:
    experts: str
    module: str


@functools.cache
def _found() -> dict[str, _Found]:
    found = {}
    decorated = re.compile(r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)", re.MULTILINE)
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        classes = decorated.findall(path.read_text(encoding="utf-8"))
        for name in classes:
            kind = path.parent.name
            if len(classes) > 1:
                # Qwen3OmniMoeTalkerTextExperts of qwen3_omni_moe: the part of the name that tells them apart.
                kind += "_" + name.removeprefix("Qwen3OmniMoe").removesuffix("TextExperts").lower()
            found[kind] = _Found(name, f"transformers.models.{path.parent.name}.{path.stem}")
    return found


def names() -> list[str]:
    """Every kind, sorted: the folder of its modeling file, which for nearly all is the model type."""
    return sorted(_found())


def experts_class(name: str) -> str:
    """The name of the decorated experts class of a kind."""
    return _found()[name].experts


def model_class(name: str) -> type[transformers.PreTrainedModel]:
    """The transformers class that a tiny checkpoint of this kind holds."""
    module = importlib.import_module(_found()[name].module)
    wanted = _KINDS.get(name, _Kind()).model
    if wanted is None:
        heads = [
            x for suffix in ("ForCausalLM", "ForConditionalGeneration") for x in module.__all__ if x.endswith(suffix)
        ]
        wanted = heads[0]
    return getattr(module, wanted)


def _shrunk(config_class: type, own: dict[str, Any]) -> transformers.PreTrainedConfig:
    known = {f.name for f in fields(config_class)}
    values = {key: value for key, value in _SMALL.items() if key in known}
    if known >= {"kv_lora_rank", "num_key_value_heads"}:
        # Latent attention expands its keys to every head; some configurations check it, some forwards assume it.
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= own
    for key, sub_class in config_class.sub_configs.items():
        if sub_class is not transformers.AutoConfig:
            values[key] = _shrunk(sub_class, own.get(key, {}))
    return config_class(**values)


def config(name: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """The smallest configuration of a kind.

    Args:
        name (`str`): One of `names()`.
        overrides: Fields of the (text) configuration to set otherwise, e.g. `num_experts_per_tok=1`.
    """
    own = _KINDS.get(name, _Kind()).fields
    config_class = model_class(name).config_class
    if "text_config" in config_class.sub_configs:
        own = own | {"text_config": own.get("text_config", {}) | overrides}
    else:
        own = own | overrides
    return _shrunk(config_class, own)


def save(name: str, folder: str | Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> None:
    """Write a random checkpoint of a kind into `folder`, as `save_pretrained` of one process writes it.

    Weights come from the model's own initialisation, and then what it leaves constant (biases, norms, the router's
    score correction) is drawn too, since a zero or a one can't tell whether it was applied; router weights are
    doubled, so that no token has two experts on a near tie at the edge of its top-k.
    """
    build(name, dtype, seed, **overrides).save_pretrained(folder)


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """The model that `save` writes."""
    torch.manual_seed(seed)
    model = model_class(name)(config(name, **overrides)).to(dtype)
    n_experts = {m.num_experts for m in model.modules() if type(m).__name__ == experts_class(name)}
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                # A table of experts by token id: zeros would send every slot to the first.
                if key.endswith("tid2eid"):
                    tensor.copy_(torch.rand(tensor.size(0), *n_experts).topk(tensor.size(1)).indices)
                continue
            if tensor.min() == tensor.max():
                # Streams of a hyper-connection that start alike and stay nearly so would leave its gradients a
                # difference of near equals, of which float32 keeps three digits.
                tensor.add_(torch.randn_like(tensor), alpha=1.0 if re.search(r"hc\w*\.\w*base", key) else 0.1)
            elif tensor.dim() == 2 and tensor.size(0) in n_experts and re.search("gate|router", key):
                tensor.mul_(2)
    return model


def batch(name: str, rows: int = 4, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels`, each `int64 [rows, length]`, without padding.

    Every row has equally many labels, so that the mean over ranks of their mean losses is the mean over the batch.
    Two kinds take something else beside: `decoder_input_ids` (the canvas of a block diffusion model), or
    `inputs_embeds` in place of ids (`float32 [rows, length, hidden]`).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int = 16, high: int = VOCAB) -> torch.Tensor:
        # From 16: the first ids of some vocabularies are special (padding, image placeholders).
        return torch.randint(low, high, (rows, length), generator=generator)

    ids = draw()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    made = _KINDS.get(name, _Kind()).model or ""
    if made.endswith("ForTokenClassification"):
        inputs["labels"] = draw(0, config(name).num_labels)
    elif made.endswith("ForBlockDiffusion"):
        inputs["decoder_input_ids"] = draw()
    elif name == "qwen3_omni_moe_talker":
        inputs["inputs_embeds"] = torch.randn(rows, length, _SMALL["hidden_size"], generator=generator)
        del inputs["input_ids"]
    return inputs


def loss(model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or, of a model that has none, the cross-entropy of its logits against the labels."""
    if inspect.signature(model.forward).parameters.keys() >= {"labels"}:
        return model(**inputs).loss
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def tokens(model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor], new: int = 8) -> torch.Tensor:
    """`new` greedy tokens a row, `int64 [rows, new]`; of a model that doesn't write left to right, its best labels."""
    inputs = {key: value for key, value in inputs.items() if key != "labels"}
    if inputs.keys() == {"input_ids", "attention_mask"} and model.can_generate():
        written = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return written[:, inputs["input_ids"].size(1) :]
    with torch.no_grad():
        return model(**inputs).logits.argmax(-1)
