"""Where a step's bytes go with experts spread (EP) and with experts gathered (EP 1, FSDP2), by arithmetic alone.

    python -m benchmarks.dispatch_model          prints the tables of docs/dispatch.md

The rows a token sends are `benchmarks/dispatch.py`'s `remote_rows`, which `tests/dispatch/test_traffic.py` holds
against counts. The rates are assumptions, named here; put your own machine's in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.dispatch import remote_rows


@dataclass(frozen=True)
class Model:
    """A MoE layer. The defaults are Qwen3-30B-A3B's."""

    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    top_k: int = 8
    # Forward and backward, a token and layer at 4,096 tokens a sequence: 6 FLOP a weight used (attention 18.9 M,
    # experts 37.7 M, router 0.3 M), and attention's own products.
    gflop: float = 0.442

    @property
    def expert_bytes(self) -> int:
        """All experts of a layer in bfloat16."""
        return 3 * self.experts * self.intermediate * self.hidden * 2


@dataclass(frozen=True)
class Machine:
    """Assumed rates: nodes of 8 GPUs, each with 450 GB/s of NVLink and 50 GB/s of network a way, at 78 % of these."""

    tflops: float = 400.0
    nvlink: float = 350.0
    network: float = 39.0
    node: int = 8


def row_bytes(model: Model) -> float:
    """What one remote row costs in the four transfers of a layer's step, ids and weights included."""
    return 4 * 2 * model.hidden + 8 * model.top_k + 4 * model.top_k


def expert_parallel(model: Model, machine: Machine, size: int) -> tuple[float, float]:
    """Microseconds a token and layer that its rows take over NVLink and over the network, with EP over `size` GPUs
    that fill whole nodes, or part of one. Both go on at once."""
    rows = remote_rows(model.experts, model.top_k, size)
    inside = (min(size, machine.node) - 1) / (size - 1)
    return tuple(
        1e6 * rows * share * row_bytes(model) / (rate * 1e9)
        for share, rate in ((inside, machine.nvlink), (1 - inside, machine.network))
    )


def gather(model: Model, machine: Machine, gpus: int, ep_size: int) -> float:
    """Milliseconds a layer to gather a rank's experts in forward, again in backward, and to reduce their gradients,
    where `ep_size` ranks of a node share one copy of them; 1 is FSDP2 alone."""
    copies = gpus // ep_size  # ranks that hold parts of the same experts
    if copies == 1:
        return 0.0
    held = model.expert_bytes / ep_size
    nodes = max(gpus // machine.node, 1)
    # A ring enters each node once, through all of its network cards: one for each GPU, whose rings run beside.
    over_network = 3 * held * (nodes - 1) / nodes * min(ep_size, machine.node) / machine.node / (machine.network * 1e9)
    over_nvlink = 3 * held * (copies - 1) / copies / (machine.nvlink * 1e9) if ep_size < machine.node else 0.0
    return 1e3 * max(over_network, over_nvlink)


def exposed(model: Model, machine: Machine, gpus: int, ep_size: int, tokens: int) -> float:
    """Milliseconds a layer that neither a GEMM nor another transfer hides, for `tokens` a GPU: rows are waited for,
    gathers are prefetched behind the layer's compute."""
    compute = tokens * model.gflop / machine.tflops
    rows = tokens * max(expert_parallel(model, machine, ep_size)) / 1e3 if ep_size > 1 else 0.0
    return rows + max(gather(model, machine, gpus, ep_size) - compute - rows, 0.0)


def break_even(model: Model, machine: Machine, gpus: int, ep_size: int) -> int:
    """Tokens a GPU from which on EP 1 exposes less than EP over `ep_size`; where the one falls and the other rises."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high) // 2
        gathered, spread = (exposed(model, machine, gpus, size, middle) for size in (1, ep_size))
        low, high = (low, middle) if gathered <= spread else (middle + 1, high)
    return low


def tables() -> str:
    model, machine = Model(), Machine()
    lines = ["| EP | remote rows a token | KB a token and layer | us a token and layer |", "|--:|--:|--:|--:|"]
    for size in (2, 4, 8, 16, 32, 64, 128):
        rows = remote_rows(model.experts, model.top_k, size)
        time = max(expert_parallel(model, machine, size))
        lines.append(f"| {size} | {rows:.2f} | {rows * row_bytes(model) / 1e3:.1f} | {time:.2f} |")
    lines += [
        "",
        "| GPUs | layout | gather, ms a layer | exposed at 4k tokens a GPU | at 16k | at 64k | EP 1 is faster from |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for gpus in (8, 64, 128):
        sizes = dict.fromkeys((1, 8, gpus))
        for size in sizes:
            cells = [f"{exposed(model, machine, gpus, size, tokens << 10):.2f}" for tokens in (4, 16, 64)]
            layout = "EP 1" if size == 1 else f"EP {size}" + (f" x {gpus // size} copies" if size < gpus else "")
            least = math.ceil(break_even(model, machine, gpus, size) / 100) * 100
            start = "" if size == 1 else f"{least:,} tokens" if least else "any"
            lines.append(
                f"| {gpus} | {layout} | {gather(model, machine, gpus, size):.2f} | {' | '.join(cells)} | {start} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
