"""`MoEConfig`: every knob of the library, one dataclass, each with a sane "auto"."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

DISPATCHERS = ("auto", "deepep", "all_to_all")
EXPERTS = ("auto", "quack", "torch")
PRECISIONS = ("auto", "bf16", "mixed", "fp32")


@dataclass(frozen=True)
class MoEConfig:
    """
    How a MoE model loaded by [`MoEAutoModel`] is sharded and computed.

    Args:
        ep_size (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            Ranks that share one copy of the experts (expert parallelism). Must divide the world size and every
            layer's number of experts. `"auto"`: see [`~automodel_moe.auto.auto_ep_size`].
        dispatcher (`str`, *optional*, defaults to `"auto"`):
            How tokens travel to the rank of their experts: `"deepep"` (the package `deep_ep`; CUDA and bfloat16
            only) or `"all_to_all"` (torch.distributed, NCCL or gloo).
            `"auto"` picks the fastest one that is installed and fits the machine, and says so once.
        max_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            The most tokens, batch size times sequence length, that a rank brings to a layer. Read by `"deepep"` on
            groups that its `ElasticBuffer` serves (not 2, 4 or 8 ranks of one node), whose size it is.
            `"auto"`: as many as the fullest rank brings in the first forward.
        experts (`str`, *optional*, defaults to `"auto"`):
            How experts compute: `"torch"` (grouped_mm where torch has it, one GEMM an expert elsewhere) or `"quack"`
            (SwiGLU experts in bfloat16 on a Hopper GPU; needs `automodel-moe[cuda]`).
            `"auto"` picks the fastest one that can run the model here, and says so once.
        precision (`str`, *optional*, defaults to `"auto"`):
            With AdamW, bytes a parameter: weights + gradients + two moments.

            - `"auto"`: the `dtype` argument, else the checkpoint's own dtype, as in transformers.
            - `"bf16"`: everything in bfloat16. 2 + 2 + 4 = 8 bytes.
            - `"mixed"`: bfloat16 compute, float32 master weights and float32 gradient reduction.
              4 + 4 + 8 = 16 bytes, and 2 more for the layer being computed; in one process, where autocast casts,
              for every layer until its backward.
            - `"fp32"`: everything in float32. 4 + 4 + 8 = 16 bytes.

            `TrainingArguments(bf16=True)` is right with each of them: it adds autocast, in which the experts compute
            in bfloat16.
        group_timeout (`float`, *optional*, defaults to 300):
            Seconds after which a collective that a rank does not join ends the job. Used when the process group is
            brought up by `from_pretrained`; a group that already exists keeps its own.
        call_timeout (`float`, *optional*, defaults to 60):
            Seconds that `save_pretrained` and `generate` of a sharded model wait for the other ranks to call them
            too, before they raise.
    """

    ep_size: int | str = "auto"
    dispatcher: str = "auto"
    max_tokens: int | str = "auto"
    experts: str = "auto"
    precision: str = "auto"
    group_timeout: float = 300.0
    call_timeout: float = 60.0

    def __post_init__(self):
        for name in ("ep_size", "max_tokens"):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f'moe_config: {name}={value!r} must be "auto" or an integer of at least 1.')
        for name, choices in (("dispatcher", DISPATCHERS), ("experts", EXPERTS), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"moe_config: {name}={value!r} is none of {', '.join(map(repr, choices))}.")
        for name in ("group_timeout", "call_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"moe_config: {name}={value!r} must be a positive number of seconds.")

    @classmethod
    def load(cls, source: MoEConfig | Mapping[str, Any] | str | os.PathLike | None) -> MoEConfig:
        """
        A `MoEConfig` from what `moe_config=` takes.

        Args:
            source (`MoEConfig`, mapping, path, or `None`):
                A mapping holds the fields themselves, or holds them under one key `moe_config`. A path names a
                YAML or JSON file with such a mapping. `None` gives the defaults.

        Raises:
            `ValueError`: on an unknown key (with the nearest right one), a value out of range, or a file that is
                no mapping.
            `TypeError`: if it is none of these.
            `FileNotFoundError`: if the path does not exist.
        """
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        where = "moe_config"
        if isinstance(source, (str, os.PathLike)):
            where = f"moe_config file {os.fspath(source)!r}"
            source = _read_mapping(Path(source), where)
        if not isinstance(source, Mapping):
            raise TypeError(
                "moe_config must be a MoEConfig, a mapping, or a path to a YAML or JSON file; got "
                f"{type(source).__name__}."
            )
        if "moe_config" in source:
            source = source["moe_config"] or {}
            if not isinstance(source, Mapping):
                raise ValueError(f"{where}: the key 'moe_config' must hold a mapping, got {type(source).__name__}.")
        known = [field.name for field in fields(cls)]
        for key in source:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}."
                raise ValueError(f"{where}: unknown key {key!r}; {hint}")
        return cls(**source)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict, e.g. to log them or write them as YAML."""
        return asdict(self)


def _read_mapping(path: Path, where: str) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{where} does not exist.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is no valid JSON: {error}") from error
    else:
        import yaml

        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{where} is no valid YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must hold a mapping, got {type(content).__name__}.")
    return content
