"""From any torch tensor to the dense parts that hold its bytes.

In:  a tensor of any layout, wrapper subclass or lazy bit (conjugate, negative).
Out: plain strided tensors on their own device, each with the byte offset at which it is hashed.

Most tensors are their own only part, at offset 0. A tensor made of several (indices and values of
a sparse one, data and scales of a scaled one) holds part k at `k * PART_BYTES`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from upguard_plugin.errors import UnsupportedTensorError
from upguard_plugin.fingerprint.dtensors import placement_of
from upguard_plugin.fingerprint.keys import PART_BYTES
from upguard_plugin.records import Placement

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
data_ptr = torch._C.TensorBase.data_ptr  # of torch.Tensor it may be watched by a probe

# Of Transformer Engine's float8 tensors, by attribute: what is kept of a tensor, with its scales.
# Transposed copies are made of the data when they are wanted.
_SCALED = (
    ("_data", "_scale_inv"),
    ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A dense tensor and where its bytes are hashed."""

    tensor: Tensor
    offset: int = 0  # in bytes, beyond what the placement says
    placement: Placement | None = None
    has_values: bool = True  # numbers of the tensor; not the indices of a sparse one


def check_host() -> None:
    """Raise UnsupportedTensorError on a big-endian host: its bytes are in another order."""
    if sys.byteorder != "little":
        raise UnsupportedTensorError("cannot fingerprint tensors on a big-endian host")


def dense_parts(tensor: Tensor, placement: Placement | None = None) -> tuple[Part, ...]:
    """Split a tensor into dense parts. Copies only where lazy bits must be resolved.

    Raises UnsupportedTensorError for tensors without defined bytes: quantised ones, meta and fake
    ones, layouts that torch does not open.
    """
    if tensor.is_quantized:
        raise _unsupported(tensor, "it is quantised by torch", "hash its int_repr() and its scales")
    if type(tensor) not in PLAIN_TYPES:
        opened = _open_subclass(tensor, placement)
        if opened is not None:
            return opened
    if tensor.layout is not torch.strided:
        if placement is not None:
            raise _unsupported(
                tensor, f"its layout is {tensor.layout}, and a placement needs strides"
            )
        return _number(_sparse_parts(tensor))
    if tensor.device.type == "meta":
        raise _unsupported(tensor, "it has no data (device meta)")
    if tensor._is_zerotensor():  # zeros without memory, as autograd makes them for tangents
        tensor = tensor.clone()
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        raise _unsupported(tensor, "its storage was freed")
    return (Part(tensor.detach().resolve_conj().resolve_neg(), placement=placement),)


def _open_subclass(tensor: Tensor, placement: Placement | None) -> tuple[Part, ...] | None:
    """The parts of a wrapper subclass, or None for a subclass that is a plain tensor itself."""
    if hasattr(tensor, "fake_mode"):
        raise _unsupported(tensor, "it has no data (a fake tensor)")
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, Tensor):  # a DTensor; `to_local()` would put a node into the graph
        return dense_parts(local, placement or placement_of(tensor))
    if isinstance(tensor, AsyncCollectiveTensor):
        return dense_parts(tensor.wait(), placement)
    names = _names_of_parts(tensor)
    if not names:
        return None
    if placement is not None:
        raise _unsupported(tensor, "it is made of parts, and a placement describes one tensor")
    return _number([Part(getattr(tensor, name)) for name in names])


def wait_for(tensor: Tensor) -> None:
    """Wait for a collective whose result waits by itself when it is used; for nothing else.

    To be called before a lock is taken that the end of a collective may need.
    """
    if type(tensor) not in PLAIN_TYPES:
        held = getattr(tensor, "_local_tensor", tensor)
        if isinstance(held, AsyncCollectiveTensor):
            held.wait()


def is_composite(tensor: Tensor) -> bool:
    """Whether a tensor is made of several, which no one placement describes."""
    return type(tensor) not in PLAIN_TYPES and bool(_names_of_parts(tensor))


def _names_of_parts(tensor: Tensor) -> list[str]:
    """Attributes that hold the parts of a wrapper subclass; none if it is a tensor itself."""
    for names in _SCALED:
        found = [name for name in names if isinstance(getattr(tensor, name, None), Tensor)]
        if len(found) > 1:
            return found
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    return sorted(flatten(tensor)[0]) if flatten is not None else []


def _sparse_parts(tensor: Tensor) -> list[Part]:
    """Indices first, as they are stored (a COO tensor is not coalesced), then values."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        indices, values = [tensor._indices()], tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        indices, values = [tensor.crow_indices(), tensor.col_indices()], tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        indices, values = [tensor.ccol_indices(), tensor.row_indices()], tensor.values()
    else:
        raise _unsupported(tensor, f"its layout is {tensor.layout}", "hash a dense copy")
    return [*(Part(index, has_values=False) for index in indices), Part(values)]


def _number(parts: list[Part]) -> tuple[Part, ...]:
    """Put part k at k times PART_BYTES; parts of parts are counted through."""
    numbered: list[Part] = []
    for part in parts:
        for inner in dense_parts(part.tensor):
            offset = len(numbered) * PART_BYTES
            numbered.append(replace(inner, offset=offset, has_values=part.has_values))
    return tuple(numbered)


def _unsupported(tensor: Tensor, why: str, remedy: str = "") -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"cannot fingerprint a tensor of {dtype_name(tensor.dtype)} {list(tensor.shape)}: {why}",
        remedy=remedy,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
