"""Two small patches that let accelerate's and torch's own calls take a model that was sharded at load.

Both act only where the original raises: on models loaded by this library, and on gradients that live on several device
meshes. Set AUTOMODEL_MOE_PATCH_LOOPS=0 to leave accelerate and torch alone.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

SWITCH = "AUTOMODEL_MOE_PATCH_LOOPS"


def install() -> None:
    """Install both patches once a process."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    _patch_prepare_model()
    _patch_clip_grad_norm()


def _patch_prepare_model() -> None:
    # `Accelerator.prepare(model, optimizer)` would move a sharded model and wrap it in DDP, and raises instead
    # (huggingface/transformers#48210). transformers' Trainer passes these two arguments for such a model; a plain loop
    # can't.
    import accelerate
    from accelerate import Accelerator

    if Version(accelerate.__version__) >= Version("1.16"):
        return
    original = Accelerator.prepare_model
    if vars(original).get("automodel_moe"):
        return

    @functools.wraps(original)
    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        # Among its modules: a PEFT model has ours within.
        if any("automodel_moe" in vars(m) and m.is_distributed_loading_by_transformers for m in model.modules()):
            _check_processes(self.num_processes)
            device_placement, evaluation_mode = False, True
        return original(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    vars(prepare_model)["automodel_moe"] = True
    Accelerator.prepare_model = prepare_model


def _check_processes(seen: int) -> None:
    # Without a GPU accelerate 1.15 takes each process for the only one unless told: every rank would train on the same
    # data, at no other sign than a worse model.
    world = dist.get_world_size()
    if seen != world:
        raise RuntimeError(
            f"accelerate sees {seen} process, and the model is sharded over {world}: every rank would get the same "
            "data. On CPUs pass TrainingArguments(use_cpu=True), or Accelerator(cpu=True)."
        )


def _patch_clip_grad_norm() -> None:
    # `torch.nn.utils.clip_grad_norm_` stacks the norms of all gradients, which DTensor refuses across meshes
    # (pytorch/pytorch#180346). It looks these two functions up by name on every call, so a script that imported it by
    # name gets them too.
    if Version(torch.__version__).release >= (2, 15):
        return
    total_norm, scale = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    if vars(total_norm).get("automodel_moe"):
        return

    @functools.wraps(total_norm)
    def get_total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        groups = by_mesh(tensors)
        if len({mesh for mesh, _ in groups}) <= 1:
            return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        norms = [sharded_norm(group, mesh, placements, norm_type) for (mesh, placements), group in groups.items()]
        return total_norm([norm.to(norms[0].device) for norm in norms], norm_type, error_if_nonfinite, foreach)

    @functools.wraps(scale)
    def clip_grads_with_norm_(parameters, max_norm, total_norm, foreach=None):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        groups = by_mesh(p.grad for p in parameters if p.grad is not None)
        if len({mesh for mesh, _ in groups}) <= 1:
            return scale(parameters, max_norm, total_norm, foreach)
        factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
        for grads in groups.values():
            torch._foreach_mul_(local_parts(grads), factor)

    vars(get_total_norm)["automodel_moe"] = True
    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = get_total_norm, clip_grads_with_norm_


def by_mesh(tensors: Iterable[torch.Tensor]) -> dict[tuple[Any, Any], list[torch.Tensor]]:
    """Group tensors by (device mesh, placements); plain tensors are the group (None, ())."""
    groups = defaultdict(list)
    for tensor in tensors:
        key = (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else (None, ())
        groups[key].append(tensor)
    return groups


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's own part of each tensor, sharing its memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def sharded_norm(tensors: list[torch.Tensor], mesh: Any, placements: Any, norm_type: float) -> torch.Tensor:
    """
    The norm of tensors that are sharded alike, as of the one vector of all their elements: the local norm, then one
    reduction of a number over each mesh dimension that shards.

    Returns:
        `torch.Tensor`: a plain 0-d tensor, equal on every rank of the mesh.
    """
    # A rank may hold nothing of a small tensor, and an empty tensor has no largest element. Plain tensors alone:
    # torch's own function, patched or not.
    parts = [part for part in local_parts(tensors) if part.numel()]
    norm = torch.nn.utils.get_total_norm(parts, norm_type) if parts else torch.zeros((), device=tensors[0].device)
    norm = norm.float()  # its square is past float16's range from 256 on, and rounded in bfloat16
    sharding = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if norm_type == float("inf"):
        for dim in sharding:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        return norm
    power = norm**norm_type
    for dim in sharding:
        dist.all_reduce(power, group=mesh.get_group(dim))
    return power ** (1.0 / norm_type)
