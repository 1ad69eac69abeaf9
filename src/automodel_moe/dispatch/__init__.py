"""How tokens travel to the ranks of their experts and back: the contract, one transport a file, one chooser.

Legend of the shape suffixes: T tokens here, R rows received, S rows sent, P ranks of the group, K top-k, H hidden.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch.distributed import ProcessGroup

from ..say import say_once
from . import deepep, fp8
from .contract import Plan, Rows, Transport

__all__ = ["Plan", "Rows", "Transport", "check_installed", "choose"]

# name: (file, class or function that makes one). A transport is added by one file and one line here.
TRANSPORTS = {
    "deepep": ("deepep", "transport"),
    "all_to_all": ("all_to_all", "AllToAll"),
}

# `MoEConfig.dispatch_dtype` -> what a forward's tokens travel in; None is their own dtype.
PAYLOADS = {"auto": None, "fp8": fp8.DTYPE}


def check_installed(name: str) -> None:
    """
    Whether a transport can be had on this machine at all, asked before a model is loaded for it.

    Raises:
        `ImportError`: if `name` needs a package that is missing or was built for another torch.
        `ValueError`: if `name` is neither `"auto"` nor a key of `TRANSPORTS`.
    """
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"dispatcher={name!r} is none of {', '.join(map(repr, ('auto', *TRANSPORTS)))}.")
    if name == "deepep":
        deepep.load()


def choose(
    name: str,
    group: ProcessGroup,
    num_local_experts: int,
    x_TH: torch.Tensor | None = None,
    max_tokens: int | None = None,
    dtype: str = "auto",
    row_capacity: int | None = None,
) -> Transport:
    """
    The transport that `MoEConfig.dispatcher` names. Every rank of the group must call it at the same point.

    Args:
        name (`str`): `"auto"` or a key of `TRANSPORTS`.
        group (`ProcessGroup`): The expert-parallel group.
        num_local_experts (`int`): Experts a rank holds.
        x_TH (`torch.Tensor`, *optional*): What will be sent; `"auto"` goes by its device, dtype and width.
        max_tokens (`int`, *optional*): See [`Transport`].
        dtype (`str`): `MoEConfig.dispatch_dtype`: `"auto"`, what is sent as it is, or a key of `PAYLOADS`.

        row_capacity (`int`, *optional*): See `MoEConfig.row_capacity`.

    Raises:
        As [`check_installed`], and `ValueError` if the transport can't serve this group.
    """
    check_installed(name)
    if name == "auto":
        name = _auto(group, x_TH, dtype, row_capacity)
    if row_capacity is not None:
        if name != "all_to_all":
            raise ValueError(f"row_capacity={row_capacity}: dispatcher={name!r} has none; use 'all_to_all'.")
        from .all_to_all_padded import PaddedAllToAll

        return PaddedAllToAll(group, num_local_experts, row_capacity, payload=PAYLOADS[dtype])
    file, make = TRANSPORTS[name]
    make_transport = getattr(import_module(f".{file}", __name__), make)
    return make_transport(group, num_local_experts, max_tokens, PAYLOADS[dtype])


def _auto(group: ProcessGroup, x_TH: torch.Tensor | None, dtype: str, row_capacity: int | None = None) -> str:
    if dtype != "auto":
        why_not: str | None = f"deepep's adapter does not carry dispatch_dtype={dtype!r}"
    elif row_capacity is not None:
        why_not = f"row_capacity={row_capacity} is a mode of it alone"
    elif x_TH is None:
        why_not = "what will be sent is not known yet"
    else:
        why_not = deepep.why_not(group, x_TH)
    name, why = ("deepep", "installed, and every GPU of the group reaches the others'")
    if why_not is not None:
        name, why = "all_to_all", why_not
    say_once(f"dispatcher='auto': {name} ({why})")
    return name
