"""From any torch tensor to the dense parts that hold its bytes.

In:  a tensor of any layout, wrapper subclass or lazy bit (conjugate, negative).
Out: plain strided tensors on their own device, each with the byte offset at which it is hashed.

Most tensors are their own only part, at offset 0. A tensor made of several (indices and values of
a sparse one, data and scales of a scaled one) holds part k at `k * PART_BYTES`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from upguard_plugin.errors import UnsupportedTensorError
from upguard_plugin.fingerprint.keys import PART_BYTES
from upguard_plugin.records import Placement

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Part:
    """A dense tensor and where its bytes are hashed."""

    tensor: Tensor
    offset: int  # in bytes, beyond what the placement says
    placement: Placement | None = None


def dense_parts(tensor: Tensor, placement: Placement | None = None) -> tuple[Part, ...]:
    """Split a tensor into dense parts. Copies only where lazy bits must be resolved.

    Raises UnsupportedTensorError for tensors without defined bytes: quantised ones, meta and fake
    ones, layouts that torch does not open.
    """
    if sys.byteorder != "little":
        raise _unsupported(tensor, "this host is big-endian")
    if tensor.is_quantized:
        raise _unsupported(tensor, "it is quantised by torch", "hash its int_repr() and its scales")
    if type(tensor) not in PLAIN_TYPES:
        opened = _open_subclass(tensor, placement)
        if opened is not None:
            return opened
    if tensor.layout is not torch.strided:
        return _number(_sparse_parts(tensor))
    if tensor.device.type == "meta":
        raise _unsupported(tensor, "it has no data (device meta)")
    return (Part(tensor.detach().resolve_conj().resolve_neg(), 0, placement),)


def _open_subclass(tensor: Tensor, placement: Placement | None) -> tuple[Part, ...] | None:
    """The parts of a wrapper subclass, or None for a subclass that is a plain tensor itself."""
    to_local = getattr(tensor, "_local_tensor", None)
    if isinstance(to_local, Tensor):  # DTensor; `to_local()` would put a node into the graph
        wait = getattr(to_local, "wait", None)  # an asynchronous collective's result
        return dense_parts(wait() if wait is not None else to_local, placement)
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, _ = flatten(tensor)
    inner = [getattr(tensor, name) for name in sorted(names)]
    return _number([part.tensor for one in inner for part in dense_parts(one)])


def _sparse_parts(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if getattr(tensor, "is_mkldnn", False):
        return [tensor.to_dense()]
    raise _unsupported(tensor, f"its layout {tensor.layout} cannot be opened", "hash its parts")


def _number(tensors: list[Tensor]) -> tuple[Part, ...]:
    return tuple(
        Part(part.tensor, k * PART_BYTES)
        for k, tensor in enumerate(tensors)
        for part in dense_parts(tensor)
    )


def _unsupported(tensor: Tensor, why: str, remedy: str = "") -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"cannot fingerprint a tensor of {dtype_name(tensor.dtype)} {list(tensor.shape)}: {why}",
        remedy=remedy,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
