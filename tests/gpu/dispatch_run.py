"""Transports on GPUs, over NCCL ranks: the contract's own checks, and a model's gradients against one rank's.

torchrun --nproc-per-node 2 -m tests.gpu.dispatch_run --name deepep_buffer
torchrun --nproc-per-node 2 -m tests.gpu.dispatch_run --gradients deepep --folder DIR     (first with one process)
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path

import torch

if torch.cuda.device_count() == 1:
    os.environ["LOCAL_RANK"] = "0"  # several ranks may share the one GPU; transformers binds by local rank

import torch.distributed as dist
from transformers import Qwen3MoeConfig

from automodel_moe import MoEAutoModel
from tests.dispatch import test_contract as contract
from tests.dispatch.test_fp8 import round_trip as fp8_round_trip

CONFIG = Qwen3MoeConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4,
    norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip


def run_contract(name: str, only: list[str]) -> dict:
    world = dist.get_world_size()
    seconds = {}
    # By top-k: an ElasticBuffer compiles its kernels anew for each.
    for case, given in sorted(contract.CASES.items(), key=lambda case: (case[1]["top_k"] != 2, case[1]["top_k"])):
        if case not in only or given["top_k"] > world * contract.E_LOCAL:
            continue
        arguments = {"hidden": 8, "dtype": torch.float32, "holes": False} | given
        counts = (arguments.pop("counts") * 2)[:world]
        start = time.perf_counter()
        contract.round_trip(name=name, counts=counts, **arguments)
        torch.cuda.synchronize()
        seconds[case] = round(time.perf_counter() - start, 2)
        if dist.get_rank() == 0:
            print("passed", case, seconds[case], flush=True)
    contract.many_layers(name)
    contract.gradients(name)
    result: dict = {"cases": seconds}
    if name == "all_to_all":
        fp8_round_trip()
    if name.startswith("all_to_all"):
        result["host reads"] = host_reads(name)
    return result


def host_reads(name: str) -> dict[str, int]:
    """How often the host waits for the device in one layer's transfers, in forward and in backward."""
    transport = contract.make(name)
    dtype, hidden = contract.carried(name, torch.bfloat16, 256)
    tokens = contract._tokens(dist.get_rank(), 64, 2, dist.get_world_size() * contract.E_LOCAL, hidden, dtype, False)
    counts = {}
    for _ in range(2):  # the first compiles, allocates and connects
        x_TH, idx_TK, weights_TK = (t.clone() for t in tokens)
        x_TH.requires_grad_()
        torch.cuda.synchronize()
        for direction in ("forward", "backward"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                if direction == "forward":
                    y_TH = contract._layer(transport, x_TH, idx_TK, weights_TK)
                else:
                    y_TH.backward(torch.ones_like(y_TH))
                torch.cuda.set_sync_debug_mode("default")
            counts[direction] = sum("synchroniz" in str(warning.message) for warning in caught)
    return counts


def gradients(dispatcher: str, folder: Path) -> dict:
    """One step in bfloat16. One process makes the weights and writes what more processes are compared with: the
    gradients in float32, and how far its own in bfloat16 are from them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    source, written = folder / "source", folder / "gradients.pt"
    if world == 1:
        torch.manual_seed(0)
        MoEAutoModel.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CONFIG.vocab_size, (8, 128), generator=generator)
    own = ids.chunk(world)[rank].cuda()

    def step(**moe_config):
        device_map = {"": int(os.environ.get("LOCAL_RANK", "0"))}
        model = MoEAutoModel.from_pretrained(source, moe_config=moe_config, device_map=device_map).train()
        loss = model(own, labels=own).loss
        loss.backward()
        return model, loss.detach()

    def distance(got: torch.Tensor, want: torch.Tensor) -> float:
        return ((got.float() - want).norm() / want.norm()).item()

    if world == 1:
        exact = {name: p.grad for name, p in step(precision="fp32")[0].named_parameters()}
        model, loss = step(precision="bf16")
        errors = {name: distance(p.grad, exact[name]) for name, p in model.named_parameters()}
        torch.save((exact, errors), written)
        return {"loss": loss.item(), "errors": errors}
    model, loss = step(precision="bf16", dispatcher=dispatcher, ep_size=world)
    dist.all_reduce(loss)
    transports = {
        type(transport).__name__
        for module in model.modules()
        if "automodel" in vars(module)
        for transport in module.automodel.driver.transports.values()
    }
    exact, one_rank = torch.load(written, map_location="cuda")
    errors = {name: distance(p.grad.full_tensor(), exact[name]) for name, p in model.named_parameters()}
    worst = max(errors, key=lambda name: errors[name] / one_rank[name])
    return {
        "loss": loss.item() / world,
        "transports": sorted(transports),
        "worst": worst,
        "error": errors[worst],
        "one rank's error": one_rank[worst],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", choices=contract.TRANSPORTS)
    parser.add_argument("--cases", choices=contract.CASES, nargs="+", default=list(contract.CASES))
    parser.add_argument("--gradients", metavar="DISPATCHER")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if arguments.name:
        dist.init_process_group("nccl")
        result = run_contract(arguments.name, arguments.cases)
    else:
        result = gradients(arguments.gradients, arguments.folder)
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT", json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
