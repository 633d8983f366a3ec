"""Placements: which part of a logical tensor a rank's tensor is.

In:  a placement's text, the shape of the rank's tensor, the rank's layout.
Out: a `records.Placement` in pieces, each a regular nest of elements. `check_cover` says whether
     the placements of several ranks make up the whole. No torch: compare uses this too.

What newcomers get wrong: the shape that goes in is the rank's own, the logical shape comes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

from upguard_plugin.errors import PlacementError
from upguard_plugin.placement_grammar import (
    ZIGZAG,
    DimSpec,
    PlacementSpec,
    Split,
    View,
    parse_placement,
)
from upguard_plugin.placement_pieces import (
    PlacedDim,
    Ranges,
    cut_pieces,
    row_major_strides,
    take_stretch,
)
from upguard_plugin.records import Axis, Layout, Piece, Placement

__all__ = ["PlacementSpec", "parse_placement", "replicated", "resolve_placement", "without_dim"]

# Axes that every layout has; where one is not listed its size is 1.
STANDARD_AXES = ("tp", "cp", "ep", "dp", "pp", "vpp", "etp", "edp")


def resolve_placement(
    spec: PlacementSpec | str,
    shape: Sequence[int],
    layout: Layout,
    *,
    dims: Mapping[str, int] | None = None,
    whole_shape: Sequence[int] | None = None,
) -> Placement:
    """Work out which elements of the logical tensor a rank's tensor of this shape holds.

    shape: of the rank's tensor. dims: sizes of named dims on this rank, where fused dims cannot be
    told apart otherwise. whole_shape: with `|`, the shape on this rank of the tensor that the first
    view describes (of the parameter whose slice this is); not needed where all dims are numbers.
    Raises PlacementError, with the placement and the shape in it, where they do not fit.
    """
    spec = parse_placement(spec) if isinstance(spec, str) else spec
    return _Resolver(spec, tuple(shape), layout, dict(dims or {})).placement(whole_shape)


def replicated(shape: Sequence[int], mesh: str = "dense") -> Placement:
    """The placement of a tensor that every rank of its mesh holds whole."""
    strides = row_major_strides(shape)
    piece = Piece(tuple(shape), 0, strides, 0, strides)
    return Placement("*", tuple(shape), (piece,), mesh=mesh)


def without_dim(text: str, name: str, over: str) -> tuple[int, str] | None:
    """Where a dim of that name stands, and the placement of one slice along it.

    The dim may be split over the axis `over` only. Its place counts from the end where `*` stands
    before it. None where there is no such dim. Raises PlacementError for a text that is none.
    """
    spec = parse_placement(text)
    terms = spec.views[0].terms
    whole, split = DimSpec(name), DimSpec(name, splits=(Split(over),))
    found = [i for i, term in enumerate(terms) if term in ((whole,), (split,))]
    if len(spec.views) > 1 or not found:
        return None
    rest = re.sub(rf"(?<![\w(]){name}(\[{over}\])?(?![\w)\[~])\s*", "", text, count=1).strip()
    return (found[0] - len(terms) if None in terms[: found[0]] else found[0]), rest


class _Resolver:
    def __init__(
        self, spec: PlacementSpec, shape: tuple[int, ...], layout: Layout, dims: dict[str, int]
    ) -> None:
        self._spec = spec
        self._shape = shape
        self._layout = layout
        self._sizes = dims

    def placement(self, whole_shape: Sequence[int] | None) -> Placement:
        spec = self._spec
        first, *flat = spec.views
        dims = self._dims(first, self._before_flat(first, whole_shape) if flat else self._shape)
        ranges = [(0, prod(dim.size for dim in dims))]
        for view in flat:
            ranges = self._flat_ranges(view, ranges)
        held = sum(end - start for start, end in ranges)
        if flat and held != prod(self._shape):
            raise self._error(f"the last view holds {held} elements of the flattened tensor")
        return Placement(
            spec.text,
            self._logical_shape(dims),
            tuple(cut_pieces(dims, ranges)),
            tuple(axis for axis in spec.axes if self._axis(axis).size > 1),
            tuple(axis for axis in spec.partial if self._axis(axis).size > 1),
            spec.mesh,
        )

    def _before_flat(self, first: View, whole_shape: Sequence[int] | None) -> tuple[int, ...]:
        """This rank's shape of the tensor that is flattened."""
        if whole_shape is not None:
            return tuple(whole_shape)
        sizes = [[self._known_size(dim) for dim in term] for term in first.terms if term]
        if None in first.terms or any(size is None for term in sizes for size in term):
            raise self._error(
                "the shape of the tensor before '|' is not known",
                "write its sizes as numbers, as in '16 8 | flat[dp]', or pass whole_shape",
            )
        return tuple(prod(size for size in term if size is not None) for term in sizes)

    def _dims(self, view: View, shape: tuple[int, ...]) -> list[PlacedDim]:
        terms = list(view.terms)
        if None in terms:
            at, skipped = terms.index(None), len(shape) - (len(terms) - 1)
            terms[at : at + 1] = [(DimSpec("*"),)] * skipped
        if len(terms) != len(shape):
            raise self._error(f"it has {len(terms)} dims, the tensor has {len(shape)}")
        dims: list[PlacedDim] = []
        for term, size in zip(terms, shape, strict=True):
            assert term is not None  # `*` was replaced above
            sizes = self._fused_sizes(term, size)
            for k, (dim, dim_size) in enumerate(zip(term, sizes, strict=True)):
                dims.append(self._dim(dim, dim_size, joins_previous=k > 0))
        return dims

    def _fused_sizes(self, term: tuple[DimSpec, ...], size: int) -> list[int]:
        """The rank's size of each fused dim; at most one group of them may be left to find out."""
        known = [self._known_size(dim) for dim in term]
        unknown = [k for k, one in enumerate(known) if one is None]
        # A run of unknown dims counts as one as long as only its first is split, into equal parts
        # or by zigzag: then a part of the first is a contiguous part of the run.
        for k in unknown[1:]:
            if k - 1 not in unknown or term[k].splits or term[unknown[0]].real is not None:
                raise self._error(
                    f"the sizes of {term[unknown[0]].name} and {term[k].name} cannot be told apart",
                    f"write one as a number, or pass dims={{{term[k].name!r}: ...}}",
                )
        rest = prod(one for one in known if one is not None)
        if not unknown:
            if rest != size:
                raise self._error(
                    f"dim {self._names(term)} of this rank should be {rest}, it is {size}"
                )
            return [one for one in known if one is not None]
        if rest == 0 or size % rest:
            raise self._error(f"dim {self._names(term)} of {size} is not a multiple of {rest}")
        found = [1 if one is None else one for one in known]
        found[unknown[0]] = size // rest
        return found

    def _known_size(self, dim: DimSpec) -> int | None:
        """The rank's size of a dim where the text, the layout or `dims` say it."""
        if dim.name in self._sizes:
            return self._sizes[dim.name]
        if dim.size is not None:
            return sum(end - start for start, end in self._split_ranges(dim, dim.size))
        last = dim.splits[-1] if dim.splits else None
        if last is not None and last.range is not None:
            return last.range[1] - last.range[0]
        if last is not None and last.sizes is not None:
            return self._part_size(last)
        return None

    def _dim(self, dim: DimSpec, size: int, *, joins_previous: bool) -> PlacedDim:
        padded = dim.size if dim.size is not None else self._padded_size(dim, size)
        ranges = self._split_ranges(dim, padded)
        held = sum(end - start for start, end in ranges)
        if held != size:
            raise self._error(f"dim {dim.name} of this rank should be {held}, it is {size}")
        logical = padded if dim.real is None else dim.real
        if logical > padded:
            raise self._error(f"dim {dim.name} cannot hold {logical} of {padded}")
        return PlacedDim(size, logical, tuple(ranges), joins_previous)

    def _padded_size(self, dim: DimSpec, size: int) -> int:
        """The size of the dim over all ranks, from the rank's own."""
        for split in reversed(dim.splits):
            if split.range is not None:
                raise self._error(
                    f"the size of dim {dim.name} over all ranks is not known",
                    "write it as a number, or split the flattened tensor: '... | flat[axis@a:b]'",
                )
            if split.sizes is not None:
                part = self._part_size(split)
                if part != size:
                    raise self._error(f"dim {dim.name} of this rank should be {part}, it is {size}")
                size = sum(split.sizes)
            else:
                size *= self._axis(split.axis).size
        return size

    def _split_ranges(self, dim: DimSpec, size: int) -> Ranges:
        ranges = [(0, size)]
        for split in dim.splits:
            ranges = self._apply(split, dim, ranges)
        return ranges

    def _flat_ranges(self, view: View, ranges: Ranges) -> Ranges:
        if len(view.terms) != 1 or not view.terms[0] or len(view.terms[0]) != 1:
            raise self._error("a view after '|' has one dim, the flattened tensor")
        dim = view.terms[0][0]
        total = sum(end - start for start, end in ranges)
        if dim.real is None:
            return self._apply_all(dim, ranges)
        if dim.real != total:
            raise self._error(f"{dim.name}~{dim.real}: the flattened tensor has {total} elements")
        padded = prod(self._axis(split.axis).size for split in dim.splits) * prod(self._shape)
        if padded < total:
            raise self._error(f"the parts hold {padded} of {total} elements")
        # Padding lies beyond every element that a dim has; `cut_pieces` leaves it out.
        return self._apply_all(dim, [*ranges, (total, padded)])

    def _apply_all(self, dim: DimSpec, ranges: Ranges) -> Ranges:
        for split in dim.splits:
            ranges = self._apply(split, dim, ranges)
        return ranges

    def _apply(self, split: Split, dim: DimSpec, ranges: Ranges) -> Ranges:
        """This rank's stretches of a dim of which `ranges` is what the outer axes left."""
        size = sum(end - start for start, end in ranges)
        axis = self._axis(split.axis)
        if split.range is not None:
            start, end = split.range
            if not start <= end <= size:
                raise self._error(f"{start}:{end} is no part of the {size} elements of {dim.name}")
            return take_stretch(ranges, start, end)
        if split.sizes is not None:
            if sum(split.sizes) != size:
                raise self._error(f"the parts of {dim.name} make {sum(split.sizes)}, not {size}")
            start = sum(split.sizes[: axis.index])
            return take_stretch(ranges, start, start + self._part_size(split))
        num_chunks = 2 * axis.size if split.order == ZIGZAG else axis.size
        if size % num_chunks:
            raise self._error(
                f"dim {dim.name} of {size} does not split into {num_chunks} equal parts",
                f"write the size of each part: {dim.name}[{split.axis}:a,b,...]",
            )
        step = size // num_chunks
        chunks = [axis.index]
        if split.order == ZIGZAG:
            chunks.append(num_chunks - 1 - axis.index)
        return [one for c in chunks for one in take_stretch(ranges, c * step, (c + 1) * step)]

    def _part_size(self, split: Split) -> int:
        axis = self._axis(split.axis)
        assert split.sizes is not None
        if len(split.sizes) != axis.size:
            raise self._error(f"{len(split.sizes)} sizes for the {axis.size} ranks of {axis.name}")
        return split.sizes[axis.index]

    def _axis(self, name: str) -> Axis:
        mesh = self._spec.mesh
        axis = self._layout.axis(name, mesh)
        if axis is not None:
            return axis
        other = "dense" if mesh == "expert" else "expert"
        if self._layout.axis(name, other) is not None:
            remedy = "add @expert" if other == "expert" else "leave out @expert"
            raise self._error(f"{name} is an axis of the {other} mesh", remedy)
        if name not in STANDARD_AXES:
            known = ", ".join(sorted({axis.name for axis in self._layout.axes})) or "none"
            raise self._error(f"the layout has no axis {name}", f"its axes are: {known}")
        return Axis(name, 1, 0, (), mesh)

    def _logical_shape(self, dims: list[PlacedDim]) -> tuple[int, ...]:
        shape: list[int] = []
        for dim in dims:
            if dim.joins_previous:
                shape[-1] *= dim.logical
            else:
                shape.append(dim.logical)
        return tuple(shape)

    def _names(self, term: tuple[DimSpec, ...]) -> str:
        names = " ".join(dim.name for dim in term)
        return f"({names})" if len(term) > 1 else names

    def _error(self, what: str, remedy: str = "") -> PlacementError:
        both = f"placement {self._spec.text!r} does not fit a tensor of shape {list(self._shape)}"
        return PlacementError(f"{both}: {what}", remedy=remedy)
