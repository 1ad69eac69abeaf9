"""Save a sharded model: every rank its own slices, beside transformers' gathering save, on the same ranks.

    torchrun --standalone --nproc-per-node 4 benchmarks/save.py --csv benchmarks/results/save.csv

A random model in float32, its experts (one key each, or fused in gpt_oss) spread over all ranks. `peak_mb` is each
rank's peak resident memory beyond what it held before the save; page cache isn't in it. Both saves end with the files
on disk (the gathering one is followed by a sync, which is timed). The first side runs again at the end: the file
system's state is not the same, and what the allocator kept of the gathering save then covers what the other one needs.
"""

import argparse
import csv
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GptOssConfig, Qwen3MoeConfig

from automodel_moe import MoEAutoModel

OURS = ("save_pretrained", "gather_sharded_state_dict_for_save", "barrier_after_gathered_checkpoint_save")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 6, "experts": 64, "hidden": 1024, "intermediate": 640, "vocab": 16384}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=["qwen3_moe", "gpt_oss"], default="qwen3_moe")
    parser.add_argument("--max-shard-size", default="500MB")
    parser.add_argument("--sides", nargs="+", default=["parallel", "gather", "parallel"])
    parser.add_argument("--folder", help="where to save; a temporary folder by default")
    parser.add_argument("--csv", help="append the rows to this file")
    return parser.parse_args()


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def measure(model, side, folder, max_shard_size):
    kept = {name: vars(model).pop(name) for name in OURS if side == "gather"}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    dist.barrier()
    before, start = status("VmRSS"), time.perf_counter()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if side == "gather" and dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    seconds, peak = time.perf_counter() - start, status("VmHWM") - before
    vars(model).update(kept)
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return seconds, peaks


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = {
        "num_hidden_layers": args.layers, "hidden_size": args.hidden, "vocab_size": args.vocab,
        "intermediate_size": args.intermediate, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    }  # fmt: skip
    if args.kind == "gpt_oss":
        config = GptOssConfig(**sizes, num_local_experts=args.experts)
    else:
        config = Qwen3MoeConfig(**sizes, num_experts=args.experts, moe_intermediate_size=args.intermediate)
    model = MoEAutoModel.from_config(config, moe_config={"ep_size": world}, dtype=torch.float32)
    rows = []
    for side in args.sides:
        folders = [tempfile.mkdtemp(dir=args.folder) if rank == 0 else None]
        dist.broadcast_object_list(folders, 0)
        folder = Path(folders[0])
        seconds, peaks = measure(model, side, folder, args.max_shard_size)
        if rank == 0:
            files = list(folder.glob("*.safetensors"))
            size = sum(path.stat().st_size for path in files) / 1e9
            row = {"side": side, "ranks": world, "model_gb": f"{size:.2f}", "files": len(files)}
            row |= {"max_shard_size": args.max_shard_size, "seconds": f"{seconds:.1f}"}
            row |= {"peak_mb": " ".join(f"{peak:.0f}" for peak in peaks), "cores": len(os.sched_getaffinity(0))}
            row["versions"] = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
            row["command"] = f"benchmarks/save.py --kind {args.kind} --layers {args.layers} --experts {args.experts}"
            print(row, flush=True)
            rows.append(row)
            shutil.rmtree(folder)
        dist.barrier()
    if rank == 0 and args.csv:
        new = not Path(args.csv).exists()
        with open(args.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if new:
                writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
