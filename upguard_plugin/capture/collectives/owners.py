"""What a collective works on: the name of a parameter, a gradient or a buffer, where one is known.

In:  the models' parameters and buffers by canonical name.
Out: `owner_of(tensor)`: a name for people, or None. Adapters add owners of their own (buckets).

Decided by what the objects are at the moment of the call, never by remembered addresses: those are
used again, and the name would differ between two equal runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from upguard_plugin.records import Stretch

OwnerOf = Callable[[torch.Tensor], "str | None"]


class ParameterOwner:
    """Names a tensor that is a whole parameter, its `.grad` or `.main_grad`, or a buffer."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._by_shape: dict[torch.Size, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in parameters.items():
            self._by_shape.setdefault(parameter.shape, []).append((name, parameter))

    def __call__(self, tensor: torch.Tensor) -> str | None:
        for name, parameter in self._by_shape.get(tensor.shape, ()):
            if _same(tensor, parameter):
                return name
            for attribute in ("grad", "main_grad"):
                gradient = getattr(parameter, attribute, None)
                if isinstance(gradient, torch.Tensor) and _same(tensor, gradient):
                    return f"{name}.{attribute}"
        return None

    def stretches_in(self, buffer: torch.Tensor) -> tuple[Stretch, ...]:
        """Whose memory a contiguous buffer is made of: gradients, parameters that are views of it.

        Of those that share memory the first in (gradient, main gradient, parameter) counts.
        """
        begin, end, size = _data_ptr(buffer), _data_ptr(buffer) + buffer.nbytes, buffer.itemsize
        found: dict[int, Stretch] = {}
        for name, parameter in self._parameters.items():
            for attribute in ("grad", "main_grad", "data"):
                part = getattr(parameter, attribute, None)
                if part is None or not _lies_in(part, buffer, begin, end):
                    continue
                start = (_data_ptr(part) - begin) // size
                whose = name if attribute == "data" else f"{name}.{attribute}"
                found.setdefault(start, Stretch(start, start + part.numel(), whose))
        return tuple(found[start] for start in sorted(found))


def _lies_in(part: Any, buffer: torch.Tensor, begin: int, end: int) -> bool:
    return (
        type(part) in (torch.Tensor, torch.nn.Parameter)
        and part.layout is torch.strided
        and part.dtype == buffer.dtype
        and part.device == buffer.device
        and part.numel() > 0
        and part.is_contiguous()
        and begin <= _data_ptr(part)
        and _data_ptr(part) + part.nbytes <= end
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that are alive, of one shape, are the same memory."""
    if one is other:
        return True
    plain = type(other) in (torch.Tensor, torch.nn.Parameter) and other.layout is one.layout
    return (
        plain
        and one.layout is torch.strided
        and one.dtype == other.dtype
        and one.numel() > 0
        and _data_ptr(one) == _data_ptr(other)
    )


_data_ptr = torch._C.TensorBase.data_ptr  # of torch.Tensor it may be watched by a probe
