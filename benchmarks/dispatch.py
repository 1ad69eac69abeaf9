"""What a transport sends, how long it takes, and how much of it hides behind a GEMM.

    torchrun --nproc-per-node 8 benchmarks/dispatch.py                        Qwen3-30B-A3B's shape, on GPUs or gloo
    torchrun --nproc-per-node 2 benchmarks/dispatch.py --dispatcher all_to_all --dtype fp8 --csv FILE

Each rank brings random tokens and a random router's own top-k. Bytes are counted where they leave: what is handed to
torch.distributed for other ranks, or, for a transport that sends by itself, the rows that arrive from them. A step is
what one MoE layer needs in forward and backward: dispatch, combine, and the mirror of each.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_moe import dispatch

TRANSFERS = ("dispatch", "combine", "combine's mirror", "dispatch's mirror")


def remote_rows(n_experts: int, top_k: int, n_ranks: int) -> float:
    """Other ranks that a token goes to, on average, if each set of `top_k` experts is equally likely."""
    elsewhere = n_experts - n_experts // n_ranks
    return (n_ranks - 1) * (1 - math.comb(elsewhere, top_k) / math.comb(n_experts, top_k))


@dataclass
class Traffic:
    """What left this rank for others while it was counted: bytes, by the call that sent them, in order."""

    calls: list[int] = field(default_factory=list)

    @contextmanager
    def counted(self):
        original = dist.all_to_all_single

        def all_to_all_single(output, rows, output_split_sizes=None, input_split_sizes=None, group=None, **options):
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            sizes = input_split_sizes or [rows.size(0) // size] * size
            self.calls.append((sum(sizes) - sizes[rank]) * rows[:1].numel() * rows.element_size())
            return original(output, rows, output_split_sizes, input_split_sizes, group, **options)

        dist.all_to_all_single = all_to_all_single
        try:
            yield self
        finally:
            dist.all_to_all_single = original


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, a random router's choice of experts for each, and its weights."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x_TH = torch.randn(self.tokens, self.hidden, generator=generator, device=self.device).to(self.dtype)
        scores_TE = torch.rand(self.tokens, self.experts, generator=generator, device=self.device)
        weights_TK, idx_TK = scores_TE.topk(self.top_k)
        return x_TH, idx_TK, weights_TK


def step(transport: dispatch.Transport, x_TH, idx_TK, weights_TK, between: Callable[[str], None] = lambda name: None):
    """One layer's four transfers; `between` is called between the start and the finish of each. The received rows."""
    plan = transport.plan(idx_TK, x_TH, differentiable=True)
    sent = transport.dispatch_start(plan, x_TH, weights_TK)
    between("dispatch")
    x_RH, weights_RK = transport.dispatch_finish(sent)
    sent = transport.combine_start(plan, x_RH)
    between("combine")
    y_TH, _ = transport.combine_finish(sent)
    sent = transport.dispatch_start(plan, y_TH)
    between("combine's mirror")
    dy_RH, _ = transport.dispatch_finish(sent)
    sent = transport.combine_start(plan, dy_RH, weights_RK)
    between("dispatch's mirror")
    transport.combine_finish(sent)
    return x_RH


def count(shape: Shape, dispatcher: str = "all_to_all", dtype: str = "auto", seed: int = 0) -> dict[str, float]:
    """Rows and bytes that one rank sends to others, a token, averaged over the ranks. A collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x_TH, idx_TK, weights_TK = shape.batch(seed + rank)
    transport = dispatch.choose(dispatcher, dist.group.WORLD, shape.experts // world, x_TH=x_TH, dtype=dtype)
    traffic = Traffic()
    marks = {}
    with traffic.counted():
        x_RH = step(transport, x_TH, idx_TK, weights_TK, lambda name: marks.update({name: len(traffic.calls)}))
    own = int((idx_TK // transport.num_local_experts == rank).any(1).sum())
    counts = {"remote rows": float(x_RH.size(0) - own)}
    first = 0
    for name in TRANSFERS:
        counts[f"bytes, {name}"] = float(sum(traffic.calls[first : marks[name]]))
        first = marks[name]
    if not traffic.calls or type(transport).__name__.startswith("DeepEP"):
        # It sends by itself: what arrives from others is what they have sent. Ids and weights are left out.
        row_bytes = shape.hidden * torch.bfloat16.itemsize
        counts |= {f"bytes, {name}": counts["remote rows"] * row_bytes for name in TRANSFERS}
    total = torch.tensor(list(counts.values()), dtype=torch.float64, device=shape.device)
    dist.all_reduce(total)
    tokens = world * shape.tokens
    return {name: value / tokens for name, value in zip(counts, total.tolist(), strict=True)}


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median of `repeats` timings of `run`, of the slowest rank each, after three that are left out."""
    times = []
    for attempt in range(repeats + 3):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if attempt >= 3:
            times.append(slowest.item())
    return statistics.median(times)


