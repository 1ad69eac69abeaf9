"""From parameters back to the checkpoint's own keys: which conversion makes which, and what it does to a slice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import core_model_loading as core
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)

from .plan import Keep
from .shares import Box, is_partial, sharded_dims


@dataclass(frozen=True)
class Route:
    """
    How a parameter's dimensions come out of a conversion. Along those that it names, the conversion of a slice is the
    slice of the conversion.

    Attributes:
        axes: For each dimension of what comes out, the parameter's dimension that it is, index by index; `None` where
            the conversion cuts, joins or reorders it.
        listed: The parameter's dimension of which every index becomes a key of its own, e.g. the experts.
    """

    axes: tuple[int | None, ...]
    listed: int | None = None

    def keeps(self, dim: int) -> bool:
        return dim in self.axes or dim == self.listed


def find_route(operations: Sequence[core.ConversionOps], ndim: int) -> Route | None:
    """The route of a parameter with `ndim` dimensions through the operations; `None` if one of them isn't known."""
    axes: list[int | None] = list(range(ndim))
    listed: int | None = None
    for op in operations:
        # Exact types: a subclass may compute something else.
        kind = type(op)
        if kind in (core.Chunk, core.Concatenate, core.Interleave):
            axes[cast("Any", op).dim] = None
        elif isinstance(op, core.Transpose) and kind is core.Transpose and not op.check_dims:
            axes[op.dim0], axes[op.dim1] = axes[op.dim1], axes[op.dim0]
        elif isinstance(op, core.SplitModulelist) and kind is core.SplitModulelist and listed is None:
            listed = axes.pop(op.dim)
            if listed is None:
                return None
        elif kind not in (Keep, core._IdentityOp):
            return None
    return Route(tuple(axes), listed)


