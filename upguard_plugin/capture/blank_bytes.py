"""Which bytes of a storage are blank: nobody has written them, or they were copied from such bytes.

In:  writes, and what allocators and adapters say.
Out: whether all bytes that a tensor reaches hold a value of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from upguard_plugin.capture.extents import Extent, extent_of


@dataclass(slots=True, eq=False, kw_only=True)
class BlankBytes:
    """The blank bytes of one storage. Made for nearly every operator: mostly there are none."""

    _blank: Sequence[Extent] = ()  # bytes that nobody has written yet
    _filled: int = 0  # bytes that strided writes put among the blank ones
    _told: Sequence[Extent] = ()  # bytes that are blank whatever is forgotten
    pads: bool = False  # the blank bytes lie among others: what is made of them is blank as well

    @property
    def blank_extents(self) -> Sequence[Extent]:
        """Bytes that hold no value."""
        return self._blank

    @property
    def knows_blank(self) -> bool:
        """Whether the blank extents are so to the byte: no write had gaps among them."""
        return not self._filled

    def blank(self, extent: Extent) -> None:
        """These bytes, too, are whatever memory held before."""
        if extent not in self._blank:
            self._blank = (*self._blank, extent)

    def keep_blank(self, extents: Sequence[Extent]) -> None:
        """These bytes are blank until they are seen to be written, and again when told again."""
        self._told = extents
        for extent in extents:
            self.blank(extent)

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes that the tensor reaches were written by somebody."""
        if not self._blank:
            return True
        first, last = extent_of(tensor)
        return not any(low <= last and first <= high for low, high in self._blank)

    def fill(self, tensor: torch.Tensor) -> None:
        """The tensor was written: its bytes are blank no more."""
        if not self._blank:
            return
        first, last = extent_of(tensor)
        if last - first + 1 > tensor.nbytes:  # with gaps, which other writes may fill
            self._filled += tensor.nbytes
            if self._filled >= sum(high - low + 1 for low, high in self._blank):
                self.forget_blank()
            return
        left: list[Extent] = []
        for low, high in self._blank:
            left += [] if first <= low else [(low, min(high, first - 1))]
            left += [] if high <= last else [(max(low, last + 1), high)]
        self._blank, self.pads = left, bool(left)

    def forget_blank(self) -> None:
        """Take all bytes for written: by something that did not say which."""
        self._blank, self._filled, self.pads = self._told, 0, bool(self._told)
