"""Load, train and save on a GPU, in one process or under torchrun; prints one line `RESULT {json}` on rank 0.

python -m tests.gpu.core_run --shape qwen3-30b-a3b-4l --folder DIR
torchrun --nproc-per-node 2 -m tests.gpu.core_run --shape demo --folder DIR
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

if torch.cuda.device_count() == 1:
    os.environ["LOCAL_RANK"] = "0"  # several ranks may share the one GPU; transformers binds by local rank

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from automodel_moe import MoEAutoModel

SHAPES = {
    "demo": Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b-4l": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40960, tie_word_embeddings=False,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="holds the checkpoint; one process writes it")
    parser.add_argument("--experts", default="auto")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    config = SHAPES[arguments.shape]
    source = arguments.folder / "source"
    result: dict = {"shape": arguments.shape, "world": world}

    if world == 1 and not source.exists():
        with torch.device("cuda"):
            made = MoEAutoModel.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(source)
        del made
        torch.cuda.empty_cache()

    # Rows of every rank, so that each sees its own and one process sees the same batch.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (4, 512), generator=generator)
    own = ids.chunk(world)[rank].cuda()

    if world == 1:
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, device_map={"": 0})
        with torch.no_grad():
            result["loss_fp32_transformers"] = reference(own, labels=own).loss.item()
        del reference
        torch.cuda.empty_cache()

    torch.cuda.reset_peak_memory_stats()
    moe_config = {"precision": "bf16", "experts": arguments.experts} | ({"ep_size": world} if world > 1 else {})
    model = MoEAutoModel.from_pretrained(
        source, moe_config=moe_config, device_map={"": int(os.environ.get("LOCAL_RANK", "0"))}
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []
    for _ in range(arguments.steps):
        loss = model(own, labels=own).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(loss := loss.detach().clone())
            loss /= world
        losses.append(loss.item())
    result |= {
        "losses": losses,
        "grad_norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        "local_experts": model.model.layers[0].mlp.experts.num_experts,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "greedy": model.generate(ids[:1, :16].cuda(), max_new_tokens=8, do_sample=False)[0, 16:].tolist(),
    }
    model.save_pretrained(arguments.folder / f"trained-{world}")
    if rank == 0:
        saved = AutoModelForCausalLM.from_pretrained(arguments.folder / f"trained-{world}", device_map={"": 0})
        again = saved.generate(ids[:1, :16].cuda(), max_new_tokens=8, do_sample=False)[0, 16:].tolist()
        result |= {"dtype": str(saved.dtype), "reloaded_greedy": again}
        print("RESULT", json.dumps(result), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
