"""Linear + cross-entropy, forward and backward: ours beside transformers', Liger's and cut-cross-entropy, in one run.

    python benchmarks/loss.py --tokens 16384 --hidden 2048 --vocab 151936 --csv benchmarks/results/loss.csv

Random hidden states, weights and labels in bfloat16. Each side runs in the order given and then in the reverse;
medians of CUDA-event times. The errors are relative, in the Frobenius norm, against float32 on the first 2,048 tokens.
"""

import argparse
import csv
import statistics
import sys
from importlib.metadata import version

import torch
from torch.nn.functional import linear

from automodel_moe.dense import OPERATIONS, choose
from automodel_moe.dense.loss import _LinearCrossEntropy

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "liger-kernel",
    "cut-cross-entropy",
)


def transformers_loss(x_TH, weight_VH, labels_T):
    from transformers.loss.loss_utils import fixed_cross_entropy

    return fixed_cross_entropy(linear(x_TH, weight_VH).float(), labels_T)


def liger(x_TH, weight_VH, labels_T):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x_TH, weight_VH, labels_T)


def cut_cross_entropy(x_TH, weight_VH, labels_T):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x_TH, weight_VH, labels_T)


def ours(name):
    def run(x_TH, weight_VH, labels_T):
        backend = choose("loss", name, x_TH.device, x_TH.dtype, *weight_VH.shape)
        scale = (labels_T != -100).sum().float().reciprocal()
        return _LinearCrossEntropy.apply(x_TH, weight_VH, labels_T, scale, x_TH.dtype, backend)

    return run


SIDES = {
    **{name: ours(name) for name in OPERATIONS["loss"]},
    "liger": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "transformers": transformers_loss,
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 16384, "hidden": 2048, "vocab": 151936, "repeat": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--csv", help="append the rows to this file")
    return parser.parse_args()


def step(function, x_TH, weight_VH, labels_T):
    x_TH.grad = weight_VH.grad = None
    loss = function(x_TH, weight_VH, labels_T)
    loss.backward()
    return loss.detach()


def timed(function, *operands):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(function, *operands)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def relative(value, reference):
    return float((value.float() - reference).norm() / reference.norm())


def errors(function, x_TH, weight_VH, labels_T):
    """How far loss, dx and dW are off float32's, on a part of the tokens that float32 logits have room for."""
    x_tH, labels_t = x_TH[:2048].detach().requires_grad_(), labels_T[:2048]
    exact_x, exact_weight = (t.detach().float().requires_grad_() for t in (x_tH, weight_VH))
    exact = step(transformers_loss, exact_x, exact_weight, labels_t)
    loss = step(function, x_tH, weight_VH, labels_t)
    return [abs(float(loss - exact)), relative(x_tH.grad, exact_x.grad), relative(weight_VH.grad, exact_weight.grad)]


def main():
    args = parse()
    torch.manual_seed(0)
    # What a step has of them: a normalised hidden state, weights of std 0.02, a twentieth of the labels ignored.
    x_TH = torch.randn(args.tokens, args.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_VH = (torch.randn(args.vocab, args.hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
    labels_T = torch.randint(args.vocab, (args.tokens,), device="cuda")
    labels_T[torch.rand(args.tokens, device="cuda") < 0.05] = -100
    operands = (x_TH, weight_VH, labels_T)
    times = {side: [] for side in args.sides}
    peaks = {}
    for order in (args.sides, args.sides[::-1]):
        for side in order:
            step(SIDES[side], *operands)
            x_TH.grad = weight_VH.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times[side] += [timed(SIDES[side], *operands) for _ in range(args.repeat)]
            peaks[side] = (torch.cuda.max_memory_allocated() - before) / 2**30
    flop = 6 * args.tokens * args.hidden * args.vocab
    rows = []
    for side in args.sides:
        loss_error, dx_error, dw_error = errors(SIDES[side], *operands)
        median = statistics.median(times[side])
        rows.append(
            {
                "side": side,
                "tokens": args.tokens,
                "hidden": args.hidden,
                "vocab": args.vocab,
                "both_ms": round(median, 2),
                "tflops": round(flop / median / 1e9),
                "peak_gib": round(peaks[side], 2),
                "loss_error": f"{loss_error:.1e}",
                "dx_error": f"{dx_error:.2e}",
                "dw_error": f"{dw_error:.2e}",
                "gpu": torch.cuda.get_device_name(),
                "versions": " ".join(f"{name} {version(name)}" for name in PACKAGES),
                "command": "python " + " ".join(sys.argv),
            }
        )
        print(*(f"{key}={value}" for key, value in list(rows[-1].items())[:-3]), flush=True)
    if args.csv:
        with open(args.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