@dataclass
class Conversion:
    """
    One conversion on the way out: the parameters that go in, the checkpoint's keys that come out.

    Attributes:
        key: What transformers calls the conversion.
        members: Parameter names, each with the pattern that it matched (`None`: it is only renamed).
        sources: A meta tensor of the whole shape for each member.
        outputs: Key and meta tensor of each entry, in the order in which `run` gives them. They share storages as they
            do on one process, which decides how transformers splits a checkpoint into files.
        n_listed: Indices of the route's listed dimension.
        stored: The dtype that the checkpoint had where the model computes in another one.
    """

    model: PreTrainedModel
    key: str
    members: list[tuple[str, str | None]]
    converter: WeightConverter | None
    renamings: list[WeightRenaming]
    sources: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    route: Route | None = None
    n_listed: int = 0
    stored: torch.dtype | None = None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.members]

    def describe(self, shapes: Mapping[str, Tensor]) -> None:
        """Fill in the outputs and the route, from meta tensors of the whole parameters."""
        if self.converter is None:
            self.members = self.members[:1]
        self.sources = [shapes[name] for name in self.names]
        tensors = list(self.sources)
        if self.converter is None:
            self.outputs = [(self.key, tensors[0])]
            self.route = Route(tuple(range(tensors[0].ndim)))
            return
        converted = self._convert(tensors)
        self.outputs = [(apply_renamings(name, self.renamings), tensor) for name, tensor in converted.items()]
        route = find_route(self.converter.operations, self.sources[0].ndim)
        if route is not None and route.listed is not None:
            self.n_listed = self.sources[0].shape[route.listed]
            if len(self.sources) > 1 or len(self.outputs) % self.n_listed:
                route = None
        self.route = route

    def store_as(self, dtype: torch.dtype) -> None:
        """Have the outputs in this dtype."""
        self.stored = dtype
        self.outputs = [(key, tensor.to(dtype)) for key, tensor in self.outputs]

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """What comes out, in the order of `outputs`. `tensors` is emptied on the way."""
        converted = [tensors.pop(0)] if self.converter is None else list(self._convert(tensors).values())
        return converted if self.stored is None else [tensor.to(self.stored) for tensor in converted]

    def run_slice(self, tensors: list[Tensor], box: Box) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """
        Convert one slice of the parameters.

        Args:
            tensors (`list[Tensor]`): The slice of each member; emptied on the way.
            box (`Box`): Where it lies in the whole parameter: cut only along dimensions that the route keeps.

        Yields:
            `(str, tuple[int, ...], Tensor)`: a key, where in its tensor the slice starts, and the slice.
        """
        listed = None if self.route is None else self.route.listed
        axes = None if self.route is None else self.route.axes
        for k, tensor in enumerate(self.run(tensors)):
            if listed is not None:
                # All indices of one kind of key (gate, up), then those of the next.
                kind, index = divmod(k, box.sizes[listed])
                k = kind * self.n_listed + box.starts[listed] + index
            starts = (0,) * tensor.ndim if axes is None else tuple(0 if a is None else box.starts[a] for a in axes)
            yield self.outputs[k][0], starts, tensor

    def windows(self, box: Box, itemsize: int, whole_keys: bool = False) -> Iterator[Box]:
        """
        Cut a part of the parameters into pieces of bounded size that can be converted one by one.

        Args:
            box (`Box`): A part of the first member.
            itemsize (`int`): Bytes of all members' elements at one index.
            whole_keys (`bool`, *optional*): Each piece must give whole tensors, not parts of them.
        """
        if self.route is None or len(self.members) > 1 or 0 in box.sizes:
            dims: list[int] = []
        elif self.route.listed is not None:
            dims = [self.route.listed]
        else:
            dims = [] if whole_keys else [axis for axis in self.route.axes if axis is not None]
        if not dims:
            yield box
            return
        yield from box.pieces(dims[0], itemsize * math.prod(box.sizes) // box.sizes[dims[0]])

    def mixes(self, values: Sequence[Any]) -> bool:
        """Whether what comes out needs more than one rank's part: the members must be brought together first."""
        sharded = [value for value in values if isinstance(value, DTensor)]
        if not sharded:
            return False
        first = sharded[0]
        if len(sharded) < len(values) or any(is_partial(value) for value in sharded):
            return True
        cut = sharded_dims(first)
        alike = all(
            value.device_mesh == first.device_mesh
            and value.placements == first.placements
            and value.ndim == first.ndim
            and all(value.shape[dim] == first.shape[dim] for dim in cut)
            for value in sharded
        )
        return not alike or self.route is None or not all(self.route.keeps(dim) for dim in cut)

    def _convert(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(cast("WeightConverter", self.converter))
        for name, pattern in self.members:
            converter.add_tensor(self.key, name, cast("str", pattern), cast("Any", tensors.pop(0)))
        converted = converter.convert(self.key, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


def conversions_of(model: PreTrainedModel) -> list[WeightTransform]:
    """How the model was loaded, or would be."""
    if "_weight_conversions" in vars(model):
        return vars(model)["_weight_conversions"]
    # A dequantized source leaves none. These are the model type's own; which prefix the keys had isn't known.
    return [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]


def reverse(model: PreTrainedModel, shapes: Mapping[str, Tensor], original_format: bool = True) -> list[Conversion]:
    """
    The conversions that turn a state dict into the checkpoint that the model was loaded from.

    Args:
        model (`PreTrainedModel`): Its conversions say how it was loaded.
        shapes (mapping): A meta tensor of the whole shape for each entry of the state dict.
        original_format (`bool`, *optional*): `False` keeps the parameters' names and layout.
    """
    if not original_format:
        made = [Conversion(model, name, [(name, None)], None, []) for name in shapes]
    else:
        made = list(_groups(model, shapes))
    for conversion in made:
        conversion.describe(shapes)
    return made


def _groups(model: PreTrainedModel, names: Iterable[str]) -> Iterable[Conversion]:
    transforms = [transform.reverse_transform() for transform in reversed(conversions_of(model))]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, Conversion] = {}
    # In this order, and all names before the first conversion: some renamings depend on what they have seen.
    for name in sorted(names, key=dot_natural_key):
        key, pattern = apply_converters(name, converters)
        if pattern is None:
            key = apply_renamings(name, renamings)
        converter = None if pattern is None else by_pattern[pattern]
        group = groups.setdefault(key, Conversion(model, key, [], converter, renamings))
        group.members.append((name, pattern))
    return groups.values()


def settle_dtypes(
    conversions: Iterable[Conversion], kept_from: Mapping[str, torch.dtype], changed: Iterable[str] = ()
) -> None:
    """
    Store in the checkpoint's dtype what the model computes in another one, except for the conversions (by `key`) whose
    values that would change.
    """
    changed = set(changed)
    for conversion in conversions:
        dtypes = {kept_from[key] for key, _ in conversion.outputs if key in kept_from}
        if len(dtypes) == 1 and conversion.key not in changed:
            conversion.store_as(dtypes.pop())


def changed_by_dtype(
    conversions: Iterable[Conversion], kept_from: Mapping[str, torch.dtype], state: Mapping[str, Any]
) -> list[str]:
    """The conversions (by `key`) of which this rank holds a value that the checkpoint's dtype can't hold."""
    changed = []
    for conversion in conversions:
        for dtype in {kept_from[key] for key, _ in conversion.outputs if key in kept_from}:
            values = [state[name] for name in conversion.names if name in state]
            parts = [value.to_local() if isinstance(value, DTensor) else value for value in values]
            if not all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts):
                changed.append(conversion.key)
    return changed


def entries_to_save(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a checkpoint holds: not those the model never saves, and of a tied weight its source alone."""
    drop = set(model._keys_to_ignore_on_save or ())
    params: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for target, source in vars(model)["all_tied_weights_keys"].items():
        # Gathered or passed in, the two are two tensors; in the model they are one as long as they are tied.
        if source in state_dict and target in params and params[target] is params.get(source):
            drop.add(target)
    return {name: value for name, value in state_dict.items() if name not in drop}
