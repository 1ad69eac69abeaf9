"""Fine-tuning with frozen experts: the attention of all 48 layers of Qwen3-30B-A3B on one GPU, beside transformers.

    python benchmarks/frozen.py --train attention --csv benchmarks/results/frozen.csv
    python benchmarks/frozen.py --train lora --contenders ours

Random weights and tokens in bfloat16, drawn on the GPU; forward, backward and fused AdamW over what is trained.
"""

import argparse
import csv
import gc
import os
import statistics
import sys
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Large freed blocks of one layer must serve the next: the weights leave little room for holes.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from automodel_moe import MoEAutoModel

PACKAGES = ("torch", "transformers", "triton", "quack-kernels", "nvidia-cutlass-dsl", "peft")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=["ours", "transformers"])
    parser.add_argument("--train", choices=["attention", "lora"], default="attention")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--csv", help="append the rows to this file")
    return parser.parse_args()


def build(contender, args):
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        if contender == "ours":
            model = MoEAutoModel.from_config(config, dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
            )
    if args.train == "lora":
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names)).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".self_attn." in name)
    return model.train()


def measure(contender, args):
    start = time.perf_counter()
    model = build(contender, args)
    torch.cuda.synchronize()
    built = time.perf_counter() - start
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (args.warmup + args.steps, args.batch, args.seq)
    batches = torch.randint(151936, shape, device="cuda", generator=generator)
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for ids in batches:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        losses.append(float(loss.detach()))
    step_ms = statistics.median(times[args.warmup :])
    return {
        "contender": contender,
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "build_s": round(built, 1),
        "step_ms": round(step_ms, 1),
        "tokens_per_s": round(args.batch * args.seq / step_ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


def versions_of(packages):
    for name in packages:
        try:
            yield f"{name} {version(name)}"  # of the one that an import finds, where there are several
        except PackageNotFoundError:
            continue


def main():
    args = parse()
    versions = " ".join(versions_of(PACKAGES))
    rows = []
    for contender in args.contenders:
        try:
            result = measure(contender, args)
        except torch.OutOfMemoryError as error:
            print(f"{contender}: {error}", flush=True)
        else:
            print(" ".join(f"{key}={value}" for key, value in result.items()), flush=True)
            head = {
                "date": date.today().isoformat(),
                "gpu": torch.cuda.get_device_name(),
                "versions": versions,
                "command": "python " + " ".join(sys.argv),
            }
            rows.append(head | {key: vars(args)[key] for key in ("train", "layers", "batch", "seq")} | result)
        gc.collect()
        torch.cuda.empty_cache()
    if args.csv and rows:
        with open(args.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
