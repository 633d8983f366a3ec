"""Whole tensors of chosen events, kept for `upguard show --diff`.

In:  the config's `dump`: a glob for boundaries, and steps. Tensors as they are recorded.
Out: per step one dump called `step<N>`; in it each tensor under the seq of its event.

What a dtype means stands in the event. Here are bytes: where numpy has no such dtype (bfloat16,
float8), the elements are unsigned integers of the same size. Copying waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import numpy as np
import torch

from upguard_plugin.config import Dump
from upguard_plugin.config_values import in_ranges

_PLAIN = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dumps:
    """The tensors of the current step that are to be kept whole."""

    def __init__(self, wanted: Dump | None) -> None:
        self._wanted = wanted
        self._is_wanted: dict[str, bool] = {}  # by boundary
        self._kept: dict[str, np.ndarray] = {}
        self._has_steps = False  # whether one of its steps was recorded
        self.active = False

    def select(self, step: int) -> None:
        """Say which step begins."""
        self.active = self._wanted is not None and in_ranges(self._wanted.steps, step)

    def keep(self, seq: int, boundary: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of an event, if its boundary is wanted."""
        wanted = self._is_wanted.get(boundary)
        if wanted is None:
            assert self._wanted is not None
            wanted = self._is_wanted[boundary] = fnmatchcase(boundary, self._wanted.boundary)
        if wanted:
            self._kept[str(seq)] = as_array(tensor)

    def take(self, *, recorded: bool) -> dict[str, np.ndarray]:
        """What was kept in the step that ends. recorded: whether that step was."""
        self._has_steps |= self.active and recorded
        kept, self._kept = self._kept, {}
        return kept

    def idle(self) -> Iterator[str]:
        """What is to be said if nothing was kept in the whole run."""
        if self._wanted is not None and not self._has_steps:
            yield f"the setting dump asks for steps {self._wanted.steps}; none of them was recorded"
        elif self._wanted is not None and not any(self._is_wanted.values()):
            yield (
                f"the setting dump has {self._wanted.boundary!r}, and no boundary that was "
                "recorded in its steps is called like that"
            )


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor's elements in host memory; of a DTensor, of its local part."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        copy = tensor.detach().resolve_conj().resolve_neg().cpu()
        copy = copy.clone(memory_format=torch.contiguous_format)
        if copy.is_complex():
            copy = torch.view_as_real(copy)
        if copy.dtype not in _PLAIN:
            copy = copy.view(_BITS[copy.itemsize])
        return torch._C.TensorBase.numpy(copy)
