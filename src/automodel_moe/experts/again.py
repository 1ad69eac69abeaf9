"""Experts whose forward runs a second time in backward, so that nothing within it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.distributed.parallel_utils import _use_local_dtensor_params


def computed_again(
    forward: Callable[..., Tensor],
    experts: Any,
    x_RH: Tensor,
    idx_RK: Tensor,
    weights_RK: Tensor,
    n_pairs: int | None,
) -> Tensor:
    """`forward` of a backend, of which autograd keeps the inputs alone."""

    def local(*args: Tensor) -> Tensor:
        # Under expert parallelism transformers makes the parameters plain tensors around the forward, and the second
        # run is outside of that.
        with _use_local_dtensor_params(experts):
            return forward(experts, *args, n_pairs=n_pairs)

    return checkpoint(local, x_RH, idx_RK, weights_RK, use_reentrant=False, preserve_rng_state=False)
