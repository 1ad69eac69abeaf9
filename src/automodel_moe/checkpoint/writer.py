"""Write a checkpoint from all ranks at once: each puts its own slices at their byte offsets."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .layout import Layout
from .reverse import Conversion
from .shares import Box, boxes, fetch, whole_box


class Files:
    """
    The weight files of a layout in one folder, open for writing at any offset. Ranks may write to one file together.

    As a context manager it flushes what was written to disk before it closes the files.
    """

    def __init__(self, folder: Path, layout: Layout):
        self._folder, self._layout = folder, layout
        self._open: dict[str, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, error, *_) -> None:
        try:
            for fd in self._open.values():
                if error is None:
                    os.fsync(fd)
        finally:
            for fd in self._open.values():
                os.close(fd)
            self._open = {}

    def begin(self, file: str) -> None:
        """Give a file its header and its final size."""
        fd = self._descriptor(file)
        os.truncate(fd, self._layout.sizes[file])
        _write_all(fd, memoryview(self._layout.headers[file]), 0)

    def write(self, key: str, starts: Sequence[int], part: Tensor) -> None:
        """
        Write a part of a tensor.

        Args:
            key (`str`): The tensor's key in the checkpoint.
            starts (sequence of `int`): Where the part starts in each dimension of the tensor.
            part (`Tensor`): Any device; the dtype is the tensor's.
        """
        place = self._layout.places[key]
        if part.dtype != place.dtype or part.ndim != len(place.shape):
            raise AssertionError(f"{key}: {part.dtype} {tuple(part.shape)} can't be a part of {place}")
        if part.numel() == 0:
            return
        data = memoryview(cast("Any", part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
        fd, size, done = self._descriptor(place.file), part.itemsize, 0
        for offset, count in _runs(place.shape, starts, part.shape):
            _write_all(fd, data[done : done + count * size], place.begin + offset * size)
            done += count * size

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
        return self._open[file]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _runs(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offset and length, in elements, of each unbroken run of a part, in the part's own order."""
    # Behind this dimension everything is whole: one index of it is one run, and so are adjacent ones.
    dim = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    if not shape:
        yield 0, 1
        return
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    count = sizes[dim] * strides[dim]
    base = starts[dim] * strides[dim]
    outer = [range(start, start + n) for start, n in zip(starts[:dim], sizes[:dim], strict=True)]
    for index in itertools.product(*outer):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), count


@torch.no_grad()
def write_own_slices(
    folder: Path, layout: Layout, conversions: Sequence[Conversion], state: Mapping[str, Any], copies: bool
) -> None:
    """
    Write what this rank holds. A collective: what mixes ranks is brought together, one conversion at a time.

    Args:
        folder (`Path`): One and the same for all ranks.
        layout (`Layout`): Of the conversions' outputs.
        conversions (sequence of `Conversion`): Alike on every rank.
        state (mapping): The state dict.
        copies (`bool`): Whether plain tensors are there on every rank; otherwise on rank 0 alone.

    Raises:
        Whatever this rank's conversions or writes raise, after it has taken part in every collective.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problem: Exception | None = None
    with Files(folder, layout) as files:
        try:
            for turn, file in enumerate(layout.headers):
                if turn % world == rank:
                    files.begin(file)
        except Exception as error:
            problem = error
        for turn, conversion in enumerate(conversions):
            values = [state.get(name) for name in conversion.names]
            plain = any(not isinstance(value, DTensor) for value in values)
            writer = 0 if plain and not copies else turn % world
            try:
                if conversion.mixes(values):
                    wholes: list[Any] = [fetch(value, writer, "cpu") for value in values]
                    if rank == writer and problem is None:
                        _write_parts(files, conversion, wholes, [whole_box(whole.shape) for whole in wholes])
                elif problem is None:
                    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
                    own = [_own_boxes(value, turn, rank == writer) for value in values]
                    for parts in zip(*own, strict=True):
                        _write_parts(files, conversion, local, parts)
            except Exception as error:
                # The other ranks go on to the next collective: take part in all before anyone hears of it.
                problem = problem or error
        if problem is not None:
            raise problem


@torch.no_grad()
def write_streamed(folder: Path, layout: Layout, conversions: Sequence[Conversion], state: Mapping[str, Any]) -> None:
    """As `write_own_slices`, but rank 0 gets everything, piece by piece, and writes it: it alone sees `folder`."""
    writes = dist.get_rank() == 0
    problem: Exception | None = None
    with Files(folder, layout) as files:
        try:
            for file in layout.headers if writes else ():
                files.begin(file)
        except Exception as error:
            problem = error
        for conversion in conversions:
            for window, tensors in fetched(conversion, state, receiver=0, device="cpu"):
                if not writes or problem is not None:
                    continue
                try:
                    for key, starts, part in conversion.run_slice(tensors, window):
                        files.write(key, starts, part)
                except Exception as error:
                    problem = error
        if problem is not None:
            raise problem


def fetched(
    conversion: Conversion,
    state: Mapping[str, Any],
    receiver: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    whole_keys: bool = False,
) -> Iterator[tuple[Box, list[Tensor]]]:
    """
    What goes into one conversion, brought together window by window. A collective of all ranks.

    Args:
        conversion (`Conversion`): One of `reverse`.
        state (mapping): The state dict.
        receiver (`int`, *optional*): The one rank that gets it. By default all do.
        device (*optional*): Where it lies then. By default where it lies now.
        dtype (`torch.dtype`, *optional*): What it is cast to.
        whole_keys (`bool`, *optional*): Windows give whole tensors of the checkpoint, not parts of them.

    Yields:
        `(Box, list[Tensor])`: the window and each member's part in it; `(Box, [])` on ranks that receive nothing.
    """
    sources = conversion.sources
    itemsize = sum(source.itemsize if dtype is None else dtype.itemsize for source in sources)
    mine = receiver is None or not dist.is_initialized() or dist.get_rank() == receiver
    for window in conversion.windows(whole_box(sources[0].shape), itemsize, whole_keys):
        ranges = {
            dim: range(start, start + n)
            for dim, (start, n) in enumerate(zip(window.starts, window.sizes, strict=True))
            if n < sources[0].shape[dim]
        }
        parts = [fetch(state.get(name), receiver, device, ranges, dtype) for name in conversion.names]
        yield window, [part for part in parts if part is not None] if mine else []


def _own_boxes(value: Any, turn: int, writes_plain: bool) -> Iterator[Box]:
    """The parts that this rank writes; of copies one rank writes, another one each turn."""
    if not isinstance(value, DTensor):
        if writes_plain:
            yield whole_box(value.shape)
        return
    mesh = value.device_mesh
    if mesh.size() < dist.get_world_size() and not bool((mesh.mesh == 0).any()):
        return
    placed = zip(mesh.shape, cast("Any", mesh.get_coordinate()), value.placements, strict=True)
    if all(index == turn % size for size, index, placement in placed if placement.is_replicate()):
        yield from boxes(value)


def _write_parts(files: Files, conversion: Conversion, tensors: Sequence[Any], parts: Sequence[Box]) -> None:
    """Convert and write one part of each member; `tensors` are this rank's."""
    itemsize = sum(tensor.itemsize for tensor in tensors)
    for window in conversion.windows(parts[0], itemsize):
        # Several members are not cut any further, and each has sizes of its own where it isn't sharded.
        cut = [window] if len(parts) == 1 else parts
        slices = [part.of(tensor) for part, tensor in zip(cut, tensors, strict=True)]
        for key, starts, part in conversion.run_slice(slices, window):
            files.write(key, starts, part)
