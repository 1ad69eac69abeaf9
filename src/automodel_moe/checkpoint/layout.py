"""Where every byte of a checkpoint goes, computed from shapes alone, so that all ranks compute it alike.

Same files, split, headers and index as transformers writes on one process: the split is huggingface_hub's, over meta
tensors that share storages as the real ones would; the order within a file is that of the safetensors library.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .headers import CheckpointError
from .reverse import Conversion


@dataclass(frozen=True)
class Place:
    """One tensor's: the file, the byte at which its data begins there, and what it is."""

    file: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """
    A checkpoint's weight files.

    Attributes:
        places: By the checkpoint's key.
        headers: By file name, the bytes that the file starts with.
        sizes: By file name, in bytes.
        index_name: The index's file name, if there is more than one file.
        index: Its content.
    """

    places: dict[str, Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index_name: str | None
    index: dict[str, Any]


def lay_out(
    conversions: Iterable[Conversion], max_shard_size: int | str, variant: str | None, total_parameters: int
) -> Layout:
    """
    Args:
        conversions (iterable of `Conversion`): What is to be saved.
        max_shard_size (`int` or `str`): As in `save_pretrained`.
        variant (`str`, *optional*): As in `save_pretrained`.
        total_parameters (`int`): What the index says of the model.

    Raises:
        `CheckpointError`: if two parameters become one key, or a dtype can't be stored.
    """
    tensors: dict[str, Tensor] = {}
    for conversion in conversions:
        for key, tensor in conversion.outputs:
            if key in tensors:
                raise CheckpointError(f"{conversion.key} and another parameter would both be saved as {key!r}.")
            tensors[key] = tensor
    dot = "" if variant is None else f".{variant}"
    split = split_state_dict_into_shards_factory(
        tensors,
        # A shared storage counts once, and its tensors stay in one file.
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", f"{dot}{{suffix}}.safetensors"),
        max_shard_size=max_shard_size,
    )
    places: dict[str, Place] = {}
    headers, sizes = {}, {}
    for file, keys in split.filename_to_tensors.items():
        headers[file], offsets, sizes[file] = _header({key: tensors[key] for key in keys})
        places |= {key: Place(file, offsets[key], tuple(tensors[key].shape), tensors[key].dtype) for key in keys}
    index = {
        "metadata": {"total_parameters": total_parameters, **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    index_name = f"{SAFE_WEIGHTS_INDEX_NAME.removesuffix('.json')}{dot}.json" if split.is_sharded else None
    return Layout(places, headers, sizes, index_name, index)


def index_bytes(index: dict[str, Any]) -> bytes:
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _header(tensors: dict[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The file's first bytes, each tensor's offset in the file, and the file's size."""
    known = _stored_dtypes()
    for key, tensor in tensors.items():
        if tensor.dtype not in known:
            raise CheckpointError(f"{key!r} is {tensor.dtype}, which safetensors can't store.")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for key in sorted(tensors, key=lambda key: (known[tensors[key].dtype][0], key)):
        tensor = tensors[key]
        begins[key], end = end, end + math.prod(tensor.shape) * tensor.itemsize
        entries[key] = {
            "dtype": known[tensor.dtype][1],
            "shape": list(tensor.shape),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {key: start + begin for key, begin in begins.items()}, start + end


@functools.cache
def _stored_dtypes() -> dict[torch.dtype, tuple[int, str]]:
    """By dtype, its place in a file and its name there: asked of the safetensors library, which sorts by it."""
    names = "bool uint8 int8 int16 int32 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64 complex64"
    dtypes = {name: getattr(torch, name) for name in names.split()}
    sample = safetensors.torch.save({name: torch.zeros(1, dtype=dtype) for name, dtype in dtypes.items()})
    (length,) = struct.unpack("<Q", sample[:8])
    header = json.loads(sample[8 : 8 + length])
    order = sorted(header, key=lambda name: header[name]["data_offsets"][0])
    return {dtypes[name]: (rank, header[name]["dtype"]) for rank, name in enumerate(order)}
