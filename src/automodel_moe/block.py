"""Where transformers' MoE blocks meet this library: the driver, the padding hooks and the block adapters.

    hidden x_TH -- router (the model's own) -- topk_idx_TK, topk_weights_TK      (padding: idx -1, weight 0)
          v  dispatch            each token travels once to each rank that holds one of its experts
    Rows(x_RH, idx_RK, weights_RK)
          v  experts function    the same function on one GPU and on 64
    y_RH
          v  combine             unweighted sum over ranks
    y_TH

Legend of the shape suffixes: T tokens here, R rows received, K top-k, H hidden, E experts, B batch, S sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import dispatch, experts
from .config import MoEConfig
from .say import say_once

NAME = "automodel"  # our entry in transformers' registries


@dataclass
class BlockState:
    """What the library keeps on one experts module, as its attribute `automodel`."""

    config: MoEConfig
    routed: RoutedTokens
    driver: Driver | None = None


# --- the experts function --------------------------------------------------------------------------------------------


def experts_function(
    module: Any, x_RH: torch.Tensor, idx_RK: torch.Tensor, weights_RK: torch.Tensor, n_pairs: int | None = None
) -> torch.Tensor:
    """The entry `"automodel"` of transformers' `ALL_EXPERTS_FUNCTIONS`: the backend that the module's config names."""
    state: BlockState = module.automodel
    # Chosen anew each time: autocast, or FSDP2's mixed precision, may change the dtype between two forwards.
    backend = experts.choose(state.config.experts, module, x_RH.device)
    return backend(module, x_RH, idx_RK, weights_RK, n_pairs=n_pairs)


def fp8_experts_function(
    module: nn.Module, x_RH: torch.Tensor, idx_RK: torch.Tensor, weights_RK: torch.Tensor
) -> torch.Tensor:
    """The entry `"automodel"` of transformers' `ALL_FP8_EXPERTS_FUNCTIONS`: transformers' own FP8 function.

    Raises:
        `RuntimeError`: in training. FP8 weights have no gradient.
    """
    if torch.is_grad_enabled() and (x_RH.requires_grad or weights_RK.requires_grad):
        raise RuntimeError(
            "FP8 experts can't be trained: load the checkpoint with "
            "quantization_config=FineGrainedFP8Config(dequantize=True), which MoEAutoModel does by itself when no "
            "quantization_config is given."
        )
    # Slots of padding have id -1, which that function does not know, and weight 0, which it does.
    return ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"](module, x_RH, idx_RK.clamp(min=0), weights_RK)


def register() -> None:
    """Enter the library's names in transformers' registries; repeated calls change nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_function)
    EPImplementationInterface.register(NAME, Driver)


# --- the driver ------------------------------------------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    """Tokens and weights to their experts' ranks; in backward their gradients come back along the same plan."""

    @staticmethod
    def forward(ctx, x_TH, weights_TK, anchor, transport, plan):
        ctx.transport, ctx.plan, ctx.dtypes = transport, plan, (x_TH.dtype, weights_TK.dtype)
        return transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_RH, dweights_RK):
        transport = ctx.transport
        dx_TH, dweights_TK = transport.combine_finish(transport.combine_start(ctx.plan, dx_RH, dweights_RK))
        return dx_TH.to(ctx.dtypes[0]), dweights_TK.to(ctx.dtypes[1]), None, None, None


class _Combine(torch.autograd.Function):
    """Rows back to their tokens' ranks, summed per token; in backward the tokens' gradient goes out along the plan."""

    @staticmethod
    def forward(ctx, y_RH, transport, plan):
        ctx.transport, ctx.plan = transport, plan
        return transport.combine_finish(transport.combine_start(plan, y_RH))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        return ctx.transport.dispatch_finish(ctx.transport.dispatch_start(ctx.plan, dy_TH))[0], None, None


