"""How experts compute.

A backend is one file with one function of this contract:

    f(experts, x_RH, idx_RK, weights_RK, *, n_pairs=None, keeps_h=True) -> y_RH

- `experts`: the model's own experts module. Its parameters keep transformers' names and layout; its flags say how
  they are laid out: `has_gate`, `has_bias`, `is_transposed`, `is_concatenated`, `has_post_expert_norm`, and its
  `_apply_gate` (or `act_fn` without a gate) is the activation.
- `x_RH`: R rows of hidden size H. `idx_RK`: local expert ids in [0, e), or -1 for a slot that adds nothing: no
  output, no bias, no gradient. `weights_RK`: routing weights, read as float32.
- `n_pairs`: how many of the R x K slots are not -1, where the caller knows it on the host.
- `keeps_h`: whether the backward finds the pre-activation kept, [N, J], or computes it again from the rows.
- `y_RH[r] = sum over k of weights[r, k] * expert[idx[r, k]](x[r])`, in x's dtype, summed in float32. Every parameter
  of the module gets a gradient in every backward, zeros where no row reached it: FSDP2 reduces gradients in lockstep.

Legend of the shape suffixes: T tokens here, R rows received, K top-k, H hidden, I expert intermediate, E experts,
e local experts, N (row, slot) pairs sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Not `import torch`: this package has a module of that name, which takes the name here once it is imported.
from torch import amp, device, dtype, get_autocast_dtype, is_autocast_enabled

from ..say import say_once


@dataclass(frozen=True)
class Backend:
    """
    Where a backend lives and what it needs.

    Attributes:
        module (`str`): the file, beside this one, importable without the packages. It has the contract's `forward` and
            `unsupported(experts, device, dtype) -> str | None`, a reason where it can't compute that.
        packages (`tuple[str, ...]`): what must be importable.
        install (`str`): the command that brings them.
    """

    module: str
    packages: tuple[str, ...] = ()
    install: str = ""


# "auto" takes the first that can.
BACKENDS = {
    "quack": Backend("quack", packages=("quack", "cutlass"), install="pip install 'automodel-moe[cuda]'"),
    "triton": Backend("triton", packages=("triton",), install="pip install triton"),
    "torch": Backend("torch"),
}


def compute_dtype(experts: Any, device: device) -> dtype:
    """What the experts compute in now: autocast's dtype inside `torch.autocast`, else the weights'."""
    if amp.is_autocast_available(device.type) and is_autocast_enabled(device.type):
        return get_autocast_dtype(device.type)
    return experts.down_proj.dtype


def choose(name: str, experts: Any, device: device, dtype: dtype | None = None) -> Callable:
    """
    The experts function to use, see the contract above.

    Args:
        name (`str`): a key of `BACKENDS`, or `"auto"` for the first of them that can run here; which one and why is
            logged once on rank 0.
        experts (`torch.nn.Module`): the experts module that it will be called with.
        device (`torch.device`): where it will run.
        dtype (`torch.dtype`, *optional*): what it will compute in; by default [`compute_dtype`] of this moment, so a
            choice made under autocast, or with FSDP's parameters gathered in bfloat16, is made for that.

    Raises:
        `ImportError`: if `name` needs a package that is missing.
        `ValueError`: if `name` is unknown, or can't compute this module on this device in this dtype.
    """
    dtype = compute_dtype(experts, device) if dtype is None else dtype
    check_installed(name)
    if name == "auto":
        return _choose_auto(experts, device, dtype)
    module = import_module(f".{BACKENDS[name].module}", __name__)
    if reason := module.unsupported(experts, device, dtype):
        raise ValueError(
            f"experts={name!r} can't run {type(experts).__name__} on {device} in {dtype}: {reason}. "
            'Use experts="auto".'
        )
    return module.forward


def check_installed(name: str) -> None:
    """
    Whether a backend can be had on this machine at all, asked before a model is loaded for it.

    Raises:
        `ImportError`: if `name` needs a package that is missing.
        `ValueError`: if `name` is neither `"auto"` nor a key of `BACKENDS`.
    """
    if name == "auto":
        return
    if name not in BACKENDS:
        raise ValueError(f"experts={name!r} is none of {', '.join(map(repr, ('auto', *BACKENDS)))}.")
    backend = BACKENDS[name]
    if missing := _missing(backend.packages):
        raise ImportError(f"experts={name!r} needs {', '.join(missing)}, not installed here: run {backend.install}")


def _choose_auto(experts: Any, device: device, dtype: dtype) -> Callable:
    passed_over = []
    for name, backend in BACKENDS.items():
        module = import_module(f".{backend.module}", __name__)
        if reason := module.unsupported(experts, device, dtype):
            passed_over.append(f"{name}: {reason}")
            continue
        if missing := _missing(backend.packages):
            passed_over.append(f"{name}: needs {', '.join(missing)}, run {backend.install}")
            continue
        why = "; ".join(passed_over) or "the fastest"
        kind = type(experts).__name__.removeprefix("FSDP")  # what FSDP2 puts before a class it shards
        say_once(f"experts='auto': {name} for {kind} on {device.type} in {dtype} ({why})")
        return module.forward
    raise ValueError(f"No experts backend can run {type(experts).__name__} on {device}: {'; '.join(passed_over)}.")


@cache
def _missing(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(package for package in packages if find_spec(package) is None)
