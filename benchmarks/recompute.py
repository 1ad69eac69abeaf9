"""What a recompute level costs and saves: a training step of a Qwen3-30B-A3B cut to a few layers.

    python -m benchmarks.recompute --csv benchmarks/results/recompute.csv
    torchrun --nproc_per_node 2 -m benchmarks.recompute --levels none experts layer --scale 8

Random weights and tokens, bfloat16, fused AdamW, the router's own choices. Levels take turns, medians over all turns.
Without expert parallelism nothing is sent, so "experts" and "layer" are one level then: what tells them apart under it
is one dispatch a layer against the rows kept. The peak is known on a GPU alone.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import sys
import time
from importlib.metadata import version

import torch
from transformers import Qwen3MoeConfig

from automodel_moe import MoEAutoModel

COLUMNS = ("level", "ranks", "layers", "rows", "length", "step_ms", "peak_gib", "gpu", "versions", "command")


def config(layers: int, scale: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=151936 // scale,
        hidden_size=2048 // scale,
        moe_intermediate_size=768 // scale,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128 // scale,
        num_experts=128 // scale,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def measure(level: str, args: argparse.Namespace, device: torch.device) -> tuple[list[float], float]:
    """Milliseconds of each step, and the peak in GiB."""
    torch.manual_seed(0)
    moe_config = {"recompute": level, "experts": args.experts}
    with torch.device(device):
        model = MoEAutoModel.from_config(config(args.layers, args.scale), moe_config=moe_config, dtype=torch.bfloat16)
        ids = torch.randint(0, 151936 // args.scale, (args.rows, args.length))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    cuda = device.type == "cuda"
    times = []
    for step in range(args.warm_up + args.steps):
        if cuda:
            torch.cuda.synchronize()
        since = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        if step >= args.warm_up:
            times.append(1000 * (time.perf_counter() - since))
        elif cuda and step == args.warm_up - 1:
            torch.cuda.reset_peak_memory_stats()
    return times, torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", default=["none", "activation", "layer"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--scale", type=int, default=1, help="divide the widths by this, to try the script on a CPU")
    parser.add_argument("--experts", default="auto")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    turns: dict[str, list[float]] = {level: [] for level in args.levels}
    peaks = {}
    for level in [*args.levels, *reversed(args.levels)]:
        times, peaks[level] = measure(level, args, device)
        turns[level] += times
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if int(os.environ.get("RANK", "0")) > 0:
        return
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    versions = " ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    first = statistics.median(turns[args.levels[0]])
    rows = []
    for level, times in turns.items():
        ms = statistics.median(times)
        print(f"{level:10s} {ms:8.1f} ms  {ms / first:5.3f} x  {peaks[level]:6.2f} GiB")
        sizes = (ranks, args.layers, args.rows, args.length)
        rows.append([level, *sizes, f"{ms:.1f}", f"{peaks[level]:.2f}", name, versions])
    if args.csv:
        with open(args.csv, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(COLUMNS)
            writer.writerows([*row, " ".join(["benchmarks/recompute.py", *sys.argv[1:]])] for row in rows)


if __name__ == "__main__":
    main()
