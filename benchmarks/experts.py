"""One MoE layer's experts, forward and backward: our backends beside transformers' grouped_mm, in one process.

    python benchmarks/experts.py --tokens 16384 --csv benchmarks/results/experts.csv

Random weights and rows; the routing is the model's own kind, the top-k of a random router's logits, so experts have
unequal numbers of rows. Every side runs in the order given and then in the reverse, medians of CUDA-event times.
"""

import argparse
import csv
import statistics
import sys
from functools import partial
from importlib.metadata import distributions, version
from types import SimpleNamespace

import torch
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from automodel_moe.experts import choose

PACKAGES = ("torch", "transformers", "triton", "quack-kernels", "nvidia-cutlass-dsl")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 16384, "experts": 128, "hidden": 2048, "intermediate": 768, "top-k": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sides", nargs="+", default=["quack", "triton", "torch", "transformers"])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="also print each side's longest kernels")
    parser.add_argument("--csv", help="append the rows to this file")
    return parser.parse_args()


def problem(args):
    torch.manual_seed(0)
    config = SimpleNamespace(
        num_experts=args.experts,
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        hidden_act="silu",
    )
    with torch.device("cuda"):
        experts = Qwen3MoeExperts(config).bfloat16()
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x_RH = torch.randn(args.tokens, args.hidden, dtype=torch.bfloat16)
        logits_RE = x_RH.float() @ torch.randn(args.hidden, args.experts) * 0.02
        weights_RK, idx_RK = logits_RE.softmax(-1).topk(args.top_k)
        dy_RH = torch.randn_like(x_RH)
    weights_RK = weights_RK / weights_RK.sum(-1, keepdim=True)
    return experts, x_RH.requires_grad_(), idx_RK, weights_RK.requires_grad_(), dy_RH


def step(function, experts, x_RH, idx_RK, weights_RK, dy_RH, between=lambda: None):
    for leaf in (x_RH, weights_RK, *experts.parameters()):
        leaf.grad = None
    y_RH = function(experts, x_RH, idx_RK, weights_RK)
    between()
    y_RH.backward(dy_RH)


def timed(function, operands, repeat):
    """Milliseconds on the device of `repeat` forwards and backwards. The host runs ahead, as it does in training."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeat)]
    torch.cuda.synchronize()
    for start, middle, end in events:
        start.record()
        step(function, *operands, between=middle.record)
        end.record()
    torch.cuda.synchronize()
    return [(start.elapsed_time(middle), middle.elapsed_time(end)) for start, middle, end in events]


def memory_of(function, experts, x_RH, *others):
    """GiB that the forward keeps for the backward, and the peak, the gradients included; weights and inputs aside."""
    kept = []
    for leaf in (x_RH, *experts.parameters()):
        leaf.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(function, experts, x_RH, *others, between=lambda: kept.append(torch.cuda.memory_allocated() - before))
    return kept[0] / 2**30, (torch.cuda.max_memory_allocated() - before) / 2**30


def main():
    args = parse()
    operands = problem(args)
    functions = {
        side: grouped_mm_experts_forward if side == "transformers" else choose(side, operands[0], torch.device("cuda"))
        for side in args.sides
    }
    times = {side: [] for side in args.sides}
    memory = {}
    for order in (args.sides, args.sides[::-1]):
        for side in order:
            timed(functions[side], operands, 5)
            times[side] += timed(functions[side], operands, args.repeat)
            memory[side] = memory_of(functions[side], *operands)
    # Forward and backward: three products each of x by W1 and of a by W2.
    installed = {distribution.name for distribution in distributions()}
    flop = 18 * args.tokens * args.top_k * args.hidden * args.intermediate
    rows = []
    for side in args.sides:
        forward, backward = (statistics.median(column) for column in zip(*times[side], strict=True))
        both = statistics.median(map(sum, times[side]))
        rows.append(
            {
                "side": side,
                "tokens": args.tokens,
                "experts": args.experts,
                "hidden": args.hidden,
                "intermediate": args.intermediate,
                "top_k": args.top_k,
                "forward_ms": round(forward, 3),
                "backward_ms": round(backward, 3),
                "both_ms": round(both, 3),
                "tflops": round(flop / both / 1e9, 1),
                "kept_gib": round(memory[side][0], 2),
                "peak_gib": round(memory[side][1], 2),
                "gpu": torch.cuda.get_device_name(),
                "versions": " ".join(f"{name} {version(name)}" for name in PACKAGES if name in installed),
                "command": " ".join(sys.argv),
            }
        )
        print(*(f"{key}={value}" for key, value in list(rows[-1].items())[:-3]), flush=True)
    if args.csv:
        with open(args.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)
    if args.profile:
        for side in args.sides:
            profile(side, partial(step, functions[side], *operands))


def profile(side, once):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            once()
        torch.cuda.synchronize()
    print(f"{side}: ms a step, launches, kernel")
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:24]:
        print(f"{event.device_time_total / 5e3:8.3f} {event.count / 5:5.1f}  {event.key[:110]}")


if __name__ == "__main__":
    main()
