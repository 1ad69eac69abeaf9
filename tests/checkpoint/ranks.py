"""What the checkpoint tests run on each rank."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from automodel_moe.checkpoint.load import loading


def load(model_class, folder, guarded: bool = True, **kwargs):
    """Load as `MoEAutoModel.from_pretrained` will, or, without the guard, as transformers alone does."""
    with loading(lambda model: None) if guarded else nullcontext():
        return model_class.from_pretrained(folder, **kwargs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(model, reference: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors of a sharded model that are not, bit for bit, those of `reference`."""
    state = model.state_dict()
    names = [f"only one has {name}" for name in state.keys() ^ reference.keys()]
    for name in sorted(state.keys() & reference.keys()):  # the same order on every rank: whole() is a collective
        value = whole(state[name])
        same = value.dtype == reference[name].dtype and torch.equal(value, reference[name])
        names += [] if same else [name]
    return sorted(names)


def saved(folder) -> dict[str, torch.Tensor]:
    """Every tensor that the safetensors files of a folder hold."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return sorted(a.keys() ^ b.keys()) + [
        key for key in a.keys() & b.keys() if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])
    ]
