"""Who holds which part of a sharded tensor, and how any window of it is brought together in bounded memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# What one rank sends, converts or writes at a time; a single index of a tensor's first dimension may be larger.
PIECE_BYTES = 16 * 2**20


class Box(NamedTuple):
    """A part of a tensor that a rank holds: where it starts in the whole tensor and in the local one, and its size."""

    starts: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def narrow(self, dim: int, start: int, size: int) -> Box:
        """The part of it from `start` on (counted from its own start), `size` indices of dimension `dim` long."""
        move = [start if d == dim else 0 for d in range(len(self.sizes))]
        return Box(
            tuple(a + b for a, b in zip(self.starts, move, strict=True)),
            tuple(a + b for a, b in zip(self.local, move, strict=True)),
            tuple(size if d == dim else n for d, n in enumerate(self.sizes)),
        )

    def pieces(self, dim: int, index_bytes: int) -> Iterator[Box]:
        """Cut along `dim` into pieces of at most `PIECE_BYTES`, where one index of `dim` is `index_bytes` long."""
        step = max(1, PIECE_BYTES // max(index_bytes, 1))
        for start in range(0, self.sizes[dim], step):
            yield self.narrow(dim, start, min(step, self.sizes[dim] - start))

    def of(self, local: Tensor) -> Tensor:
        """The part as a view of the local tensor."""
        return local[tuple(slice(a, a + n) for a, n in zip(self.local, self.sizes, strict=True))]


def whole_box(shape: Sequence[int]) -> Box:
    origin = (0,) * len(shape)
    return Box(origin, origin, tuple(shape))


def sharded_dims(value: DTensor) -> set[int]:
    """The tensor's dimensions that are cut into more than one part."""
    placed = zip(value.device_mesh.shape, value.placements, strict=True)
    return {p.dim % value.ndim for size, p in placed if size > 1 and isinstance(p, (Shard, _StridedShard))}


def boxes(value: DTensor, coordinate: Sequence[int] | None = None) -> Iterator[Box]:
    """
    The parts of a sharded tensor that one rank holds; usually one, several where it is cut by interleaved blocks.

    Args:
        value (`DTensor`): With `Shard`, `_StridedShard` and `Replicate` placements.
        coordinate (sequence of `int`, *optional*): The rank's place in the tensor's mesh. By default this rank's.
    """
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, "every rank holds a part of each parameter's mesh"
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in value.shape]
    for size, index, placement in zip(mesh.shape, coordinate, value.placements, strict=True):
        if size > 1 and isinstance(placement, (Shard, _StridedShard)):
            blocks = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            cuts[placement.dim % value.ndim].append((size, index, blocks))
    by_dim = []
    for size, some in zip(value.shape, cuts, strict=True):
        ranges = _held(size, tuple(some))
        offsets = itertools.accumulate((len(r) for r in ranges), initial=0)
        by_dim.append([(r.start, offset, len(r)) for r, offset in zip(ranges, offsets, strict=False)])
    for parts in itertools.product(*by_dim):
        yield Box(tuple(p[0] for p in parts), tuple(p[1] for p in parts), tuple(p[2] for p in parts))


@functools.lru_cache(maxsize=4096)
def _held(size: int, cuts: tuple[tuple[int, int, int], ...]) -> list[range]:
    """Indices of one dimension that are left after each (parts, which of them, interleaved blocks) cut in turn."""
    ranges = [range(size)]
    for parts, index, blocks in cuts:
        block_ranges = [_part(ranges, blocks, block) for block in range(blocks)]
        ranges = [r for block in block_ranges for r in _part(block, parts, index)]
    return [r for r in ranges if len(r)]


def _part(ranges: list[range], parts: int, index: int) -> list[range]:
    """As `torch.chunk` cuts: parts of equal size, rounded up, so that the last ones may be small or empty."""
    step = math.ceil(sum(map(len, ranges)) / parts)
    start, stop = index * step, (index + 1) * step
    out, seen = [], 0
    for r in ranges:
        out.append(r[max(start - seen, 0) : max(stop - seen, 0)])
        seen += len(r)
    return out


@torch.no_grad()
def fetch(
    value: Any,
    receiver: int | None = None,
    device: torch.device | str | None = None,
    window: Mapping[int, range] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """
    A window of a tensor, whole, on the ranks that ask for it. A collective of all ranks for a DTensor.

    A rank holds no more beside the result than `PIECE_BYTES` (or one index of the first dimension) at a time.

    Args:
        value (`Tensor` or `None`): A DTensor; or a plain tensor, which must be there on the receiver.
        receiver (`int`, *optional*): The one rank that gets it. By default all do.
        device (*optional*): Where the result lies. By default where the local part does.
        window (mapping, *optional*): The range of indices wanted, for the dimensions that aren't wanted whole.
        dtype (`torch.dtype`, *optional*): What it is cast to, before it is sent.

    Returns:
        `Tensor` on the receiver (a plain tensor is not copied if it needn't be); `None` on the other ranks.
    """
    window = window or {}
    mine = receiver is None or not dist.is_initialized() or dist.get_rank() == receiver
    if not isinstance(value, DTensor) or value.device_mesh.size() < dist.get_world_size() or is_partial(value):
        # A mesh of some ranks alone is one of several with the same values; each brings its own together.
        plain = value.full_tensor() if isinstance(value, DTensor) else value
        if not mine:
            return None
        for dim, part in window.items():
            plain = plain.narrow(dim, part.start, len(part))
        return plain.detach().to(device=device, dtype=dtype)

    local, dtype, mesh = value.to_local().detach(), dtype or value.dtype, value.device_mesh
    wanted = [window.get(dim, range(size)) for dim, size in enumerate(value.shape)]
    shape = [len(part) for part in wanted]
    out = torch.empty(shape, dtype=dtype, device=device or local.device) if mine else None
    axes = [
        (0,) if placement.is_replicate() else range(size)
        for size, placement in zip(mesh.shape, value.placements, strict=True)
    ]
    for coordinate in itertools.product(*axes):
        owner = int(mesh.mesh[coordinate])
        for box in boxes(value, coordinate):
            for piece in _pieces(_clip(box, wanted), dtype.itemsize):
                if owner == dist.get_rank():
                    sent = piece.of(local).to(dtype).contiguous()
                elif receiver != owner:
                    sent = torch.empty(piece.sizes, dtype=dtype, device=local.device)
                else:
                    continue  # the receiver holds it, and nobody else wants it
                if receiver != owner:
                    dist.broadcast(sent, owner)
                if out is not None:
                    starts = (a - w.start for a, w in zip(piece.starts, wanted, strict=True))
                    out[tuple(slice(a, a + n) for a, n in zip(starts, piece.sizes, strict=True))].copy_(sent)
    return out


def is_partial(value: DTensor) -> bool:
    return any(isinstance(placement, Partial) for placement in value.placements)


def _clip(box: Box, wanted: Sequence[range]) -> Box:
    for dim, part in enumerate(wanted):
        start = max(part.start - box.starts[dim], 0)
        stop = min(part.stop - box.starts[dim], box.sizes[dim])
        box = box.narrow(dim, start, max(stop - start, 0))
    return box


def _pieces(box: Box, itemsize: int) -> Iterator[Box]:
    if 0 in box.sizes:
        return
    if not box.sizes:
        yield box
        return
    yield from box.pieces(0, itemsize * math.prod(box.sizes[1:]))
