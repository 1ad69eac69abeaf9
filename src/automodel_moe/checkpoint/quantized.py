"""Quantized checkpoints: loaded as bfloat16, since experts are trained in floating point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from .patching import patched

_CONFIGS: dict[str, type] = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}


def dequantizing_config(config: Any, user: Any = None, sharded: bool = True) -> Any:
    """
    The `quantization_config=` argument with which a checkpoint loads in floating point, for training.

    Args:
        config (`PreTrainedConfig`): The checkpoint's configuration.
        user (*optional*): What the caller passed as `quantization_config=`; it is respected where it can be sharded.
        sharded (`bool`): Whether the model will be sharded over ranks.

    Returns:
        `None` for a checkpoint that isn't quantized; a quantization config with `dequantize=True` and otherwise the
        checkpoint's own settings for MXFP4 and FP8; else `user`.

    Raises:
        `ValueError`: for any other quantization together with sharding.
    """
    source = _stored(config)
    if user is not None or source is None:
        if user is not None and sharded and not _dequantizes(user):
            raise ValueError(
                f"quantization_config={type(user).__name__} keeps weights quantized, and quantized weights can't be "
                "sharded: pass one with dequantize=True, or load in one process."
            )
        return user
    method = str(getattr(source["quant_method"], "value", source["quant_method"]))
    if method in _CONFIGS:
        settings = {key: value for key, value in source.items() if key not in ("quant_method", "dequantize")}
        return _CONFIGS[method](dequantize=True, **settings)
    if sharded:
        raise ValueError(
            f"The checkpoint is quantized with {method!r}, which can't be sharded over ranks: use an unquantized "
            f"checkpoint, one in {' or '.join(_CONFIGS)} (loaded as bfloat16), or load it in one process."
        )
    return None


def _stored(config: Any) -> dict[str, Any] | None:
    """The checkpoint's `quantization_config` as a dict; composite models may keep it in the text config."""
    for holder in (config, config.get_text_config()):
        if "quantization_config" in vars(holder) and holder.quantization_config is not None:
            stored = holder.quantization_config
            return dict(stored) if isinstance(stored, dict) else stored.to_dict()
    return None


def _dequantizes(quantization_config: Any) -> bool:
    values = quantization_config if isinstance(quantization_config, dict) else vars(quantization_config)
    return bool(values.get("dequantize"))


@contextmanager
def ragged_blocks() -> Iterator[None]:
    """
    Let FP8 weights whose size is no multiple of the block be dequantized, e.g. 576 rows in blocks of 128.

    transformers 5.24 derives the block from the number of scales, so that 576 rows with 5 scales raise and 192 rows
    with 2 scales silently get blocks of 96 (public: huggingface/transformers#36026).
    """
    if Version(transformers.__version__) >= Version("5.25"):
        yield
        return
    with patched(Fp8Dequantize, "_dequantize_one", _dequantize_one):
        yield


def _dequantize_one(original, self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype=None) -> torch.Tensor:
    block = self.hf_quantizer.quantization_config.weight_block_size
    if block is None or scales.ndim < 2 or not quantized.is_floating_point():
        return original(self, quantized, scales, output_dtype=output_dtype)
    size, n_blocks = quantized.shape[-2:], scales.shape[-2:]
    whole = [n * b for n, b in zip(n_blocks, block, strict=True)]
    if tuple(whole) == tuple(size) or any(not w - b < s <= w for s, w, b in zip(size, whole, block, strict=True)):
        return original(self, quantized, scales, output_dtype=output_dtype)
    padded = torch.zeros(*quantized.shape[:-2], *whole, dtype=quantized.dtype, device=quantized.device)
    padded[..., : size[0], : size[1]] = quantized
    out = original(self, padded, scales, output_dtype=output_dtype)
    return out[..., : size[0], : size[1]].contiguous()
