"""The language model's loss straight from its hidden states: no full logits where nobody reads them.

A causal language model of transformers calls `lm_head(hidden)` and then `loss_function(logits, labels, ...)`. In
training, the head of a model loaded here computes loss and gradients of its product in chunks, and returns
[`Logits`]: they hold that loss for `loss_function` to find, and become true logits as soon as anything else is done
with them. `outputs.logits`, a scaled or capped loss and a loss of the caller's own are therefore as in transformers.

The work is done inside the head's forward because that is where sharded weights are whole, and both gradients with it
because each chunk's logits are there then; the backward only scales them.

A backend's contract:

    run(x_TH, weight_VH, target_T, scale, ignore_index, needs_x, needs_weight) -> loss, dx_TH, d_weight_VH

`loss` is `scale` times the sum of the rows' losses over targets other than `ignore_index`, in float32; dx_TH is its
gradient in x's dtype, d_weight_VH in float32. x and weight share a dtype and are contiguous; `scale` is one float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..say import say_once
from . import MODEL, choose

# What decides the loss besides the logits; `loss_function` must be called with what the model was called with.
_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch")
IGNORE_INDEX = -100


def install(model: PreTrainedModel, name: str) -> None:
    """Let the model's head and loss function work together, with the backend that `name` means."""
    head = model.get_output_embeddings()
    known = head is not None and type(head).forward is nn.Linear.forward
    if name == MODEL or model.loss_function is not ForCausalLMLoss or not known:
        return
    if isinstance(head.weight, DTensor) and any(p.is_shard() for p in _tensor_parallel(head.weight)):
        say_once(f"loss={name!r}: transformers' own, since tensor parallelism splits the output layer")
        return
    link = Link(name)
    model.register_forward_pre_hook(link.note, with_kwargs=True)
    model.register_forward_hook(link.forget, always_call=True)
    vars(head)["forward"] = functools.partial(link.head, head)
    model.loss_function = link.loss


def _tensor_parallel(weight: DTensor) -> list[Any]:
    names = weight.device_mesh.mesh_dim_names or ()
    return [p for name, p in zip(names, weight.placements, strict=False) if name == "tp"]