class Driver(EPImplementation):
    """The entry `"automodel"` of transformers' `EPImplementationInterface`: dispatch, experts, combine.

    Args:
        experts (`nn.Module`): An experts module whose parameters already are this rank's shard.
        ep_mesh (`DeviceMesh`): The ranks that together hold all experts.
        tp_mesh (`DeviceMesh`): The ranks that hold the same tokens: each takes its own slice of them through the
            experts, and all get the whole back.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        state: BlockState = experts.automodel
        self.choose = functools.partial(
            dispatch.choose,
            state.config.dispatcher,
            ep_mesh.get_group(),
            int(experts.num_experts),
            max_tokens=None if state.config.max_tokens == "auto" else int(state.config.max_tokens),
        )
        # By the dtype of what is sent, which is known in a forward alone: autocast may change it between two.
        self.transports: dict[torch.dtype, dispatch.Transport] = {}
        self.experts = experts
        state.driver = self

    def __call__(self, x_TH: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        n_tokens = x_TH.size(0)
        if torch.is_autocast_enabled(x_TH.device.type):
            x_TH = x_TH.to(torch.get_autocast_dtype(x_TH.device.type))
        weights_TK = weights_TK.float()
        if self.tp_mesh.size() > 1:
            x_TH, idx_TK, weights_TK = (self._own_slice(t) for t in (x_TH, idx_TK, weights_TK))

        differentiable = torch.is_grad_enabled() and (
            x_TH.requires_grad or weights_TK.requires_grad or any(p.requires_grad for p in self.experts.parameters())
        )
        if x_TH.dtype not in self.transports:
            self.transports[x_TH.dtype] = self.choose(x_TH=x_TH)
        transport = self.transports[x_TH.dtype]
        plan = transport.plan(idx_TK, x_TH, differentiable)
        # Where this rank's own inputs need no gradient, the anchor keeps the exchange in the graph all the same: every
        # rank of the group must run the same collectives in backward.
        anchor = x_TH.new_zeros((), requires_grad=torch.is_grad_enabled())
        x_RH, weights_RK = _Dispatch.apply(x_TH, weights_TK, anchor, transport, plan)
        if plan.differentiable and not torch.is_grad_enabled():
            raise RuntimeError(
                "Another rank of the expert-parallel group is training while this one runs without gradients "
                "(torch.no_grad, or an evaluation): its backward would wait for this rank for ever. Every rank must "
                "do the same step."
            )
        rows = dispatch.Rows(x_RH, plan.idx_RK, weights_RK, plan.n_pairs)
        if not plan.differentiable:
            rows = dispatch.Rows(x_RH.detach(), rows.idx_RK, weights_RK.detach(), rows.n_pairs)

        y_RH = self.experts_forward(rows.x_RH, rows.idx_RK, rows.weights_RK, n_pairs=rows.n_pairs)
        y_TH = _Combine.apply(y_RH, transport, plan)
        if self.tp_mesh.size() > 1:
            y_TH = self._whole(y_TH, n_tokens)
        return y_TH

    def _own_slice(self, tensor: torch.Tensor) -> torch.Tensor:
        # Replicate -> Shard is a local cut; its backward gathers the slices' gradients.
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _whole(self, slice_tH: torch.Tensor, n_tokens: int) -> torch.Tensor:
        hidden = slice_tH.size(1)
        return DTensor.from_local(
            slice_tH.contiguous(), self.tp_mesh, [Shard(0)], shape=torch.Size((n_tokens, hidden)), stride=(hidden, 1)
        ).full_tensor()


# --- padding ---------------------------------------------------------------------------------------------------------


@dataclass
class RoutedTokens:
    """Which positions of the forward in progress reach an expert: those of the 2-D attention mask, and those that the
    loss scores. One instance a model; its methods are the model's hooks, so that copies of a model have their own."""

    routed_BS: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    _looked: bool = field(default=False, repr=False)

    def install(self, model: PreTrainedModel) -> None:
        """Hook the model, its base model, which gets the mask whoever calls it, and its experts."""
        if model.base_model is not model:
            model.register_forward_pre_hook(self.note_labels, with_kwargs=True)
            model.register_forward_hook(self.forget_labels, with_kwargs=True, always_call=True)
        model.base_model.register_forward_pre_hook(self.note_mask, with_kwargs=True)
        for module in experts_modules(model).values():
            module.register_forward_pre_hook(self.mask_padding, with_kwargs=True)

    def note_labels(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.labels = kwargs.get("labels")

    def forget_labels(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self.labels = None

    def note_mask(self, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = _signature(type(base).forward).bind_partial(base, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        mask = arguments.get("attention_mask")
        self.routed_BS = None
        # A 4-D mask or a packed batch marks no padding.
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and isinstance(inputs, torch.Tensor):
            self.routed_BS = self._routed(mask, inputs.size(1))

    def _routed(self, mask: torch.Tensor, n_columns: int) -> torch.Tensor | None:
        if mask.size(1) < n_columns:
            return None
        routed_BS = mask[:, mask.size(1) - n_columns :] != 0  # a cache holds the columns before
        if self.labels is None or self.labels.shape != routed_BS.shape:
            return routed_BS
        labelled_BS = self.labels.to(routed_BS.device) != -100
        # transformers shifts labels by one: what position s predicts is scored against label s + 1, so under left
        # padding the last padded position is part of the loss and must stay as transformers computes it.
        scored_BS = labelled_BS.clone()
        scored_BS[:, :-1] |= labelled_BS[:, 1:]
        # A look at the values makes the host wait for the device: the first batch shows what the collator does.
        looked = self._looked or torch.compiler.is_compiling()
        if not looked and bool((labelled_BS & ~routed_BS).any()):
            say_once(
                "Some positions have attention_mask 0 and a label other than -100. They stay routed to experts; set "
                "their labels to -100 if they are padding."
            )
        self._looked = True
        return routed_BS | scored_BS

    def mask_padding(self, experts: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        x_TH, idx_TK, weights_TK = (arguments[name] for name in names)
        if self.routed_BS is None or self.routed_BS.numel() != idx_TK.size(0):
            return None
        routed_T1 = self.routed_BS.to(idx_TK.device).reshape(-1, 1)
        return (x_TH, torch.where(routed_T1, idx_TK, -1), torch.where(routed_T1, weights_TK, 0.0)), {}

    @contextmanager
    def replay(self, routed_BS: torch.Tensor | None) -> Iterator[None]:
        """Recompute an earlier forward under the mask that it ran with: another one may have run since."""
        current, self.routed_BS = self.routed_BS, routed_BS
        try:
            yield
        finally:
            self.routed_BS = current

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """`context_fn` of `torch.utils.checkpoint`: the mask of now, kept for the recompute."""
        return nullcontext(), self.replay(self.routed_BS)


@functools.cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def _enable_checkpointing(
    model: PreTrainedModel, routed: RoutedTokens, options: dict[str, Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    """A model's `_activation_checkpointing_enable`, so that a layer's recompute has the mask of its own forward."""
    options = dict(kwargs.pop("activation_checkpointing_kwargs", options) or {})
    if options.get("use_reentrant"):
        say_once("use_reentrant=True: using the non-reentrant form, which keeps each forward's padding mask.")
    if "context_fn" in options:
        options["context_fn"] = functools.partial(_both_contexts, routed.checkpoint_contexts, options["context_fn"])
    options = {"context_fn": routed.checkpoint_contexts} | options | {"use_reentrant": False}
    type(model)._activation_checkpointing_enable(model, options, *args, **kwargs)


def _both_contexts(own: Callable[[], tuple[Any, Any]], users: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Two `context_fn`s of `torch.utils.checkpoint` as one."""
    (own_forward, own_recompute), (users_forward, users_recompute) = own(), users()
    return _entered(own_forward, users_forward), _entered(own_recompute, users_recompute)


@contextmanager
def _entered(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# --- block adapters --------------------------------------------------------------------------------------------------


class InputScaledTopK:
    """Blocks that scale a token by its score BEFORE the expert and run every expert on every token.

    Each (token, slot) becomes a row of its own, already scaled, with weight 1: the same sum with K rows instead of E.
    """

    experts = "experts"

    @staticmethod
    def adapt(block: Any, config: Any) -> None:
        module = block.experts
        # What transformers' decorator sets on experts modules of the registries.
        module.config = config
        module.has_gate, module.has_bias, module.has_post_expert_norm = True, False, False
        module.is_transposed, module.is_concatenated = True, True
        module._is_expert_parallel = False
        module._apply_gate = functools.partial(_gate_concatenated, module.act_fn)
        module.forward = functools.partial(experts_function, module)
        block.forward = functools.partial(InputScaledTopK.forward, block)

    @staticmethod
    def forward(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH = hidden_states.reshape(-1, block.hidden_dim)
        scores_TE, logits_TE = block.router(x_TH)
        idx_TK = logits_TE.topk(block.top_k, dim=-1).indices
        rows_TKH = x_TH[:, None] * scores_TE.gather(1, idx_TK)[..., None]
        idx_R1 = idx_TK.reshape(-1, 1)
        y_RH = block.experts(rows_TKH.flatten(0, 1), idx_R1, torch.ones_like(idx_R1, dtype=torch.float32))
        return block.shared_expert(x_TH) + y_RH.view_as(rows_TKH).sum(1), logits_TE


def _gate_concatenated(act_fn: Callable, gate_up_N2I: torch.Tensor) -> torch.Tensor:
    gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
    return act_fn(gate_NI) * up_NI


# Blocks outside transformers' registries: class name -> adapter. One small class a kind of block.
ADAPTERS: Mapping[str, Any] = {"Llama4TextMoe": InputScaledTopK}

# Model types whose MoE blocks are outside the registries and have no adapter: FSDP2 shards them, EP can't.
WITHOUT_ADAPTER = ("longcat_flash", "jetmoe", "step3p7", "dbrx", "doge")


def adapt_blocks(model: nn.Module) -> None:
    """Adapt, in place, the model's blocks that `ADAPTERS` names. Repeated calls change nothing."""
    for module in model.modules():
        adapter = ADAPTERS.get(type(module).__name__)
        if adapter is not None and not is_experts_module(getattr(module, adapter.experts)):
            adapter.adapt(module, model.config)


# --- what auto.py calls ----------------------------------------------------------------------------------------------


def is_experts_module(module: nn.Module) -> bool:
    """Whether transformers dispatches this module through its experts registry (its decorator leaves this mark)."""
    return "_is_expert_parallel" in vars(module)


def experts_modules(model: nn.Module) -> dict[str, Any]:
    """The model's experts modules by name, adapted ones included."""
    return {name: module for name, module in model.named_modules() if is_experts_module(module)}


def tied_experts(modules: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of two experts modules that share a parameter, if there are such."""
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module.parameters():
            if owners.setdefault(id(parameter), name) != name:
                return owners[id(parameter)], name
    return None


def expert_parallel_plan(model: nn.Module) -> dict[str, str]:
    """The EP plan in transformers' terms, read off the modules: whole experts per rank, and nothing else.

    Derived rather than taken from the model's config, because some configs have none and some put dense layers on the
    expert mesh, which FSDP2 refuses ("Cannot concatenate overlapping meshes").
    """
    plan = {}
    for name, module in experts_modules(model).items():
        wildcard = replace_layer_number_by_wildcard(name)
        plan[wildcard] = "ep_dispatch_experts"
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.size(0) == module.num_experts:
                plan[f"{wildcard}.{parameter_name}"] = "grouped_gemm"
        for child_name, child in module.named_modules():
            # A norm that all experts share: each rank's gradient of it covers only the rows of its own experts.
            if child_name and any(True for _ in child.parameters(recurse=False)):
                plan[f"{wildcard}.{child_name}"] = "replicated_with_grad_allreduce"
    return plan


def attach(model: nn.Module, config: MoEConfig) -> None:
    """Adapters, and the state that the driver and the experts function will find on each experts module.

    Works on a model whose weights are not there yet; repeated calls change nothing.
    """
    adapt_blocks(model)
    routed = RoutedTokens()
    for module in experts_modules(model).values():
        vars(module).setdefault("automodel", BlockState(config, routed))


def finish(model: PreTrainedModel) -> None:
    """Install the hooks on a loaded model."""
    modules = list(experts_modules(model).values())
    if modules:
        routed: RoutedTokens = modules[0].automodel.routed
        routed.install(model)
        enable = functools.partial(_enable_checkpointing, model, routed)
        vars(model)["_activation_checkpointing_enable"] = enable
