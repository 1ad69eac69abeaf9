"""One training step of a real shape on one GPU: ours beside its peers, in one run.

    python benchmarks/step.py --shape qwen3-30b-a3b --layers 8 --batch 4 --seq 4096 --csv benchmarks/results/step.csv
    python benchmarks/step.py --contenders ours "ours:attention=sdpa,loss=model" transformers+compile --profile

Random weights and tokens in bfloat16; forward, backward, clipping and fused AdamW in a plain loop, and the same
without clipping. A contender runs in
a process of its own, so its peak and what it patches are its own; all draw the same weights and see the same tokens.
A ratio is printed only where the losses and the first gradient norm agree with the first contender's.

Contenders, each with `+compile` appended for `model.compile()`:

    ours[:key=value,...]   MoEAutoModel, with these fields of MoEConfig
    transformers           transformers' grouped_mm experts and sdpa
    liger                  the same with Liger's rotary, RMSNorm and fused linear cross-entropy
    liger-moe              the same with Liger's experts too
    nemo[:key=value,...]   NeMo AutoModel's class of the model, with these fields of its BackendConfig; --nemo names
                           the folder that holds the package
"""

import argparse
import csv
import importlib
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import traceback
from datetime import date
from importlib.metadata import PackageNotFoundError, version

# Before torch asks the driver for devices: a process that forks later must not have woken it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Kernels that one contender has compiled serve the next; quack's are kept anyway.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PACKAGES = (
    "torch", "transformers", "triton", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel", "flash-attn-4",
    "transformer-engine",
)  # fmt: skip

QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960, rope_theta=1e6,
    tie_word_embeddings=False,
)  # fmt: skip
NEMOTRON_3_NANO = dict(
    model_type="nemotron_h", vocab_size=131072, hidden_size=2688, num_attention_heads=32, num_key_value_heads=2,
    head_dim=128, intermediate_size=1856, mlp_hidden_act="relu2", mamba_num_heads=64, mamba_head_dim=64,
    ssm_state_size=128, n_groups=8, conv_kernel=4, expand=2, chunk_size=128, n_routed_experts=128,
    num_experts_per_tok=6, n_shared_experts=1, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
    n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, max_position_embeddings=262144,
    tie_word_embeddings=False, pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
)  # fmt: skip
GPT_OSS_20B = dict(
    model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    sliding_window=128, tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, moe_intermediate_size=2048, n_routed_experts=256,
    num_experts_per_tok=8, n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, norm_topk_prob=True,
    routed_scaling_factor=2.5, tie_word_embeddings=False,
)  # fmt: skip
MIXTRAL_8X7B = dict(
    model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
    tie_word_embeddings=False,
)  # fmt: skip
SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "nemotron-3-nano": NEMOTRON_3_NANO,
    "gpt-oss-20b": GPT_OSS_20B,
    # One dense layer instead of three, so that few layers hold a MoE layer.
    "deepseek-v3-like": DEEPSEEK_V3 | dict(first_k_dense_replace=1),
    "mixtral-8x7b": MIXTRAL_8X7B,
}
BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}

# Kernels by what they compute: the first pattern that a kernel's name holds.
GROUPS = {
    "attention": r"flash|fmha|sdpa|attention|cudnn",
    "loss": r"scaled_exp|lce_|identity_epi|cross_entropy|nll|SoftMax",
    "experts GEMM": r"gemm_default_epi|linear_act_epi|dgated_epi|GroupProblem|grouped|group_gemm|fused_moe|_moe_",
    "other GEMM": r"gemm|nvjet|cutlass_80|xmma|matmul|splitK|_mm_",
    "optimizer": r"FusedOptimizer|fused_adam",
    "clipping": r"multi_tensor_apply|foreach",
    "norm": r"rms|norm",
    "rotary": r"rope|_rotate|rotary",
    "gather, sort": r"gather|scatter|index|[sS]ort|topk|TopK|radix|_place|_count|spread|cumsum|scan|grad_weight",
    "copies": r"copy|Memcpy|Memset|CatArray|Fill",
    "elementwise": r"elementwise|reduce|triton",
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--contenders", nargs="+", default=["ours", "transformers", "transformers+compile", "liger"])
    parser.add_argument(
        "--routing", choices=["natural", "balanced"], default="natural", help="the router's own, or forced"
    )
    parser.add_argument("--recompute", choices=["none", "layer"], default="none", help="activation checkpointing")
    parser.add_argument("--mask", action="store_true", help="pass an attention mask of ones")
    parser.add_argument(
        "--lengths", type=int, default=0, help="also time this many steps of random lengths up to --seq"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="forward and backward passes to a step")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under bfloat16 autocast")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also print the milliseconds by kind of kernel")
    parser.add_argument("--kernels", type=int, default=0, help="with --profile: also this many longest kernels")
    parser.add_argument("--nemo", help="folder that holds NeMo AutoModel's package nemo_automodel")
    parser.add_argument("--csv", help="append the rows to this file")
    parser.add_argument("--plot", nargs=2, metavar=("CSV", "PNG"), help="only draw the rows of this file")
    return parser.parse_args()