class Link:
    """What one model's head and loss function know of the forward in progress. Its methods are the model's hooks, so
    that a copy of the model has its own."""

    def __init__(self, name: str):
        self.name = name
        self.arguments: dict[str, Any] = {}  # empty where the forward in progress has no labels
        self.waiting: Logits | None = None  # the head has made it and the loss function not taken it
        self.misses = 0

    def note(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.arguments = {key: kwargs.get(key) for key in _ARGUMENTS} if kwargs.get("labels") is not None else {}

    def forget(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.arguments, waiting, self.waiting = {}, self.waiting, None
        if waiting is not None and output is not None:  # None: the forward has failed
            self.misses += 1
            say_once(
                f"loss={self.name!r}: this model changes its logits or labels before its loss; transformers' own from "
                "now on"
            )

    def head(self, module: Any, hidden: Tensor) -> Tensor | Logits:
        """The output layer's forward."""
        weight_VH = module.weight
        if not self.arguments or not torch.is_grad_enabled() or self.misses:
            return linear(hidden, weight_VH, module.bias)
        if module.bias is not None or isinstance(weight_VH, DTensor) or type(hidden) is not Tensor:
            return linear(hidden, weight_VH, module.bias)
        if not (hidden.requires_grad or weight_VH.requires_grad):
            return linear(hidden, weight_VH)
        return self._chunks(hidden, weight_VH)

    @torch.compiler.disable
    def _chunks(self, hidden: Tensor, weight_VH: Tensor) -> Tensor | Logits:
        device = hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        target_T = self._targets(hidden.shape[:-1], device)
        if target_T is None or hidden.numel() == 0 or not (autocast or hidden.dtype == weight_VH.dtype):
            return linear(hidden, weight_VH)
        run = choose("loss", self.name, device, dtype, *weight_VH.shape)
        if run is None:
            return linear(hidden, weight_VH)
        scale = self._scale(target_T)
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        loss = _LinearCrossEntropy.apply(x_TH, weight_VH, target_T, scale, dtype, run)
        self.waiting = Logits(hidden, weight_VH, dtype, loss)
        return self.waiting

    def _targets(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        """The id that each position predicts, or `None` if labels and hidden states don't belong together."""
        labels, shifted = self.arguments["labels"], self.arguments["shift_labels"]
        if shifted is None:
            if labels.shape != shape:  # fewer logits were asked for than there are labels
                return None
            shifted = pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        return shifted.reshape(-1).to(device) if shifted.shape.numel() == shape.numel() else None

    def _scale(self, target_T: Tensor) -> Tensor:
        n = self.arguments["num_items_in_batch"]
        if n is None:
            n = (target_T != IGNORE_INDEX).sum()
        elif not isinstance(n, Tensor) or n.device != target_T.device:
            n = torch.full((), float(n), device=target_T.device)  # a number of the host's: no wait for the device
        return n.to(torch.float32).reciprocal()

    def loss(
        self,
        logits: Tensor | Logits,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The model's `loss_function`: the loss that the head has computed, else transformers' own."""
        waiting, self.waiting = self.waiting, None
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        same = bool(self.arguments) and all(given[key] is self.arguments[key] for key in _ARGUMENTS)
        same = same and ignore_index == IGNORE_INDEX
        if waiting is not None and logits is waiting and same and vocab_size == waiting.shape[-1]:
            return waiting.loss
        self.waiting = waiting
        return ForCausalLMLoss(
            logits.true() if isinstance(logits, Logits) else logits,
            labels,
            vocab_size,
            num_items_in_batch,  # type: ignore[arg-type]  # an int too, as its own code says
            ignore_index,
            shift_labels,
            **kwargs,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_VH: Tensor, target_T: Tensor, scale: Tensor, dtype: torch.dtype, run: Callable
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.dtypes = x_TH.dtype, weight_VH.dtype
        operands = x_TH.to(dtype).contiguous(), weight_VH.to(dtype).contiguous()
        with torch.autocast(x_TH.device.type, enabled=False):
            loss, dx_TH, d_weight_VH = run(*operands, target_T, scale, IGNORE_INDEX, needs_x, needs_weight)
        ctx.save_for_backward(dx_TH, d_weight_VH)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # One pass each: scaled in float32, rounded once to the dtype that is wanted.
        grads = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            out = None if gradient is None else torch.empty_like(gradient, dtype=dtype)
            grads.append(out if out is None else torch.mul(gradient, d_loss, out=out))
        return *grads, None, None, None, None


class Logits:
    """
    Logits `[..., V]` that nobody has read yet. Any use of them computes them, differentiable as transformers' are.

    No tensor: what looks through a model's outputs for tensors (hooks of FSDP2, accelerate's cast to float32) then
    leaves them alone. `float()` only notes the dtype, since accelerate asks it of every output.

    Raises:
        `RuntimeError`: on a use after the weights have changed or were freed: they would be other logits.
    """

    def __init__(self, hidden: Tensor, weight_VH: Tensor, dtype: torch.dtype, loss: Tensor):
        self.hidden, self.weight_VH, self.loss = hidden, weight_VH, loss
        self.compute_dtype = self.dtype = dtype
        self.shape = torch.Size((*hidden.shape[:-1], weight_VH.shape[0]))
        self.device = hidden.device
        self.versions = hidden._version, weight_VH._version
        self.computed: Tensor | None = None

    def true(self) -> Tensor:
        """The logits, as a tensor."""
        if self.computed is None:
            changed = (self.hidden._version, self.weight_VH._version) != self.versions
            if changed or self.weight_VH.untyped_storage().size() == 0:
                raise RuntimeError(
                    "outputs.logits are computed when they are read, and the weights have changed since the forward: "
                    'read them before optimizer.step() and backward(), or load with moe_config={"loss": "model"}.'
                )
            # With a graph even when the first to read them needs none: the next may.
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                logits = linear(self.hidden.to(self.compute_dtype), self.weight_VH.to(self.compute_dtype))
                self.computed = logits.to(self.dtype)
        return self.computed

    def float(self) -> Logits:
        self.dtype = torch.float32
        self.computed = None if self.computed is None else self.computed.float()
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*(_true(a) for a in args), **{key: _true(a) for key, a in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        # Only what is not above: a tensor's methods and attributes.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.true(), name)

    def __repr__(self) -> str:
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    def __len__(self) -> int:
        return len(self.true())

    def __iter__(self) -> Any:
        return iter(self.true())

    def __getitem__(self, index: Any) -> Tensor:
        return self.true()[index]


def _true(value: Any) -> Any:
    if isinstance(value, Logits):
        return value.true()
    return type(value)(_true(v) for v in value) if type(value) in (list, tuple) else value


def _operator(name: str) -> Callable:
    def operator(self: Logits, *others: Any) -> Any:
        return getattr(self.true(), name)(*(_true(other) for other in others))

    return operator


# Python looks operators up on the class, past __getattr__.
_OPERATORS = ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "rpow"]
for _name in (*_OPERATORS, "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Logits, f"__{_name}__", _operator(f"__{_name}__"))
