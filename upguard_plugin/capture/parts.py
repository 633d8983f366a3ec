"""What an optimizer holds of each parameter: a tensor of its own, or a stretch of a flat one.

ZeRO keeps the masters and states of many parameters in one flat tensor; which stretch is whose, an
adapter, or the training loop, says in `Fragment`s.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from upguard_plugin.capture.extents import storage_data_ptr
from upguard_plugin.fingerprint.parts import PLAIN_TYPES


@dataclass(frozen=True, slots=True)
class Fragment:
    """A stretch of an optimizer's flat tensor that belongs to one parameter of the model."""

    name: str  # of the parameter
    start: int  # in elements of the flat tensor
    size: int
    shape: tuple[int, ...] | None = None  # of the parameter, where it is all there


@dataclass(frozen=True, slots=True)
class Part:
    """What an optimizer holds of one parameter: a tensor of its own, or a stretch of one."""

    name: str
    held: Tensor
    fragment: Fragment | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The parameter's part of a tensor that is laid out as the held one is."""
        fragment = self.fragment
        if fragment is None or tensor.numel() != self.held.numel():
            return tensor
        flat = tensor.detach().view(-1)[fragment.start : fragment.start + fragment.size]
        return flat if fragment.shape is None else flat.view(fragment.shape)

    def lies_in(self, weight: Tensor) -> bool:
        """Whether what is held is a stretch of the weight itself: no master of it."""
        held = self.held
        if weight.dtype != held.dtype:
            return False
        if type(held) not in PLAIN_TYPES or type(weight) not in PLAIN_TYPES:
            return False
        return storage_data_ptr(weight.untyped_storage()) == storage_data_ptr(
            held.untyped_storage()
        )
