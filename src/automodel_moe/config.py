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
EXPERTS = ("auto", "quack", "triton", "torch")
PRECISIONS = ("auto", "bf16", "mixed", "fp32")
DISPATCH_DTYPES = ("auto", "fp8")
LOSSES = ("auto", "chunked", "quack", "model")
NORMS = ("auto", "quack", "model")
ROTARIES = ("auto", "triton", "model")
ATTENTIONS = ("auto", "flash4", "model")
LINEAR_ATTENTION = ("auto", "triton", "model")
OVERLAP = ("auto", "none", "halves")
RECOMPUTE = ("auto", "none", "activation", "experts", "layer")


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
            How experts compute: `"torch"` (grouped_mm where torch has it, one GEMM an expert elsewhere), `"triton"`
            (our own kernels: every layout, bfloat16 and float16, Nvidia GPUs from Ampere on) or `"quack"` (SwiGLU
            experts, or experts without a gate, in bfloat16 on a Hopper GPU; needs `automodel-moe[cuda]`).
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
        router_bias_update_rate (`float`, *optional*, defaults to 0.0):
            Aux-loss-free balancing, for routers with an `e_score_correction_bias`: how far each optimizer step moves
            the bias of an expert that got fewer or more of all ranks' tokens than the mean, up or down. 0.001 is what
            was published (arXiv:2408.15664); 0.0 leaves the biases alone.
        load_stats (`bool`, *optional*, defaults to `False`):
            Count on the device how many tokens each expert gets, for [`~automodel_moe.load_imbalance`] and Trainer's
            logs.
        skip_nonfinite_steps (`bool`, *optional*, defaults to `False`):
            Skip, on all ranks together, an optimizer step in which a gradient on any rank is infinite or NaN. Each
            step then waits once for the device. Under float16 `GradScaler` does it anyway.
        loss (`str`, *optional*, defaults to `"auto"`):
            The output layer with its cross-entropy, in training: `"chunked"` (any device) or `"quack"` (bfloat16 on a
            Hopper GPU; needs `automodel-moe[cuda]`; faster, and its gradients are further from float32 than
            transformers': `"auto"` leaves it out) never hold all logits, which `outputs.logits` computes when it is
            read; `"model"` is transformers' own.
            Of this and the next three, `"auto"` picks the fastest that can run here and says so once; on the CPU
            that is the model's own.
        norm (`str`, *optional*, defaults to `"auto"`):
            RMSNorm: `"quack"` (a Hopper GPU or newer; needs `automodel-moe[cuda]`), or `"model"`.
        rotary (`str`, *optional*, defaults to `"auto"`):
            Rotary position embeddings: `"triton"` (CUDA), or `"model"`.
        attention (`str`, *optional*, defaults to `"auto"`):
            Attention without padding: `"flash4"` (FlashAttention 4 on a Hopper GPU or newer; needs
            `automodel-moe[cuda]`), or `"model"`. An `attn_implementation` that you pass is kept.
        linear_attention (`str`, *optional*, defaults to `"auto"`):
            How the Mamba-2 and gated-delta layers of a hybrid model compute: `"triton"` (Triton kernels on a CUDA
            device; those of gated delta are fla-core's, from `automodel-moe[hybrid]`, and neither needs a compiler) or
            `"model"` (what transformers runs: plain torch, several times slower, unless the compiled packages that it
            looks for are installed). Sequences packed into a row stay apart with each.
            `"auto"`: triton where it can run, and says so once.
        recompute (`str`, *optional*, defaults to `"auto"`):
            What is computed again in backward instead of kept.

            - `"auto"`: `"layer"` where the Trainer's flag (`activation_checkpointing=True`, or its older name
              `gradient_checkpointing=True`) or the model's own method turns checkpointing on, else `"none"`.
            - `"none"`: nothing.
            - `"activation"`: within the experts, what follows from their rows; no layer is checkpointed.
            - `"experts"`: layers are checkpointed, without a second send: the rows that a rank received are kept,
              up to `num_experts_per_tok` (on average fewer) times a layer's input.
            - `"layer"`: layers are checkpointed, and rows are sent a second time.

            In no level is a token routed a second time or a size exchanged twice. `"experts"` and `"layer"` turn
            checkpointing on when the model is loaded; the flag's options (`every_n_layers`, `offload`, ...) are
            honoured beside them, `offload` for what the layers were given, not for the rows kept. The flag beside
            `"none"` or `"activation"` raises.
        overlap (`str`, *optional*, defaults to `"auto"`):
            What runs while tokens travel between ranks.

            - `"auto"`: the shared experts, in the blocks that `automodel_moe.overlap` knows.
            - `"none"`: nothing.
            - `"halves"`: as `"auto"`, and each MoE block takes the batch in two halves, so that one half's experts
              run while the other's rows travel. Twice as many transfers and experts' GEMMs, of half the size.
        group_timeout (`float`, *optional*, defaults to 300):
            Seconds within which a rank that stands still ends the job, with its name and place. A process that is gone
            ends it within a minute. For the groups that `from_pretrained` makes it is also the time-out of their
            collectives; a process group that already exists keeps its own.
        call_timeout (`float`, *optional*, defaults to 60):
            Seconds that `save_pretrained` and `generate` of a sharded model wait for the other ranks to call them
            too, before they raise.
        prefetch (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            How many layers ahead FSDP2 starts to gather parameters; one more than that are whole at a time.
            0 leaves FSDP2's own order. `"auto"`: 1 where the experts are sharded with FSDP2 (`ep_size=1`, or copies
            of the experts on several nodes), else 0.
        dispatch_dtype (`str`, *optional*, defaults to `"auto"`):
            In what tokens travel to their experts in forward: `"auto"`, the compute dtype, or `"fp8"`, e4m3 with a
            scale for each 128 columns (`"all_to_all"` only): half of bfloat16's bytes, and each number up to 1/16
            off. What comes back, and the gradients, travel in the compute dtype either way.
        row_capacity (`int`, *optional*):
            Rows that a rank sends to another in a layer at most (`"all_to_all"` only). With it no host waits for
            counts: all transfers have this size, whatever is in them. A batch that needs more gives not-a-number, and
            an error on every rank in the next forward. By default transfers are as large as they need to be, for one
            host read a layer.
    """

    ep_size: int | str = "auto"
    dispatcher: str = "auto"
    max_tokens: int | str = "auto"
    experts: str = "auto"
    precision: str = "auto"
    router_bias_update_rate: float = 0.0
    load_stats: bool = False
    skip_nonfinite_steps: bool = False
    loss: str = "auto"
    norm: str = "auto"
    rotary: str = "auto"
    attention: str = "auto"
    linear_attention: str = "auto"
    recompute: str = "auto"
    overlap: str = "auto"
    group_timeout: float = 300.0
    call_timeout: float = 60.0
    prefetch: int | str = "auto"
    dispatch_dtype: str = "auto"
    row_capacity: int | None = None

    def __post_init__(self):
        for name, least in (("ep_size", 1), ("max_tokens", 1), ("prefetch", 0)):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f'moe_config: {name}={value!r} must be "auto" or an integer of at least {least}.')
        for name, choices in (
            ("dispatcher", DISPATCHERS),
            ("experts", EXPERTS),
            ("precision", PRECISIONS),
            ("dispatch_dtype", DISPATCH_DTYPES),
            ("loss", LOSSES),
            ("norm", NORMS),
            ("rotary", ROTARIES),
            ("attention", ATTENTIONS),
            ("linear_attention", LINEAR_ATTENTION),
            ("recompute", RECOMPUTE),
            ("overlap", OVERLAP),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"moe_config: {name}={value!r} is none of {', '.join(map(repr, choices))}.")
        rate = self.router_bias_update_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < float("inf"):
            raise ValueError(f"moe_config: router_bias_update_rate={rate!r} must be a number of at least 0.0.")
        for name in ("load_stats", "skip_nonfinite_steps"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"moe_config: {name}={value!r} must be True or False.")
        if self.row_capacity is not None:
            value = self.row_capacity
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"moe_config: row_capacity={value!r} must be None or an integer of at least 1.")
            if self.dispatcher == "deepep":
                raise ValueError(
                    f"moe_config: row_capacity={value} can't be had with dispatcher='deepep'; leave out one of them."
                )
        if self.dispatch_dtype != "auto" and self.dispatcher == "deepep":
            raise ValueError(
                f"moe_config: dispatch_dtype={self.dispatch_dtype!r} can't be had with dispatcher='deepep', whose "
                "rows are bfloat16 here; leave out one of the two."
            )
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
