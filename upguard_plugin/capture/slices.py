"""Flat tensors of an optimizer of which each rank keeps a slice, as a loop of one's own has them.

In:  a flat tensor and which elements of which parameters lie in it, one after the other.
Out: their `Fragment`s for the optimizer probe, their `Slice`s for the placements.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor

from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.parts import Fragment
from upguard_plugin.capture.placements import Placements, Slice
from upguard_plugin.errors import ConfigError


class FlatTensors:
    """What the training loop has said of its flat tensors."""

    def __init__(self, names: ParameterNames, placements: Placements) -> None:
        self._names = names
        self._placements = placements
        self._known: dict[int, tuple[weakref.ref[Tensor], tuple[Fragment, ...]]] = {}

    def add(self, flat: Tensor, elements: Mapping[str, tuple[int, int]], axis: str) -> None:
        """Raises ConfigError for what the models do not have, and what does not fit into `flat`."""
        at, slices, fragments = 0, {}, []
        for name, (start, end) in elements.items():
            parameter = self._names.parameters.get(name)
            if parameter is None or not 0 <= start <= end <= parameter.numel():
                has = "no model has it" if parameter is None else f"it has {parameter.numel()}"
                raise ConfigError(f"cannot find elements {start} to {end} of {name!r}: {has}")
            slices[name] = Slice(start, end, tuple(parameter.shape), axis)
            fragments.append(Fragment(name, at, end - start))
            at += end - start
        if flat.dim() != 1 or at > flat.numel():
            raise ConfigError(f"{at} elements do not lie in a tensor of shape {list(flat.shape)}")
        for name, one in slices.items():
            self._placements.add_slice(name, one)
        kept = tuple(fragment for fragment in fragments if fragment.size)
        self._known[id(flat)] = weakref.ref(flat), kept

    def fragments_of(self, flat: Tensor) -> Sequence[Fragment]:
        """Nothing of a tensor that nobody spoke of."""
        known, fragments = self._known.get(id(flat), (None, ()))
        return fragments if known is not None and known() is flat else ()
