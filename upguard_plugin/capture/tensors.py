"""What a module receives or returns, taken apart into leaves.

In:  any value: tensors, numbers, strings, None, nested in dicts, lists, tuples, NamedTuples,
     dataclasses and model outputs.
Out: (slot, leaf) pairs in a fixed order; a slot is the path to the leaf: `args.0`, `kwargs.mask`.

Objects of other classes (caches, process groups, configs) have no bytes that two runs share;
their class names are collected, so that the trace can say what was not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 16  # of nesting
_LEAVES = (
    bool, int, float, complex, str, bytes, Enum, np.ndarray, np.generic, torch.dtype,
    torch.layout, torch.memory_format, type(None),
)  # fmt: skip
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_ARGS = tuple(f"args.{i}" for i in range(64))

Leaves = list[tuple[str, Any]]


def tensors_in(value: Any, prefix: str, opaque: set[str] | None = None) -> Leaves:
    """The leaves of `value` as (slot, leaf); the slot of a bare leaf is the prefix itself.

    A leaf is a tensor, an array, a number, a string, bytes, None, an enum member or a dtype.
    opaque: takes the names of classes that cannot be looked into.
    """
    if isinstance(value, torch.Tensor):
        return [(prefix, value)]
    leaves: Leaves = []
    _collect(value, prefix, leaves, set() if opaque is None else opaque, ())
    return leaves


def arguments_in(args: tuple[Any, ...], kwargs: dict[str, Any], opaque: set[str]) -> Leaves:
    """The leaves of a call's arguments: `args.0`, `args.1.mask`, `kwargs.past`, ..."""
    leaves: Leaves = []
    for i, value in enumerate(args):
        slot = _ARGS[i] if i < len(_ARGS) else f"args.{i}"
        if type(value) is torch.Tensor:
            leaves.append((slot, value))
        else:
            _collect(value, slot, leaves, opaque, (args,))
    for name, value in kwargs.items():
        _collect(value, f"kwargs.{name}", leaves, opaque, (kwargs,))
    return leaves


def as_bytes(leaf: Any) -> tuple[bytes, str]:
    """The bytes of a leaf that is neither tensor nor number, and the name of its type."""
    if leaf is None:
        return b"", "none"
    if isinstance(leaf, bytes):
        return leaf, "bytes"
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.tobytes(), f"numpy.{leaf.dtype}"
    return str(leaf).encode(), type(leaf).__name__


class Numbers:
    """A 0-dim CPU tensor for each type of Python number, to put numbers in."""

    def __init__(self) -> None:
        with torch._C._DisableTorchDispatch():  # for no mode to see
            tensors = {
                kind: torch.zeros((), dtype=_NUMBERS[kind], device="cpu") for kind in _NUMBERS
            }
            self._tensors = {kind: (tensor, tensor.numpy()) for kind, tensor in tensors.items()}

    def of(self, value: float) -> tuple[torch.Tensor, np.ndarray]:
        """The tensor for numbers of this value's type, and numpy's view of it."""
        return self._tensors[next((kind for kind in _NUMBERS if isinstance(value, kind)), float)]


def _collect(
    value: Any, slot: str, leaves: Leaves, opaque: set[str], holders: tuple[Any, ...]
) -> None:
    """holders: what the value lies in, outermost first."""
    if isinstance(value, (torch.Tensor, *_LEAVES)):
        leaves.append((slot, value))
    elif any(value is holder for holder in holders):
        opaque.add("a structure that contains itself")
    elif len(holders) >= MAX_DEPTH:
        opaque.add("a structure nested too deep")
    elif isinstance(value, Mapping):  # before dataclasses: model outputs are both
        for key, item in value.items():
            _collect(item, f"{slot}.{key}", leaves, opaque, (*holders, value))
    elif isinstance(value, (list, tuple)):
        for name, item in zip(getattr(value, "_fields", range(len(value))), value, strict=False):
            _collect(item, f"{slot}.{name}", leaves, opaque, (*holders, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            _collect(item, f"{slot}.{field.name}", leaves, opaque, (*holders, value))
    else:
        opaque.add(type(value).__qualname__)