def shape_config(name, layers):
    numbers = dict(SHAPES[name])
    config_class = CONFIG_MAPPING[numbers.pop("model_type")]
    if "pattern" in numbers:
        numbers["layers_block_type"] = [BLOCKS[letter] for letter in numbers.pop("pattern")[:layers]]
    if "rope_theta" in numbers:
        numbers["rope_parameters"] = {"rope_type": "default", "rope_theta": numbers.pop("rope_theta")}
    return config_class(**numbers | dict(num_hidden_layers=layers, use_cache=False))


# --- contenders ------------------------------------------------------------------------------------------------------


def build_ours(config, args, options, dtype):
    from automodel_moe import MoEAutoModel

    moe_config = dict(option.split("=", 1) for option in options.split(",") if option)
    return MoEAutoModel.from_config(config, moe_config=moe_config, dtype=dtype)


def build_transformers(config, args, options, dtype):
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )


def build_liger(config, args, options, dtype, experts=False):
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NotImplementedError(f"Liger has no kernels for {config.model_type}")
    # Classes are patched before the model is built, as Liger's own AutoModel does.
    MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type](swiglu=experts)
    return build_transformers(config, args, options, dtype)


def build_liger_moe(config, args, options, dtype):
    return build_liger(config, args, options, dtype, experts=True)


def build_nemo(config, args, options, dtype):
    sys.path.insert(0, args.nemo or "")
    common = importlib.import_module("nemo_automodel.components.models.common")
    model_class = importlib.import_module(f"nemo_automodel.components.models.{config.model_type}.model").ModelClass
    own = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "rope_fusion": False, "experts": "torch_mm"}
    own |= dict(option.split("=", 1) for option in options.split(",") if option)
    model = model_class(config, backend=common.BackendConfig(dispatcher="torch", **own))
    model.initialize_weights(buffer_device=torch.device("cuda"), dtype=dtype)
    # The other contenders' weights, by way of the Hub's keys.
    theirs = build_transformers(config, args, "", dtype)
    model.load_state_dict(model.state_dict_adapter.from_hf(revert_weight_conversion(theirs, theirs.state_dict())))
    return WithLoss(model)


