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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import dispatch, experts, overlap, recompute
from .config import MoEConfig
from .overlap import Beside
from .recompute import Recompute, experts_arguments
from .say import say_once
from .trip import Trip

NAME = "automodel"  # our entry in transformers' registries


@dataclass
class BlockState:
    """What the library keeps on one experts module, as its attribute `automodel`."""

    config: MoEConfig
    routed: RoutedTokens
    recompute: Recompute
    driver: Driver | None = None
    beside: Beside | None = None  # work for the driver's next call to do while tokens travel


# --- the experts function --------------------------------------------------------------------------------------------


@torch.compiler.disable  # kernels that build themselves at run time are not for tracing
def experts_function(
    module: Any, x_RH: torch.Tensor, idx_RK: torch.Tensor, weights_RK: torch.Tensor, n_pairs: int | None = None
) -> torch.Tensor:
    """The entry `"automodel"` of transformers' `ALL_EXPERTS_FUNCTIONS`: the backend that the module's config names."""
    state: BlockState = module.automodel
    # Chosen anew each time: autocast, or FSDP2's mixed precision, may change the dtype between two forwards.
    backend = experts.choose(state.config.experts, module, x_RH.device)
    keeps_h = state.config.recompute != "activation"
    return backend(module, x_RH, idx_RK, weights_RK, n_pairs=n_pairs, keeps_h=keeps_h)


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
        self.state: BlockState = experts.automodel
        self.state.driver = self
        config = self.state.config
        self.choose = functools.partial(
            dispatch.choose,
            config.dispatcher,
            ep_mesh.get_group(),
            int(experts.num_experts),
            max_tokens=None if config.max_tokens == "auto" else int(config.max_tokens),
            dtype=config.dispatch_dtype,
            row_capacity=config.row_capacity,
        )
        # By the dtype of what is sent, which is known in a forward alone: autocast may change it between two.
        self.transports: dict[torch.dtype, dispatch.Transport] = {}
        self.experts = experts

    def __call__(self, x_TH: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        n_tokens = x_TH.size(0)
        beside, self.state.beside = self.state.beside, None
        if torch.is_autocast_enabled(x_TH.device.type):
            x_TH = x_TH.to(torch.get_autocast_dtype(x_TH.device.type))
        weights_TK = weights_TK.float()
        if self.tp_mesh.size() > 1:
            x_TH, idx_TK, weights_TK = (self._own_slice(t) for t in (x_TH, idx_TK, weights_TK))

        parts: list[tuple[torch.Tensor, ...]] = [(x_TH, idx_TK, weights_TK)]
        if self.state.config.overlap == "halves":
            # Two of every batch, however small: all ranks make the same exchanges.
            half = x_TH.size(0) // 2
            parts = list(zip(*(t.split([half, x_TH.size(0) - half]) for t in parts[0]), strict=True))
        trips = self._trips(parts)
        sent = [
            trip.dispatch_start(x_tH, weights_tK) for trip, (x_tH, _, weights_tK) in zip(trips, parts, strict=True)
        ]
        if beside is not None:
            beside()
        # One half's experts run while the other's rows are under way.
        back = [trip.combine_start(self._experts(trip, start)) for trip, start in zip(trips, sent, strict=True)]
        y_tHs = [trip.combine_finish(start) for trip, start in zip(trips, back, strict=True)]
        y_TH = y_tHs[0] if len(y_tHs) == 1 else torch.cat(y_tHs)
        if self.tp_mesh.size() > 1:
            y_TH = self._whole(y_TH, n_tokens)
        return y_TH

    def _trips(self, parts: Sequence[tuple[torch.Tensor, ...]]) -> list[Trip]:
        """Who sends what to whom, for each part of the batch: the forward's, in a recompute."""
        x_TH, _, weights_TK = parts[0]
        if x_TH.dtype not in self.transports:
            self.transports[x_TH.dtype] = self.choose(x_TH=x_TH)
        transport = self.transports[x_TH.dtype]
        if before := self.state.recompute.received:
            return [Trip(transport, received.plan, received) for received in before]
        differentiable = torch.is_grad_enabled() and (
            x_TH.requires_grad or weights_TK.requires_grad or any(p.requires_grad for p in self.experts.parameters())
        )
        return [Trip(transport, transport.plan(idx_tK, x_tH, differentiable)) for x_tH, idx_tK, _ in parts]

    def _experts(self, trip: Trip, sent: torch.Tensor) -> torch.Tensor:
        """This rank's experts on the rows that arrive."""
        rows, differentiable = trip.dispatch_finish(sent), trip.plan.differentiable
        if differentiable and not torch.is_grad_enabled():
            raise RuntimeError(
                "Another rank of the expert-parallel group is training while this one runs without gradients "
                "(torch.no_grad, or an evaluation): its backward would wait for this rank for ever. Every rank must "
                "do the same step."
            )
        self.state.recompute.keep(trip.plan, rows)
        x_RH, weights_RK = rows.x_RH, rows.weights_RK
        if not differentiable:
            x_RH, weights_RK = x_RH.detach(), weights_RK.detach()
        return self.experts_forward(x_RH, rows.idx_RK, weights_RK, n_pairs=rows.n_pairs)

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
        x_TH, idx_TK, weights_TK = experts_arguments(args, kwargs)
        if self.routed_BS is None or self.routed_BS.numel() != idx_TK.size(0):
            return None
        routed_T1 = self.routed_BS.to(idx_TK.device).reshape(-1, 1)
        return (x_TH, torch.where(routed_T1, idx_TK, -1), torch.where(routed_T1, weights_TK, 0.0)), {}


@functools.cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


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
    regions = Recompute(routed, keep_rows=config.recompute == "experts")
    for module in experts_modules(model).values():
        vars(module).setdefault("automodel", BlockState(config, routed, regions))


def finish(model: PreTrainedModel) -> None:
    """Install the hooks on a loaded model."""
    modules = list(experts_modules(model).values())
    if modules:
        state: BlockState = modules[0].automodel
        state.routed.install(model)
        for module in modules:
            # After the one that masks padding: what is kept is what the experts see.
            module.register_forward_pre_hook(state.recompute.keep_choice, with_kwargs=True)
        recompute.install(model, state.recompute, state.config.recompute)
        if state.driver is not None and state.config.overlap != "none":
            overlap.install(model)
