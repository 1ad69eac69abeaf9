"""The models that are served: trained a few steps under expert parallelism, and saved."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from automodel_moe import MoEAutoModel

VOCAB, EXPERTS = 128, 4

# Heads of 64: the smallest that vLLM's CPU attention takes.
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS = {
    # One tensor an expert and projection.
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": EXPERTS, "moe_intermediate_size": 32}),
    # All experts in one tensor, transposed, gate and up interleaved, with biases.
    "gpt_oss": ("GptOssConfig", {"num_local_experts": EXPERTS, "sliding_window": 64}),
    # Sigmoid routing with a correction bias, a shared expert, a dense first layer.
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def make(kind: str, folder: Path) -> None:
    """A seeded random float32 checkpoint of `kind`; what a fresh model has at zero (biases, sinks) is random too."""
    name, fields = CONFIGS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**_COMMON, **fields))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name or "sinks" in name:
                tensor.normal_(0, 0.1)
    model.save_pretrained(folder)


def train(source: str, output: str, steps: int = 4) -> list[float]:
    """On every rank: load with 2 ranks a copy of the experts, train on the rank's own tokens, save. The losses."""
    model = MoEAutoModel.from_pretrained(source, moe_config={"ep_size": 2}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    tokens = torch.randint(VOCAB, (4, 32), generator=generator)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(output)
    return losses