class WithLoss(torch.nn.Module):
    """A model that returns logits alone, with transformers' loss of them."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, labels, attention_mask=None):
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        return CausalLMOutput(loss=ForCausalLMLoss(logits, labels, self.config.vocab_size))


BUILDERS = {
    "ours": build_ours,
    "transformers": build_transformers,
    "liger": build_liger,
    "liger-moe": build_liger_moe,
    "nemo": build_nemo,
}


def built(contender, args):
    name, *suffix = contender.split("+")
    kind, _, options = name.partition(":")
    config = shape_config(args.shape, args.layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = BUILDERS[kind](config, args, options, torch.float32 if args.autocast else torch.bfloat16)
    model.train()
    if args.recompute == "layer":
        model.gradient_checkpointing_enable()
    if args.routing == "balanced":
        for module in model.modules():
            if "_is_expert_parallel" in vars(module):
                module.register_forward_pre_hook(balanced_ids)
    if suffix == ["compile"]:
        model.compile()
    return model


def balanced_ids(experts, args):
    """A different K experts for each token, every expert equally often."""
    x_TH, idx_TK, weights_TK = args
    n_tokens, top_k = idx_TK.shape
    slots = torch.arange(n_tokens * top_k, device=idx_TK.device).view(n_tokens, top_k)
    # A stride prime to E would still send neighbours to the same ranks; the row's number shifts them apart.
    return x_TH, (slots + slots[:, :1] // experts.num_experts) % experts.num_experts, weights_TK


# --- one contender, in its own process -------------------------------------------------------------------------------


class Loop:
    """A plain training loop. `step(ids)` launches one step and returns its loss and gradient norm, unread."""

    def __init__(self, model, args):
        self.model, self.args = model, args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(self, ids, clip=True):
        kwargs = {"attention_mask": torch.ones_like(ids)} if self.args.mask else {}
        total = 0
        for _ in range(self.args.accumulate):
            with torch.autocast("cuda", torch.bfloat16, enabled=self.args.autocast):
                loss = self.model(input_ids=ids, labels=ids, **kwargs).loss / self.args.accumulate
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0) if clip else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm


def measure(contender, args):
    model = built(contender, args)
    generator = torch.Generator("cuda").manual_seed(1)

    def tokens(length):
        return torch.randint(model.config.vocab_size, (args.batch, length), device="cuda", generator=generator)

    loop = Loop(model, args)
    batches = [tokens(args.seq) for _ in range(args.warmup + args.steps)]
    torch.cuda.reset_peak_memory_stats()
    seen = [loop.step(ids) for ids in batches[: args.warmup]]
    times, timed = timed_steps(loop, batches[args.warmup :])
    seen += timed
    peak = torch.cuda.max_memory_allocated()
    without, _ = timed_steps(loop, batches[args.warmup :], clip=False)
    result = {
        "step_ms": statistics.median(times),
        "minimum": min(times),
        "maximum": max(times),
        "no_clip_ms": statistics.median(without),
        "peak_gib": peak / 2**30,
        "losses": [float(loss) for loss, _ in seen],
        "norm": float(seen[0][1]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "gpu": torch.cuda.get_device_name(),
    }
    if args.profile:
        result["groups"], result["kernels"] = profile(loop, batches[:2], args.kernels)
    if args.lengths:
        result["lengths"] = random_lengths(loop, tokens, args)
    return result


def timed_steps(loop, batches, **options):
    """Milliseconds of each step, from one end to the next, and what the steps returned."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    marks[0].record()
    seen = []
    for ids, mark in zip(batches, marks[1:], strict=True):
        seen.append(loop.step(ids, **options))
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], seen


