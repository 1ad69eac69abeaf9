"""Fresh weights for an inference engine: a stream of the Hub's keys and whole tensors from a model that trains."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..trainer.collective import meet
from .reverse import Conversion, entries_to_save, reverse
from .writer import fetched


def iter_hf_weights(
    model: PreTrainedModel, *, ranks: str = "all", dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    r"""
    The weights of a model under the names and in the layout of its Hub checkpoint, one whole tensor after another, for
    handing them to a running engine (vLLM's and SGLang's `load_weights` take such a stream).

    With a sharded model all ranks must iterate to the end; one that stops early goes on taking part in what is left.

    Beside the parameters a rank that yields holds what one conversion takes and gives. Of experts that is a window of
    16 MiB (or one expert, if that is more), a few times over: the one before, which the caller has, the next one, and
    what is being sent. Of all else it is the largest tensor, twice where it is converted and not just renamed. A rank
    that doesn't yield holds 16 MiB at a time.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Sharded or not. With PEFT, merge the adapters first and pass the model within.
        ranks (`str`, *optional*, defaults to `"all"`):
            `"all"`: every rank yields every tensor (an engine beside each rank). `"first"`: rank 0 alone does; on the
            others the loop runs, and its body never does.
        dtype (`torch.dtype`, *optional*):
            What floating-point tensors are cast to before they are sent, except for those that the model keeps in
            float32 in any dtype (e.g. a router's score correction). By default each has the parameter's own dtype.

    Yields:
        `(str, torch.Tensor)`: on the parameters' device, not to be written to: a tensor that isn't sharded may be the
        parameter itself.

    Raises:
        `ValueError`: for another value of `ranks`, or a `dtype` that is no floating-point one.
        `RuntimeError`: if some ranks don't come within `moe_config.call_timeout` seconds.

    Examples:

    ```python
    >>> for name, tensor in iter_hf_weights(model, ranks="first", dtype=torch.bfloat16):
    ...     send(name, tensor)
    ```
    """
    if ranks not in ("all", "first"):
        raise ValueError(f"iter_hf_weights: ranks={ranks!r} is none of 'all', 'first'.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"iter_hf_weights: dtype={dtype} is no floating-point dtype.")
    return _stream(model, 0 if ranks == "first" else None, dtype)


@torch.no_grad()
def _stream(model: PreTrainedModel, receiver: int | None, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    state = entries_to_save(model, model.state_dict())
    sharded = any(isinstance(value, DTensor) for value in state.values())
    if sharded and "automodel_moe" in vars(model):
        remedy = "Iterate on every rank: each holds a part of the weights."
        meet("iter_hf_weights", vars(model)["automodel_moe"].call_timeout, remedy)
    shapes = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    wanted = receiver is None or not dist.is_initialized() or dist.get_rank() == receiver
    stopped, problem = False, None
    for conversion in reverse(model, shapes):
        cast_to = None if dtype is None else _cast(model, conversion, dtype)
        for window, parts in fetched(conversion, state, receiver, dtype=cast_to, whole_keys=True):
            if not wanted or stopped:
                continue
            try:
                for key, _, tensor in conversion.run_slice(parts, window):
                    yield key, tensor
            except (GeneratorExit, Exception) as reason:
                # The loop was left, or a conversion failed; the others wait for this rank's parts of what is left.
                if not sharded:
                    raise
                stopped = True
                problem = reason if isinstance(reason, Exception) else None
    if problem is not None:
        raise problem


def _cast(model: PreTrainedModel, conversion: Conversion, dtype: torch.dtype) -> torch.dtype | None:
    globs = model._keep_in_fp32_modules_strict or ()
    patterns = [re.compile(glob.replace("*", ".*")) for glob in globs]
    floating = all(source.is_floating_point() for source in conversion.sources)
    if not floating or any(pattern.search(name) for name in conversion.names for pattern in patterns):
        return None
    return dtype
