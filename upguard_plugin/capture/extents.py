"""How a tensor lies in its storage: which bytes it reaches, and how it looks at them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from upguard_plugin.fingerprint.parts import PLAIN_TYPES, data_ptr
from upguard_plugin.trace.batch import NONE

# That of UntypedStorage may be watched by a probe.
storage_data_ptr = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
Extent = tuple[int, int]  # first and last byte that a tensor reaches in its storage


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage with its bytes in it."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return type(tensor) in PLAIN_TYPES or not (
        is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "fake_mode")
    )


def address_of(tensor: torch.Tensor) -> int:
    """Where its first element lies. Nobody is handed the address: its memory stays trusted."""
    return int(data_ptr(tensor))


def identity_of(tensor: torch.Tensor) -> int:
    """Where torch keeps the tensor's storage; NONE for a tensor that is not tracked."""
    if type(tensor) not in PLAIN_TYPES and not is_tracked(tensor):
        return NONE
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # sparse
        return NONE


def extent_of(tensor: torch.Tensor) -> Extent:
    """First and last byte of the storage that the tensor reaches."""
    first, size = int(tensor.storage_offset()), tensor.itemsize
    if tensor.is_contiguous():
        begin = first * size
        return begin, begin + tensor.nbytes - 1
    last = first
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += int((n - 1) * step)
    return first * size, (last + 1) * size - 1


def reaches(tensor: torch.Tensor, extent: Extent) -> bool:
    """Whether an element of the tensor, in the same storage, lies in these bytes, to the byte."""
    low, high = extent
    first, last = extent_of(tensor)
    if last < low or high < first or not tensor.numel():
        return False
    if tensor.is_contiguous():
        return True
    size = tensor.element_size()
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    # In elements from the first one, to where an element begins that still reaches in.
    return _hits(dims, -((first + size - 1 - low) // size), (high - first) // size)


def _hits(dims: list[tuple[int, int]], low: int, high: int) -> bool:
    """Whether a sum of one multiple of each stride, below its size, lies from `low` to `high`."""
    if low <= 0 <= high:
        return True
    if not dims or high < 0:
        return False
    (stride, size), *inner = dims
    if stride == 0:
        return _hits(inner, low, high)
    rest = sum(step * (num - 1) for step, num in inner)
    # Where the stride is larger than all inside of it, at most two indices are left.
    nearest = range(max(0, -((rest - low) // stride)), min(size - 1, high // stride) + 1)
    return any(_hits(inner, low - i * stride, high - i * stride) for i in nearest)


def look(tensor: torch.Tensor) -> Hashable:
    """How a tensor looks at its storage: equal looks at unwritten bytes have equal fingerprints."""
    lazy = tensor.is_conj() + 2 * tensor.is_neg()  # signs that are not in the bytes yet
    if tensor.is_contiguous():
        # A reshape leaves the fingerprint as it is.
        return (tensor.storage_offset(), tensor.numel(), tensor.dtype, lazy)
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, lazy)