def random_lengths(loop, tokens, args):
    """Microseconds a token of steps whose length changes every time: what is compiled or tuned again stands out."""
    drawn = torch.randint(args.seq // 8, args.seq + 1, (args.lengths,), generator=torch.Generator().manual_seed(2))
    costs = []
    for length in drawn.tolist():
        ids = tokens(length)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loop.step(ids)
        end.record()
        end.synchronize()
        costs.append(round(start.elapsed_time(end) * 1e3 / ids.numel(), 3))
    return costs


def profile(loop, batches, n_kernels):
    """Milliseconds a step by kind of kernel and by kernel, from the profiler's device times."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for ids in batches:
            loop.step(ids)
        torch.cuda.synchronize()
    groups = dict.fromkeys((*GROUPS, "other"), 0.0)
    kernels = []
    for event in profiler.key_averages():
        milliseconds = event.self_device_time_total / 1e3 / len(batches)
        group = next((g for g, pattern in GROUPS.items() if re.search(pattern, event.key)), "other")
        groups[group] += milliseconds
        kernels.append((milliseconds, event.count / len(batches), group, event.key))
    return groups, sorted(kernels, reverse=True)[:n_kernels]


def child(contender, args, pipe):
    try:
        result = measure(contender, args)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        if not isinstance(error, NotImplementedError):
            traceback.print_exc()
    pipe.send(json.dumps(result))
    pipe.close()


def in_own_process(contender, args):
    context = multiprocessing.get_context("fork")  # what this process has imported need not be imported again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(contender, args, sender))
    process.start()
    sender.close()
    try:
        result = json.loads(receiver.recv())
    except EOFError:
        result = {"error": "the process died"}
    process.join()
    return result


# --- the table -------------------------------------------------------------------------------------------------------


def agree(one, other):
    """bfloat16 rounds differently in each; a wrong label, scale or weight shows far above these bounds."""
    pairs = zip(one["losses"], other["losses"], strict=True)
    return (
        all(abs(a - b) <= 5e-3 * abs(b) for a, b in pairs) and abs(one["norm"] - other["norm"]) <= 0.02 * other["norm"]
    )


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main():
    args = parse()
    if args.plot:
        return plot(*args.plot)
    versions = " ".join(f"{name} {installed(name)}" for name in PACKAGES if installed(name))
    n_tokens = args.batch * args.seq * args.accumulate
    print(f"{args.shape}, {args.layers} layers, {args.batch} x {args.seq} tokens, {versions}", flush=True)
    results = {}
    for contender in args.contenders:
        results[contender] = result = in_own_process(contender, args)
        line = result.get("error") or f"{result['step_ms']:.1f} ms, {result['peak_gib']:.1f} GiB"
        print(f"  {contender}: {line}", flush=True)
        for entry in result.get("kernels", ()):
            print("    {:8.3f} ms {:6.1f}  {:14s} {:.120s}".format(*entry), flush=True)
        if "lengths" in result:
            print(f"    us a token at {args.lengths} random lengths: {result['lengths']}", flush=True)
    first = next((r for r in results.values() if "error" not in r), None)
    columns = {"step ms": 9, "no clip": 8, "min": 7, "max": 7, "tok/s": 8, "GiB": 6, "time": 7}
    print(f"\n{'contender':40s} {' '.join(name.rjust(width) for name, width in columns.items())}  loss, norm")
    rows = []
    for contender, result in results.items():
        if "error" in result:
            print(f"{contender:40s} {result['error']}")
            continue
        same = agree(result, first)
        ratio = f"{result['step_ms'] / first['step_ms']:.2f} x" if same else "differs"
        print(
            f"{contender:40s} {result['step_ms']:9.1f} {result['no_clip_ms']:8.1f} {result['minimum']:7.1f} "
            f"{result['maximum']:7.1f} {n_tokens / result['step_ms'] * 1e3:8.0f} {result['peak_gib']:6.1f} "
            f"{ratio:>7s}  "
            f"{result['losses'][0]:.4f} {result['losses'][-1]:.4f} {result['norm']:.3f}"
        )
        rows.append(
            {
                "date": date.today().isoformat(),
                "gpu": result["gpu"],
                "versions": versions,
                "command": "python " + " ".join(sys.argv),
                "shape": args.shape,
                "layers": args.layers,
                "batch": args.batch,
                "seq": args.seq,
                "routing": args.routing,
                "recompute": args.recompute,
                "contender": contender,
                "step_ms": round(result["step_ms"], 2),
                "no_clip_ms": round(result["no_clip_ms"], 2),
                "minimum": round(result["minimum"], 2),
                "maximum": round(result["maximum"], 2),
                "tokens_per_s": round(n_tokens / result["step_ms"] * 1e3),
                "peak_gib": round(result["peak_gib"], 2),
                "loss": round(result["losses"][-1], 4),
                "agrees": same,
            }
        )
    for contender, result in results.items():
        if "groups" in result:
            print(f"{contender}: " + ", ".join(f"{g} {ms:.1f}" for g, ms in result["groups"].items()))
    if args.csv and rows:
        with open(args.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)


def plot(source, target):
    """Bars of the step's milliseconds, one group a shape, the last row of each contender."""
    import matplotlib.pyplot as plt

    with open(source, newline="") as file:
        rows = {}
        for row in csv.DictReader(file):
            where = f"{row['shape']}\n{row['layers']} layers, {row['batch']} x {row['seq']}"
            rows.setdefault(where, {})[row["contender"]] = row
    figure, axes = plt.subplots(1, len(rows), figsize=(4.5 * len(rows), 4), squeeze=False, layout="constrained")
    for axis, (where, by_contender) in zip(axes[0], rows.items(), strict=True):
        values = [float(row["step_ms"]) for row in by_contender.values()]
        bars = axis.bar(list(by_contender), values)
        axis.bar_label(bars, [f"{row['step_ms']} ms\n{row['peak_gib']} GiB" for row in by_contender.values()])
        axis.set_title(where, fontsize=10)
        axis.margins(y=0.2)
        axis.tick_params(axis="x", rotation=30)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
