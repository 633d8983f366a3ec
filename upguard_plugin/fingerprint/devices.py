"""Slots whose tensors live on a device: hashes stay there until they are taken.

CUDA tensors go through the Triton kernels of `gpu.py`. Any other device, or CUDA without Triton,
is hashed on the CPU after a copy, which waits for the device; `note` says so for the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from upguard_plugin.fingerprint.cpu import hash_sweeps
from upguard_plugin.fingerprint.measure import SCRATCH_BYTES, measure_sweeps
from upguard_plugin.fingerprint.parts import PLAIN_TYPES, Part, data_ptr
from upguard_plugin.fingerprint.rows import Planned, Plans, Rows, sweep_table


class DeviceSlots(Protocol):
    """The slots of one device."""

    @property
    def note(self) -> str | None:
        """A sentence for the manifest, where there is something to say."""

    def put(self, slot: int, planned: Sequence[Planned], measured: bool, size: int) -> None:
        """Hash a slot's parts; measure them too, with a sketch of `size` buckets, if asked."""

    def put_many(self, slots: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Hash tensors that `is_small` holds of, whole, in one go."""

    def take_into(self, pairs: npt.NDArray, measures: npt.NDArray) -> None:
        """Write the rows of this device's slots into the host's tables and forget them."""

    def forget(self, first: int) -> None:
        """Drop slot `first` and all later ones."""


SMALL_BYTES = 1 << 16  # from here on a tensor is worth a launch of its own


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a device tensor can be hashed together with others: short, plain, whole words."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and 0 < tensor.nbytes < SMALL_BYTES
        and tensor.nbytes % 4 == 0
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized or tensor.is_meta)
        and tensor.untyped_storage().nbytes() > 0
        and data_ptr(tensor) % 4 == 0
    )


def device_slots(device: torch.device, sketch_size: int) -> DeviceSlots:
    """The slots for a device: Triton's where it can run, else the CPU's after a copy."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from upguard_plugin.fingerprint.gpu import TritonSlots  # optional and slow to load

        return TritonSlots(device, sketch_size)
    return CopiedSlots(device, sketch_size)


class CopiedSlots:
    """Slots of a device without kernels: each tensor is copied to the host when it is put."""

    def __init__(self, device: torch.device, sketch_size: int) -> None:
        self.note = f"tensors on {device} were copied to the host to be hashed: no kernel for it"
        self._columns = 2 + sketch_size
        self._pairs = Rows(2, np.uint64, 0)
        self._measures = Rows(self._columns, np.float64, np.nan)
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        self._plans = Plans()
        self._slots: list[int] = []

    def put(self, slot: int, planned: Sequence[Planned], measured: bool, size: int) -> None:
        at = len(self._slots)
        self._pairs.reserve(at + 1)
        self._measures.reserve(at + 1)
        copies = [
            Part(part.tensor.cpu(), part.offset, part.placement, part.has_values)
            for part, _, _ in planned
        ]
        table = sweep_table(at, [self._plans.plan(part) for part in copies])
        where = (table.ctypes.data, len(table), self._pairs.address)
        scratch = self._scratch.ctypes.data
        if measured:
            self._measures.values[at, : 2 + size] = 0.0
            measure_sweeps(*where, self._measures.address, self._columns, size, scratch)
        else:
            hash_sweeps(*where, scratch)
        self._slots.append(slot)

    def put_many(self, slots: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        for slot, tensor in zip(slots, tensors, strict=True):
            part = Part(tensor)
            self.put(slot, [(part, tensor, ())], measured=False, size=0)

    def take_into(self, pairs: npt.NDArray, measures: npt.NDArray) -> None:
        count = len(self._slots)
        pairs[self._slots] = self._pairs.values[:count]
        if len(measures) >= len(pairs):
            measures[self._slots] = self._measures.values[:count]
        self.forget(0)

    def forget(self, first: int) -> None:
        kept = [slot for slot in self._slots if slot < first]
        self._pairs.clear(len(kept), len(self._slots))
        self._measures.clear(len(kept), len(self._slots))
        self._slots = kept
