"""What a checkpoint holds, read from its headers alone: keys and shapes, and whether the files are complete."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Entry(NamedTuple):
    """One tensor of a checkpoint: its full shape, the file it lies in (`None`: in memory), and its dtype."""

    shape: tuple[int, ...]
    file: str | None
    dtype: torch.dtype | None = None  # of a header: float dtypes alone are told apart


class CheckpointError(ValueError):
    """A checkpoint that can't be loaded as the model it is meant for. The message names the file or tensor."""


def read_header(path: str | os.PathLike) -> dict[str, Entry]:
    """
    The tensors of one safetensors file, from its header; no tensor is read.

    Raises:
        `CheckpointError`: if the file ends before its header or its last tensor does, or its header is no JSON.
    """
    path = os.fspath(path)
    size = os.path.getsize(path)
    remedy = "download or copy the file again."
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or 8 + length > size:
            raise CheckpointError(f"{path} is truncated: it ends within its header ({size} bytes); {remedy}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is no safetensors file: its header is no JSON ({error}); {remedy}"
            ) from error
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size < end:
        last = max(header, key=lambda key: header[key]["data_offsets"][1])
        raise CheckpointError(
            f"{path} is truncated: its header promises {end} bytes and it has {size}; {last!r} is incomplete; {remedy}"
        )
    return {key: Entry(tuple(tensor["shape"]), path, _DTYPES.get(tensor["dtype"])) for key, tensor in header.items()}


def read_entries(files: Iterable[str] | None, state_dict: dict[str, Any] | None) -> dict[str, Entry]:
    """
    Every tensor that transformers is about to load, with its shape.

    Args:
        files (iterable of `str`, *optional*): The resolved checkpoint files. Pickled ones are mapped, not read.
        state_dict (`dict`, *optional*): Tensors that the caller passed instead of files; they win, as in transformers.

    Raises:
        `CheckpointError`: as `read_header` does.
    """
    if state_dict is not None:
        return {
            key: Entry(tuple(value.shape), None, value.dtype)
            for key, value in state_dict.items()
            if isinstance(value, Tensor)
        }
    entries: dict[str, Entry] = {}
    for path in files or ():
        if path.endswith(".safetensors"):
            entries |= read_header(path)
        else:
            from transformers.modeling_utils import load_state_dict

            entries |= {
                key: Entry(tuple(t.shape), path, t.dtype)
                for key, t in load_state_dict(path, map_location="meta").items()
            }
    return entries
