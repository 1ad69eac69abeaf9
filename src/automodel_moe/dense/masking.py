"""Padding in a recurrence: a position that is masked must add nothing to the state."""

from torch import Tensor


def masked(x_BSC: Tensor, mask_BS: Tensor | None) -> Tensor:
    """`x` with the masked positions zero; without a mask `x` itself."""
    return x_BSC if mask_BS is None else (x_BSC * mask_BS[..., None]).to(x_BSC.dtype)
