"""Attention through transformers' registry: a backend for training and prefill, what the model had before elsewhere.

The backends are causal over whole sequences, with or without a sliding window or sinks. A mask of padding becomes the
bounds of sequences, on the device: the padding before a row's first token is a sequence of its own, and what follows
its last token no earlier one can see. So the host never waits to learn whether a mask is all ones. A cache, packed
batches, dropout and masks of other kinds run as they do without this library.

A backend's contract: `run(q, k, v, scale, window, softcap, sinks, bounds) -> out`, q `[B, S, N, D]`, k and v with a
divisor of N heads, out `[B, S, N, D of v]`; causal; `window` tokens at most, its own included, or None; `sinks` `[N]`
or None; `bounds` int32 of sequences in the B * S tokens, the first 0, the last B * S, or None for B sequences of S.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..say import say_once
from . import MODEL, OPERATIONS, choose, missing

# What a model falls back to: transformers' two implementations that run everywhere, and how each wants its mask.
_MASKS: dict[str, Callable] = {"sdpa": sdpa_mask, "eager": eager_mask}


class _Note(NamedTuple):
    """What a 2-D mask that `_mask` has returned stands for: not all modules tell their attention its window."""

    window: int | None
    padding: Tensor | None


_notes = WeakTensorKeyDictionary()
_bounds_of = WeakTensorKeyDictionary()  # a padding's bounds, made once for all layers


def install(model: PreTrainedModel, name: str) -> None:
    """Let the model attend with the backend that `name` means, where that can."""
    before = model.config.get_text_config()._attn_implementation
    # Models without flash attention read more from their mask than one of two dimensions holds.
    if name == MODEL or before not in _MASKS or not model._supports_flash_attn:
        return
    if name == "auto":
        lacking = {key: missing(backend.packages) for key, backend in OPERATIONS["attention"].items()}
        if all(lacking.values()):
            if torch.cuda.is_available():
                reasons = "; ".join(f"{key}: needs {', '.join(packages)}" for key, packages in lacking.items())
                say_once(f"attention='auto': {before} ({reasons}, run pip install 'automodel-moe[cuda]')")
            return
    entry = f"automodel_{name}_{before}"
    ALL_ATTENTION_FUNCTIONS.register(entry, functools.partial(_attend, name, before))
    ALL_MASK_ATTENTION_FUNCTIONS.register(entry, functools.partial(_mask, name, before))
    model.set_attn_implementation(entry)


def _mask(name: str, before: str, **kwargs: Any) -> Tensor | None:
    """The entry in transformers' registry of mask functions: where a backend runs, a noted 2-D mask, or None."""
    mask, device = kwargs.get("attention_mask"), kwargs["device"]
    plain = kwargs.get("allow_is_causal_skip", True) and kwargs["q_length"] == kwargs["kv_length"] > 1
    plain = plain and (mask is None or mask.shape == (kwargs["batch_size"], kwargs["kv_length"]))
    plain = plain and not torch.compiler.is_compiling()
    plain = plain and _is_causal(kwargs["mask_function"], kwargs.get("local_size"))
    if not plain or choose("attention", name, device, _compute_dtype(device, kwargs["dtype"])) is None:
        return _MASKS[before](**kwargs)
    window = kwargs.get("local_size")
    window = window if window is None or window < kwargs["kv_length"] else None
    if mask is None and window is None:
        return None
    shape = kwargs["batch_size"], kwargs["kv_length"]
    # A tensor of its own: the same padding may go with and without a window.
    noted = mask.clone() if mask is not None else torch.ones(shape, dtype=torch.bool, device=device)
    _notes[noted] = _Note(window, mask)
    return noted


def _is_causal(function: Callable, window: int | None) -> bool:
    """Whether a mask function is causal, within `window` if there is one: tried, at the places where others differ."""
    if function is causal_mask_function:
        return True
    w = window or 4
    place = torch.tensor([0, 1, w - 1, w, w + 1, 2 * w - 1, 2 * w, 2 * w + 1], device="cpu")
    q, kv = place[:, None], place[None, :]
    wanted = kv <= q if window is None else (kv <= q) & (kv > q - window)
    return bool((function(0, 0, q, kv) == wanted).all())


def _attend(
    name: str,
    before: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The entry in transformers' registry of attention functions; query, key and value are `[B, N, S, D]`.

    As in transformers' sdpa the mask alone decides what is seen; `sliding_window` is passed on and not read.
    """
    length = query.shape[2]
    causal = vars(module).get("is_causal", True) if is_causal is None else is_causal
    note = _Note(None, None) if attention_mask is None else _notes.get(attention_mask)
    plain = note is not None and causal and length == key.shape[2] > 1
    asked = dropout or kwargs.get("position_bias") is not None or kwargs.get("output_attentions")
    dtype = _compute_dtype(query.device, query.dtype)
    run: Callable | None = None
    if plain and not asked and type(query) is Tensor and not torch.compiler.is_compiling():
        run = choose("attention", name, query.device, dtype, query.shape[-1], value.shape[-1])
    if run is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, key, value))
        if note.padding is None:
            return run(q, k, v, scale, note.window, softcap, s_aux, None), None
        out = run(q, k, v, scale, note.window, softcap, s_aux, _bounds(note.padding))
        # A row that sees nothing is zero in torch's attention.
        return torch.where(note.padding[:, :, None, None], out, 0), None
    if plain and (attention_mask is not None or before == "eager"):
        # The mask was left out for a backend that can't run after all.
        attention_mask = _full_mask(before, query, note)
    options = {"softcap": softcap, "s_aux": s_aux, "is_causal": is_causal}
    kwargs |= {key: value for key, value in options.items() if value is not None}
    # "eager" is no entry: every modeling file has its own.
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"] if before == "eager" else None
    theirs = eager or ALL_ATTENTION_FUNCTIONS[before]
    return theirs(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _full_mask(before: str, query: Tensor, note: _Note) -> Tensor | None:
    B, _, S, _ = query.shape
    window = note.window
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return _MASKS[before](
        batch_size=B,
        q_length=S,
        kv_length=S,
        mask_function=function,
        attention_mask=note.padding,
        local_size=window,
        dtype=query.dtype,
        device=query.device,
    )


def _bounds(mask_BS: Tensor) -> Tensor:
    """
    Bounds of the sequences in a batch's B * S tokens, int32 `[2 B + 1]`: of each row, what is before its first token,
    and the rest. Without a wait for the device, which itself stops on a row with padding between its tokens.
    """
    if mask_BS not in _bounds_of:
        B, S = mask_BS.shape
        first_B = mask_BS.int().argmax(dim=1)
        tokens_B = mask_BS.sum(dim=1)
        last_B = S - mask_BS.flip(1).int().argmax(dim=1)
        whole_B = (tokens_B == 0) | (tokens_B == last_B - first_B)
        torch._assert_async(
            whole_B.all(), "attention_mask has padding between a row's tokens: load with attn_implementation='sdpa'"
        )
        starts_B = torch.arange(0, B * S, S, device=mask_BS.device)
        inner = torch.stack([starts_B, starts_B + first_B], dim=1).flatten()
        _bounds_of[mask_BS] = torch.cat([inner, inner.new_full((1,), B * S)]).int()
    return _bounds_of[mask_BS]


def _compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
