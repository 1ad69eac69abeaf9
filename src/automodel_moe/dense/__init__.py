"""The rest of the step: linear + cross-entropy, norms, rotary, attention.

Each operation has a switch in `MoEConfig` and a table of backends here; a backend is one file and one line in
`OPERATIONS`. The choice is made when the operation runs, by device and dtype: a model is often built on the CPU and
moved, and autocast may change the dtype between two forwards. What no backend can do, and everything under
`torch.compile`, which fuses norms and rotary by itself, runs as transformers has it.

All of it acts on one loaded model: on its modules' own attributes, never on a class or on transformers' modules.

Legend of the shape suffixes: T tokens, H hidden, V vocabulary, B batch, S sequence, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import MoEConfig
from ..say import say_once

MODEL = "model"  # the name, in every table, of what transformers does


@dataclass(frozen=True)
class Backend:
    """
    Where a backend lives and what it needs.

    Attributes:
        module (`str`): the file, beside this one, importable without the packages. It has `run`, whose contract is in
            its operation's file, and `unsupported(device, dtype, *sizes) -> str | None`, a reason where it can't.
        packages (`tuple[str, ...]`): what must be importable.
        install (`str`): the command that brings them.
        compiles (`bool`): whether its kernels are compiled on first use, seconds each.
    """

    module: str
    packages: tuple[str, ...] = ()
    install: str = ""
    compiles: bool = False


_CUDA = "pip install 'automodel-moe[cuda]'"
_QUACK = ("quack", "cutlass")

# By operation, as its field of MoEConfig is called. "auto" takes the first that can, else what the model has.
OPERATIONS: dict[str, dict[str, Backend]] = {
    # quack is the faster of the two and stands second: its gradients are further from float32 than transformers', so
    # it is for those who name it.
    "loss": {
        "chunked": Backend("loss_chunked"),
        "quack": Backend("loss_quack", _QUACK, _CUDA, compiles=True),
    },
    "norm": {
        "quack": Backend("norm_quack", _QUACK, _CUDA, compiles=True),
    },
    "rotary": {
        "triton": Backend("rotary_triton", ("triton",), "pip install triton"),
    },
    "attention": {
        "flash4": Backend("attention_flash4", ("flash_attn.cute",), _CUDA, compiles=True),
    },
}


def check(config: MoEConfig, attn_implementation: Any = None) -> None:
    """
    Whether what the config names can be had on this machine at all, asked before a model is loaded for it.

    Raises:
        `ImportError`: if a named backend needs a package that is missing.
        `ValueError`: if `attention` names a backend and the caller's `attn_implementation` another one.
    """
    for operation, backends in OPERATIONS.items():
        name = getattr(config, operation)
        if name in backends and (lacking := missing(backends[name].packages)):
            raise ImportError(
                f"{operation}={name!r} needs {', '.join(lacking)}, not installed here: run {backends[name].install}"
            )
    if attn_implementation is not None and config.attention not in ("auto", MODEL):
        raise ValueError(
            f"moe_config: attention={config.attention!r} and attn_implementation={attn_implementation!r} contradict "
            "each other; leave out one of the two."
        )


def finish(model: PreTrainedModel, config: MoEConfig, attn_implementation: Any = None) -> None:
    """
    Let a loaded model compute with the backends that its config names.

    Args:
        model (`PreTrainedModel`): the loaded model, on any device.
        config (`MoEConfig`): its `loss`, `norm`, `rotary` and `attention`.
        attn_implementation (*optional*): what the caller passed to `from_pretrained`: it is kept.
    """
    from . import attention, loss, norm, rotary

    loss.install(model, config.loss)
    norm.install(model, config.norm)
    rotary.install(model, config.rotary)
    if attn_implementation is None:
        attention.install(model, config.attention)


@cache
def choose(operation: str, name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> Callable | None:
    """
    The `run` of the backend that `name` means here, or `None` for what the model has.

    Args:
        operation (`str`): a key of `OPERATIONS`.
        name (`str`): a key of its table, `"model"`, or `"auto"`; what that is and why is logged once on rank 0.
        device (`torch.device`), dtype (`torch.dtype`), sizes (`int`): what `unsupported` of its backends asks about.

    Raises:
        `ValueError`: if the backend that `name` means can't compute this.
    """
    backends = OPERATIONS[operation]
    if name in backends:
        module = import_module(f".{backends[name].module}", __name__)
        if reason := module.unsupported(device, dtype, *sizes):
            raise ValueError(f'{operation}={name!r} can\'t run on {device} in {dtype}: {reason}. Use "auto".')
        return module.run
    # The backends are for GPUs; what runs on the CPU as well is for those who name it.
    if name == MODEL or device.type == "cpu":
        return None
    passed_over = []
    for key, backend in backends.items():
        module = import_module(f".{backend.module}", __name__)
        if reason := module.unsupported(device, dtype, *sizes):
            passed_over.append(f"{key}: {reason}")
        elif lacking := missing(backend.packages):
            passed_over.append(f"{key}: needs {', '.join(lacking)}, run {backend.install}")
        else:
            why = "; ".join(passed_over) or "the fastest"
            if backend.compiles:
                why += "; it compiles its kernels in the first step"
            say_once(f"{operation}='auto': {key} on {device.type} in {dtype} ({why})")
            return module.run
    say_once(f"{operation}='auto': {MODEL}'s own on {device.type} in {dtype} ({'; '.join(passed_over)})")
    return None


@cache
def missing(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `packages` that can't be imported here."""
    return tuple(package for package in packages if not _importable(package))


def _importable(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def needs_hopper(device: torch.device) -> str | None:
    """Why `device` is no Hopper or newer GPU, or `None`."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"it needs a Hopper GPU or newer, this one has compute capability {major}.{minor}"
