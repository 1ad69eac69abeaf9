"""Rotary position embeddings of attention modules whose `apply_rotary_pos_emb` rotates halves: tried, not assumed.

transformers' attention calls a function of its modeling file, which every model of that file shares. An attention
module of a model loaded here runs its class's own forward with another function under that name; the modeling file
keeps its own.

A backend's contract: `run(q, k, cos, sin, half) -> (q, k)`, q and k `[B, N, S, D]` in any layout, cos and sin
`[1 or B, S, W]` with the W columns to rotate, or with `half` one entry for the two halves of them. The results are new
tensors in the layout of q and k.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import MODEL, choose

NAME = "apply_rotary_pos_emb"


def install(model: nn.Module, name: str) -> None:
    """Let the model's attention modules rotate with the backend that `name` means."""
    if name == MODEL:
        return
    for module in model.modules():
        kind: Any = type(module)
        if "forward" not in vars(module) and _half_tables(kind) is not None:
            vars(module)["forward"] = functools.partial(_forward, module, name)


def _plain(module_class: Any) -> types.FunctionType | None:
    """The class's forward below its decorators, which only rename old arguments, if it calls the function."""
    forward = inspect.unwrap(module_class.forward)
    calls = isinstance(forward, types.FunctionType) and NAME in forward.__code__.co_names
    return forward if calls and callable(forward.__globals__.get(NAME)) else None


@functools.cache
def _half_tables(module_class: type) -> bool | None:
    """Whether cos and sin hold one entry for both halves; `None` if the function is no rotation of halves."""
    forward = _plain(module_class)
    if forward is None:
        return None
    theirs = forward.__globals__[NAME]
    if list(inspect.signature(theirs).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    options: Any = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    q, k = (torch.randn(2, n, 3, 8, **options) for n in (4, 2))
    for half, width in ((False, 8), (True, 4)):
        cos, sin = (torch.randn(2, 3, width, **options) for _ in range(2))
        if not half:  # tables repeat themselves: implementations may read either half
            cos, sin = (torch.cat([t[..., :4], t[..., :4]], dim=-1) for t in (cos, sin))
        try:
            got = theirs(q, k, cos, sin)
        except (
            RuntimeError,
            TypeError,
            AttributeError,
        ):  # shapes that do not fit: the other form, or another rotation
            continue
        tables = [torch.cat([t, t], dim=-1) if half else t for t in (cos, sin)]
        want = [reference(x, *tables) for x in (q, k)]
        if all(g.shape == w.shape and torch.allclose(g, w, atol=1e-5) for g, w in zip(got, want, strict=True)):
            return half
    return None


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[B, N, S, D]` with its first W columns rotated by tables `[1 or B, S, W]`."""
    width = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :width].chunk(2, dim=-1)
    rotated = x[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, x[..., width:]], dim=-1)


def _forward(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    kind: Any = type(module)
    return _with_rotation(kind, name)(module, *args, **kwargs)


@functools.cache
def _with_rotation(module_class: type, name: str) -> Callable:
    """The class's forward, with ours where it says `apply_rotary_pos_emb`."""
    forward = _plain(module_class)
    assert forward is not None
    theirs = forward.__globals__[NAME]
    rotate = functools.partial(_rotate, name, bool(_half_tables(module_class)), theirs)
    scope = vars(sys.modules[forward.__module__]) | {NAME: rotate}
    copy = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotate(name: str, half: bool, theirs: Callable, *args: Any, **kwargs: Any) -> Any:
    run = None
    if len(args) == 4 and kwargs.keys() <= {"unsqueeze_dim"} and kwargs.get("unsqueeze_dim", 1) == 1:
        q, k, cos, _ = args
        # Tables with a gradient, or with a row a head, are another function than the backends know.
        plain = all(type(t) is Tensor for t in args) and q.dim() == k.dim() == 4 and cos.dim() == 3 and q.numel() > 0
        if plain and q.shape[2] == k.shape[2] == cos.shape[1] and not cos.requires_grad:
            run = choose("rotary", name, q.device, q.dtype, q.shape[-1], cos.shape[-1] * (2 if half else 1))
    return theirs(*args, **kwargs) if run is None else run(*args, half)
