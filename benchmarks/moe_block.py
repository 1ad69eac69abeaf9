"""One MoE block, router to combined output, forward and backward, beside its peers and the machine's own limits.

    python benchmarks/moe_block.py --csv benchmarks/results/moe_block.csv

The block is transformers' Qwen3MoeSparseMoeBlock with random weights, its own router and its own routing; a side is
what computes its experts. In the same run: the rate of a dense bfloat16 product and of a copy in device memory.
`floor_ms` is the time of the block's products at that rate. Every side runs in the order given and then in the
reverse; medians of CUDA-event times, with the host ahead of the device as in training.
"""

import argparse
import csv
import statistics
import sys
from datetime import date
from functools import partial
from importlib.metadata import distributions, version

import torch
from experts import profile
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from automodel_moe.experts import choose

PACKAGES = ("torch", "transformers", "triton", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel")
OURS = ("quack", "triton", "torch")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 16384, "experts": 128, "hidden": 2048, "intermediate": 768, "top-k": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sides", nargs="+", default=[*OURS, "liger", "transformers"])
    parser.add_argument("--recompute", action="store_true", help="compute the pre-activation again in backward (ours)")
    parser.add_argument("--frozen", action="store_true", help="experts without weight gradients")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="also print each side's longest kernels")
    parser.add_argument("--csv", help="append the rows to this file")
    return parser.parse_args()


def build(args):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
    )
    with torch.device("cuda"):
        block = Qwen3MoeSparseMoeBlock(config).bfloat16()
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x_TH = torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16, requires_grad=True)
        dy_TH = torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16)
    block.experts.requires_grad_(not args.frozen)
    return config, block, x_TH, dy_TH


def liger(experts, x_TH, idx_TK, weights_TK):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x_TH, experts.gate_up_proj, experts.down_proj, idx_TK.int(), weights_TK)


def register(side, block, recompute):
    """The name that transformers' registry knows a side's experts function by."""
    if side == "transformers":
        return "grouped_mm"
    if side == "liger":
        ALL_EXPERTS_FUNCTIONS.register(side, liger)
    else:
        function = choose(side, block.experts, torch.device("cuda"))
        ALL_EXPERTS_FUNCTIONS.register(side, partial(function, keeps_h=not recompute))
    return side


def step(config, name, block, x_TH, dy_TH, between=lambda: None):
    config._experts_implementation = name
    for leaf in (x_TH, *block.parameters()):
        leaf.grad = None
    y_TH = block(x_TH)
    between()
    y_TH.backward(dy_TH)


def timed(once, repeat):
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeat)]
    torch.cuda.synchronize()
    for start, middle, end in events:
        start.record()
        once(between=middle.record)
        end.record()
    torch.cuda.synchronize()
    return [(start.elapsed_time(middle), middle.elapsed_time(end)) for start, middle, end in events]


def memory_of(once, leaves):
    """GiB that the forward keeps for the backward, and the peak, the gradients included; weights and input aside."""
    for leaf in leaves:
        leaf.grad = None
    kept = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once(between=lambda: kept.append(torch.cuda.memory_allocated() - before))
    return kept[0] / 2**30, (torch.cuda.max_memory_allocated() - before) / 2**30


def limits():
    """TFLOP/s of a dense bfloat16 product of 8192 a side, TB/s of a copy (read and written)."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)

    def rate(function):
        times = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in times[5:])

    return 2 * 8192**3 / rate(lambda: a @ b) / 1e9, 2 * source.nbytes / rate(lambda: target.copy_(source)) / 1e9


def main():
    args = parse()
    config, block, x_TH, dy_TH = build(args)
    dense, copy = limits()
    # Three products of the up projection and three of the down projection, each 2 operations; frozen: two of each.
    products = (2 if args.frozen else 3) + args.recompute * 2 / 3
    flop = products * 6 * args.tokens * args.top_k * args.hidden * args.intermediate
    useful = flop - args.recompute * 4 * args.tokens * args.top_k * args.hidden * args.intermediate
    onces = {
        side: partial(step, config, register(side, block, args.recompute), block, x_TH, dy_TH) for side in args.sides
    }
    times = {side: [] for side in args.sides}
    memory = {}
    for order in (args.sides, args.sides[::-1]):
        for side in order:
            timed(onces[side], 5)
            times[side] += timed(onces[side], args.repeat)
            memory[side] = memory_of(onces[side], [x_TH, *block.parameters()])
    installed = {distribution.name for distribution in distributions()}
    rows = []
    for side in args.sides:
        forward, backward = (statistics.median(column) for column in zip(*times[side], strict=True))
        both = [sum(pair) for pair in times[side]]
        rows.append(
            {
                "date": date.today().isoformat(),
                "side": side,
                "tokens": args.tokens,
                "experts": args.experts,
                "hidden": args.hidden,
                "intermediate": args.intermediate,
                "top_k": args.top_k,
                "recompute": args.recompute,
                "frozen": args.frozen,
                "forward_ms": round(forward, 3),
                "backward_ms": round(backward, 3),
                "both_ms": round(statistics.median(both), 3),
                "minimum_ms": round(min(both), 3),
                "maximum_ms": round(max(both), 3),
                "tflops": round(useful / statistics.median(both) / 1e9, 1),
                "floor_ms": round(flop / dense / 1e9, 3),
                "dense_tflops": round(dense, 1),
                "copy_tbs": round(copy, 3),
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
            profile(side, onces[side])


if __name__ == "__main__":
    main()