def measure(shape: Shape, dispatcher: str, dtype: str, repeats: int) -> dict[str, float]:
    """Counts, and times in milliseconds. A collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    result = count(shape, dispatcher, dtype)
    batch = shape.batch(rank)
    transport = dispatch.choose(dispatcher, dist.group.WORLD, shape.experts // world, x_TH=batch[0], dtype=dtype)
    alone = seconds(lambda: step(transport, *batch), shape.device, repeats)
    # What the link gives to a plain, even all-to-all of as many bytes, of which one part in `world` stays here.
    sent = shape.tokens * sum(value for name, value in result.items() if name.startswith("bytes")) / len(TRANSFERS)
    plain = torch.randn(world, max(int(sent / max(world - 1, 1)) // 4, 1), device=shape.device)
    into = torch.empty_like(plain)
    link = seconds(lambda: dist.all_to_all_single(into, plain), shape.device, repeats)
    result |= {
        "ms, step": 1e3 * alone,
        "GB/s a rank": len(TRANSFERS) * sent / alone / 1e9,
        "GB/s a rank, plain all-to-all": sent / link / 1e9,
    }
    if shape.device == "cpu":
        return result  # transport and GEMM would only fight for the cores
    # A GEMM of about a transfer's length between each start and finish.
    side = torch.randn(shape.hidden, shape.hidden, dtype=shape.dtype, device=shape.device)
    rows = torch.randn(shape.tokens, shape.hidden, dtype=shape.dtype, device=shape.device)
    once = seconds(lambda: rows @ side, shape.device, repeats)
    n_gemms = max(round(alone / len(TRANSFERS) / once), 1)

    def gemms(name: str = "") -> None:
        for _ in range(n_gemms):
            torch.mm(rows, side)

    compute = seconds(lambda: [gemms() for _ in TRANSFERS], shape.device, repeats)
    both = seconds(lambda: step(transport, *batch, gemms), shape.device, repeats)
    return result | {"overlap": (alone + compute - both) / min(alone, compute)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="a rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dispatcher", choices=["auto", *dispatch.TRANSPORTS], default="auto")
    parser.add_argument("--dtype", choices=list(dispatch.PAYLOADS), default="auto", help="dispatch_dtype")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    shape = Shape(arguments.tokens, arguments.hidden, arguments.experts, arguments.top_k, device=device)
    result = measure(shape, arguments.dispatcher, arguments.dtype, arguments.repeats)
    result["remote rows, expected"] = remote_rows(shape.experts, shape.top_k, world)
    if dist.get_rank() == 0:
        for name, value in result.items():
            print(f"{name:32s} {value:12.3f}")
        if arguments.csv:
            write(arguments.csv, result, world, device)
    dist.barrier()
    dist.destroy_process_group()


def write(path: Path, result: dict[str, float], world: int, device: str) -> None:
    row = {name: round(value, 4) for name, value in result.items()} | {
        "ranks": world,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": f"torch {torch.__version__}",
        "command": f"torchrun --nproc-per-node {world} {' '.join(sys.argv)}",
        "date": date.today().isoformat(),
    }
    with path.open("a", newline="") as file:
        rows = csv.DictWriter(file, row)
        if file.tell() == 0:
            rows.writeheader()
        rows.writerow(row)


if __name__ == "__main__":
    main()
