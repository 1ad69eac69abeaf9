"""`MoEAutoModel`: what one import does, top to bottom."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import CONFIG_NAME, find_adapter_config_file, is_peft_available, logging

from . import block, dense, dispatch, experts, prefetch, recompute
from .checkpoint.initialize import initialize_sharded
from .checkpoint.load import loading
from .checkpoint.quantized import dequantizing_config
from .checkpoint.save import prepare_save
from .config import MoEConfig
from .dense import linear_attention
from .say import say_once
from .trainer import aux_loss, balancing, collective, expert_load, loops, nonfinite, resume, watch

_DTYPES = {"bf16": torch.bfloat16, "mixed": torch.float32, "fp32": torch.float32}


class MoEAutoModel(AutoModelForCausalLM):
    r"""
    [`~transformers.AutoModelForCausalLM`] for training Mixture-of-Experts models. It is used in its place, takes its
    arguments and one more, and returns the same classes:

    - in one process, the model with this library's experts;
    - under `torchrun` or `accelerate launch`, the model with its experts spread over the ranks (expert parallelism)
      and the rest sharded with FSDP2, each rank having read only its own experts;
    - for a dense checkpoint, exactly what `AutoModelForCausalLM` returns.

    This class cannot be instantiated directly using `__init__()` (throws an error).
    """

    @classmethod
    def from_pretrained(  # type: ignore[override]  # returns what the parent returns, whose type is private
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args,
        moe_config: MoEConfig | Mapping[str, Any] | str | os.PathLike | None = None,
        **kwargs,
    ) -> PreTrainedModel:
        r"""
        Load a pretrained model, see [`AutoModelForCausalLM.from_pretrained`][transformers.AutoModelForCausalLM].

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A model id on the Hub or a folder with a checkpoint.
            model_args (additional positional arguments, *optional*):
                Passed along to the model's `__init__()`.
            moe_config ([`MoEConfig`], mapping or path, *optional*):
                How the model is sharded and computed: a `MoEConfig`, a mapping of its fields, or a path to a YAML or
                JSON file with such a mapping (the fields themselves, or under one key `moe_config`).
            distributed_config ([`~transformers.distributed.DistributedConfig`], *optional*):
                Taken as it is, e.g. for tensor parallelism or HSDP. By default: FSDP2 over all ranks, with
                `moe_config.ep_size` of them sharing one copy of the experts.
            kwargs (additional keyword arguments, *optional*):
                As in `AutoModelForCausalLM.from_pretrained`.

        Returns:
            [`~transformers.PreTrainedModel`]: the transformers class of the checkpoint, in evaluation mode.

        Raises:
            `ValueError`: before any weight is read, for a `moe_config` or arguments that can't be had or combined, for
                an `ep_size` that does not divide the experts or the world, and for a checkpoint with missing or extra
                experts. The message names the argument, its value and the remedy.
            `ImportError`: if a backend or dispatcher was named whose package is not installed.

        Examples:

        ```python
        >>> from automodel_moe import MoEAutoModel as AutoModelForCausalLM

        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", moe_config={"ep_size": 8})
        ```
        """
        moe = MoEConfig.load(moe_config)
        model_config = _read_config(pretrained_model_name_or_path, kwargs)
        load = functools.partial(AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path, *model_args)
        return _load(load, model_config, moe, kwargs)

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        moe_config: MoEConfig | Mapping[str, Any] | str | os.PathLike | None = None,
        **kwargs,
    ) -> PreTrainedModel:
        r"""
        A model with random weights, see [`AutoModelForCausalLM.from_config`][transformers.AutoModelForCausalLM].

        Sharded as [`~MoEAutoModel.from_pretrained`] shards: each rank draws every module's full weights from one
        common seed and keeps its own part, one module at a time.

        Args:
            config ([`~transformers.PreTrainedConfig`]):
                The model's configuration.
            moe_config ([`MoEConfig`], mapping or path, *optional*):
                As in [`~MoEAutoModel.from_pretrained`].
            kwargs (additional keyword arguments, *optional*):
                As in `AutoModelForCausalLM.from_config`, and `distributed_config`.

        Returns:
            [`~transformers.PreTrainedModel`]: the transformers class of the configuration.

        Raises:
            As [`~MoEAutoModel.from_pretrained`].
        """
        moe = MoEConfig.load(moe_config)
        # Random weights are not quantized, even where the config is of a checkpoint that is.
        config = copy.deepcopy(config)
        for holder in (config, config.get_text_config()):
            vars(holder).pop("quantization_config", None)

        def build(**options):
            if options.get("distributed_config") is None:
                return AutoModelForCausalLM.from_config(config, **options)
            model_class = type(_on_meta(config, options))
            with _without_missing_report():
                model = model_class.from_pretrained(None, config=config, state_dict={}, **options)
            initialize_sharded(model)
            return model.train()

        return _load(build, config, moe, kwargs)


def auto_ep_size(num_experts: list[int], world_size: int, local_world_size: int) -> int:
    """
    The rule behind `ep_size="auto"`: the most ranks of one node that divide every layer's experts and the world.

    - It divides every layer's number of experts and the world: each rank holds whole experts, equally many.
    - It lies inside a node: a token crosses to several ranks and back in every layer, which NVLink carries and a
      network between nodes does not. Nodes hold copies of the experts, sharded between them by FSDP2.
    - It is the largest such number: the fewest expert weights a rank, and none gathered per layer within the node.

    Args:
        num_experts (`list[int]`): Experts of each MoE layer.
        world_size (`int`): Ranks that the experts can be spread over.
        local_world_size (`int`): Ranks of one node.

    Returns:
        `int`: 1 if no larger number fits.
    """
    return math.gcd(world_size, local_world_size, *num_experts)


@dataclass(frozen=True)
class _Job:
    """The processes that the launcher started."""

    world_size: int
    local_world_size: int

    @classmethod
    def current(cls) -> _Job:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
        # A launcher that doesn't say starts one process a device; without devices there is one node.
        devices = torch.accelerator.device_count() or world_size
        return cls(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", min(devices, world_size))))


@contextmanager
def _without_missing_report() -> Iterator[None]:
    """Every weight is missing from the empty state dict that a sharded `from_config` loads: no news, so no report."""
    modeling = logging.get_logger("transformers.modeling_utils")
    level = modeling.level
    modeling.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # What transformers draws here is drawn anew.
            warnings.filterwarnings("ignore", message="DTensor random operators")
            yield
    finally:
        modeling.setLevel(level)


def _load(load: Callable[..., Any], model_config: PreTrainedConfig, moe: MoEConfig, kwargs: dict[str, Any]) -> Any:
    """What both class methods do once they know the model's config: decide, load, finish."""
    job = _Job.current()
    meta = _on_meta(model_config, kwargs)
    modules = block.experts_modules(meta)
    outside_registries = model_config.get_text_config().model_type in block.WITHOUT_ADAPTER
    kwargs = kwargs | _dtype_argument(moe, kwargs)
    _check_counting(meta, modules if kwargs.get("experts_implementation") in (None, block.NAME) else {}, moe)
    if not modules and not outside_registries:
        _refuse_for_dense(meta, moe)
        return load(**kwargs)

    _refuse_what_cannot_be_combined(job, kwargs)
    dense.check(moe, kwargs.get("attn_implementation"))
    own_experts = kwargs.get("experts_implementation") in (None, block.NAME) and bool(modules)
    if own_experts:
        experts.check_installed(moe.experts)
        dispatch.check_installed(moe.dispatcher)
        kwargs["experts_implementation"] = block.NAME
    else:
        why = f"experts_implementation={kwargs.get('experts_implementation')!r}; give one of the two"
        if not modules:
            why = f"{type(meta).__name__}, whose block computes its own experts; leave it at 'auto'"
        for name in ("experts", "recompute"):
            if getattr(moe, name) != "auto":
                raise ValueError(f"moe_config: {name}={getattr(moe, name)!r} can't be used with {why}.")
    if moe.recompute in recompute.CHECKPOINTED and not meta.supports_gradient_checkpointing:
        raise ValueError(
            f"moe_config: recompute={moe.recompute!r} checkpoints layers, which {type(meta).__name__} does not "
            "support; leave it at 'auto'."
        )
    quantization = dequantizing_config(model_config, kwargs.get("quantization_config"), sharded=job.world_size > 1)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    distributed = _distributed_config(meta, modules, job, moe, kwargs.pop("distributed_config", None), own_experts)
    if distributed is not None:
        kwargs.pop("device_map", None)  # checked above: it names the device that this rank gets anyway
        kwargs["distributed_config"] = distributed
        collective.ensure_process_group(moe.group_timeout)
        watch.start(moe.group_timeout)
        collective.agree("moe_config and distributed_config", (moe.to_dict(), distributed.to_dict()))

    def prepare(model: PreTrainedModel) -> None:
        if own_experts:
            block.attach(model, moe)
        model._ep_plan = block.expert_parallel_plan(model)

    block.register()
    with loading(prepare, block.is_experts_module):
        loaded = load(**kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
    _finish(model, moe, distributed, own_experts)
    dense.finish(model, moe, kwargs.get("attn_implementation"))
    return loaded


def _finish(model: PreTrainedModel, moe: MoEConfig, distributed: DistributedConfig | None, own_experts: bool) -> None:
    vars(model)["automodel_moe"] = moe
    if own_experts:
        block.attach(model, moe)
        block.finish(model)
    prepare_save(model)
    resume.install()
    aux_loss.install(model)
    if moe.load_stats or moe.router_bias_update_rate:
        _count(model, moe, distributed)
    if moe.skip_nonfinite_steps:
        nonfinite.install(model)
    linear_attention.install(model, moe.linear_attention)
    if distributed is None:
        if moe.precision == "mixed":
            _compute_in_bf16(model)
        return
    collective.guard_calls(model, moe.call_timeout)
    collective.bound_groups(model, moe.group_timeout)
    watch.follow(model, block.experts_modules(model))
    prefetch.install(model, block.experts_modules(model), moe.prefetch)
    loops.install()
    _accept_own_device(model)
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _RefuseDDP()
    # Not in a collective: their time-out would start to run while a slow disk still reads.
    collective.meet("MoEAutoModel.from_pretrained", collective.LOAD_TIMEOUT)


def _count(model: PreTrainedModel, moe: MoEConfig, distributed: DistributedConfig | None) -> None:
    modules = block.experts_modules(model)
    sizes = (1, 1) if distributed is None else (distributed.ep_size or 1, distributed.tp_size or 1)
    counts = expert_load.install(model, modules, *sizes)
    if moe.router_bias_update_rate:
        balancing.install(model, modules, counts, moe.router_bias_update_rate)


# --- deciding --------------------------------------------------------------------------------------------------------


def _read_config(name_or_path: str | os.PathLike, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    """The checkpoint's config, with what `kwargs` overrides in it, read as `AutoModelForCausalLM` will read it."""
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config
    options = {k: v for k, v in kwargs.items() if k not in ("config", "dtype", "torch_dtype", "quantization_config")}
    options.pop("experts_implementation", None)
    source = config or _base_model(name_or_path, kwargs)
    return AutoConfig.from_pretrained(source, return_unused_kwargs=True, **options)[0]


def _base_model(name_or_path: str | os.PathLike, kwargs: Mapping[str, Any]) -> str | os.PathLike:
    """The model that a PEFT adapter names as its base; any other path or id as it is."""
    if not is_peft_available():
        return name_or_path
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    options = {name: kwargs[name] for name in names if name in kwargs} | (kwargs.get("adapter_kwargs") or {})
    adapter = find_adapter_config_file(os.fspath(name_or_path), **options)
    # A folder that holds a whole model beside its adapter is its own base.
    if adapter is None or os.path.exists(os.path.join(name_or_path, CONFIG_NAME)):
        return name_or_path
    with open(adapter, encoding="utf-8") as file:
        return json.load(file)["base_model_name_or_path"]


def _on_meta(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """The model without memory, to read its structure, tied weights included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=kwargs.get("trust_remote_code")
        )
    block.adapt_blocks(model)
    return model


def _dtype_argument(moe: MoEConfig, kwargs: Mapping[str, Any]) -> dict[str, torch.dtype]:
    if moe.precision == "auto":
        return {}
    dtype = _DTYPES[moe.precision]
    for name in ("dtype", "torch_dtype"):
        asked = kwargs.get(name)
        if asked not in (None, "auto", dtype) and str(asked).removeprefix("torch.") != str(dtype).removeprefix(
            "torch."
        ):
            raise ValueError(
                f"{name}={asked} and moe_config: precision={moe.precision!r} (weights in {dtype}) contradict each "
                f"other; leave out one of the two."
            )
    return {"dtype": dtype}


# Fields, or values of them, that ask for nothing that a dense model hasn't.
_OF_ANY_MODEL = {"group_timeout", "call_timeout", ("ep_size", 1), ("precision", "bf16"), ("precision", "fp32")}
_OTHERWISE = {
    "precision": "use TrainingArguments(bf16=True) for bfloat16 compute with float32 weights",
    "recompute": "use TrainingArguments(activation_checkpointing=True)",
}


def _refuse_for_dense(meta: PreTrainedModel, moe: MoEConfig) -> None:
    for field in dataclasses.fields(moe):
        name, value = field.name, getattr(moe, field.name)
        asked = value != field.default and value not in ("none", "model")
        if asked and name not in _OF_ANY_MODEL and (name, value) not in _OF_ANY_MODEL:
            raise ValueError(
                f"moe_config: {name}={value!r}, but {type(meta).__name__} has no MoE experts and loads as in "
                f"transformers; {_OTHERWISE.get(name, 'leave it out')}."
            )


def _check_counting(meta: PreTrainedModel, modules: Mapping[str, Any], moe: MoEConfig) -> None:
    for name in ("load_stats", "router_bias_update_rate"):
        if getattr(moe, name) and not modules:
            raise ValueError(
                f"moe_config: {name}={getattr(moe, name)} counts tokens on their way into this library's experts, and "
                f"{type(meta).__name__} has none here: it is dense, computes its own experts, or is loaded with "
                "another experts_implementation. Leave it out."
            )
    if moe.router_bias_update_rate:
        balancing.check(meta, modules, moe.router_bias_update_rate)


def _refuse_what_cannot_be_combined(job: _Job, kwargs: Mapping[str, Any]) -> None:
    for variable, what in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise ValueError(
                f"{variable} is set: accelerate would shard the model with {what} again. MoEAutoModel shards it while "
                f"it loads; launch without {what} (`accelerate launch --multi_gpu`, or `torchrun`)."
            )
    for name in ("tp_plan", "tp_size"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}={kwargs[name]!r} can't be combined with MoEAutoModel: pass "
                "distributed_config=DistributedConfig(tp_size=..., fsdp_size=..., ep_size=...) instead."
            )
    device_map = kwargs.get("device_map")
    if job.world_size == 1 or device_map is None:
        return
    own = _own_device()
    named = device_map
    if isinstance(device_map, Mapping) and set(device_map) == {""}:
        named = device_map[""]
    if isinstance(named, int) and not isinstance(named, bool):
        named = torch.device(own.type, named) if own.type != "cpu" else None if named else own
    elif isinstance(named, str) and named not in ("auto", "balanced", "balanced_low_0", "sequential"):
        named = torch.device(named)
    if isinstance(named, torch.device) and named.type == own.type and named.index in (None, own.index):
        return
    raise ValueError(
        f"device_map={device_map!r} can't be combined with {job.world_size} processes: each rank gets its own part of "
        f"the model, on its own device ({own}). Leave device_map out."
    )


def _own_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def _distributed_config(
    meta: PreTrainedModel,
    modules: Mapping[str, Any],
    job: _Job,
    moe: MoEConfig,
    given: DistributedConfig | Mapping[str, Any] | None,
    own_experts: bool,
) -> DistributedConfig | None:
    """The `DistributedConfig` to load with, or None for one process. The user's own is kept, our transport added."""
    num_experts: list[int] = [module.num_experts for module in modules.values()]
    tied = block.tied_experts(modules)
    if given is None:
        if job.world_size == 1:
            if moe.ep_size not in ("auto", 1):
                raise ValueError(
                    f"moe_config: ep_size={moe.ep_size} needs at least that many processes, and there is 1: start the "
                    f"script with `torchrun --nproc-per-node {moe.ep_size} script.py`."
                )
            return None
        if isinstance(moe.ep_size, int):
            ep_size = moe.ep_size
        else:
            ep_size, why = 1, "the experts can't be spread: FSDP2 shards them"
            if num_experts and not tied:
                ep_size = auto_ep_size(num_experts, job.world_size, job.local_world_size)
                why = f"the most of a node's {job.local_world_size} ranks that divide the experts"
            say_once(f"ep_size='auto': {ep_size} of {job.world_size} ranks share one copy of the experts ({why})")
        config = None
    else:
        fields = given.to_dict() if isinstance(given, DistributedConfig) else dict(given)
        if fields.get("ep_size") in (None, 1) and isinstance(moe.ep_size, int):
            fields["ep_size"] = moe.ep_size  # left out there, 1 is what it becomes
        config = DistributedConfig.from_dict(fields)
        ep_size = config.ep_size or 1
        if moe.ep_size not in ("auto", ep_size):
            raise ValueError(
                f"moe_config: ep_size={moe.ep_size} and distributed_config.ep_size={ep_size} contradict each other; "
                "leave out one of the two."
            )
    if ep_size > 1 and not modules:
        raise ValueError(
            f"ep_size={ep_size}, but the MoE block of {meta.config.get_text_config().model_type!r} is outside "
            "transformers' experts registry and has no block adapter here: use ep_size=1, which shards its experts "
            "with FSDP2."
        )
    if ep_size > 1 and tied:
        raise ValueError(
            f"ep_size={ep_size}, but {tied[0]} and {tied[1]} are the same experts under two names, which would be "
            "spread twice: use ep_size=1, which shards them with FSDP2."
        )
    if job.world_size % ep_size:
        raise ValueError(
            f"ep_size={ep_size} does not divide the {job.world_size} processes of this job; use one of "
            f"{_divisors(math.gcd(job.world_size, *num_experts))}."
        )
    for name, module in modules.items():
        if module.num_experts % ep_size:
            raise ValueError(
                f"ep_size={ep_size} does not divide the {module.num_experts} experts of {name}; use one of "
                f"{_divisors(math.gcd(job.world_size, *num_experts))}."
            )
    if config is None:
        config = DistributedConfig(fsdp_size=job.world_size, ep_size=ep_size)
    if own_experts and ep_size > 1 and config.ep_implementation == "auto":
        config.ep_implementation = block.NAME
    if moe.precision == "mixed":
        config.fsdp_mixed_precision = True
    return config


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


# --- finishing -------------------------------------------------------------------------------------------------------


def _compute_in_bf16(model: PreTrainedModel) -> None:
    """`precision="mixed"` in one process, where no FSDP2 casts the weights: autocast around the forward."""
    # No closure: a copy or a pickle of the model, e.g. a reference model, runs itself and not the original.
    forward = functools.partial(_forward_in_bf16, model)
    vars(model)["forward"] = functools.update_wrapper(forward, model.forward)


def _forward_in_bf16(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(model.device.type, torch.bfloat16):
        return type(model).forward(model, *args, **kwargs)


class _RefuseDDP:
    """What `DistributedDataParallel(model)` reads before anything else: its own error would speak of `aten.cat`."""

    def __iter__(self):
        raise ValueError(
            "DistributedDataParallel(model): MoEAutoModel has sharded this model while loading, and its gradients are "
            "already reduced over the ranks. Use the model itself, without the DDP wrap."
        )


def _accept_own_device(model: PreTrainedModel) -> None:
    """Let `.to(device)` of the device that the model is on pass, as scripts have it; refuse any other move."""

    @functools.wraps(type(model).to)
    def to(self, *args, **kwargs):
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and dtype != self.dtype:
            raise ValueError(
                f"model.to({dtype}): a sharded model keeps the dtype it was loaded in ({self.dtype}); pass dtype= or "
                "moe_config={'precision': ...} to from_pretrained."
            )
        own = self.device
        if device is not None and (device.type != own.type or device.index not in (None, own.index)):
            raise ValueError(
                f"model.to({device}): this rank's part of a sharded model stays on {own}, where it was loaded."
            )
        return self

    vars(model)["to"] = types.MethodType(to, model)
