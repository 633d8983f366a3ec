"""The tensors among an operator's arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from upguard_plugin.capture.storages import Storage
from upguard_plugin.trace.batch import NONE


@dataclass(slots=True)
class Argument:
    """One tensor that an operator is given or returns."""

    slot: str  # "args.0", "kwargs.out", "args.2.1", "out"
    key: int | str  # position in the schema, or name
    element: int  # its index where the argument is a list, else NONE
    tensor: torch.Tensor
    storage: Storage | None = None  # None: it has none that writes can be tracked of


def tensors_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
    """All tensors that an operator is given, lists included, in the order of the schema."""
    found: list[Argument] = []
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.append(Argument(_ARGS[position], position, NONE, value))
        elif isinstance(value, (list, tuple)):
            _add_list(found, _ARGS[position], position, value)
    if kwargs:
        found += tensors_at(tuple(kwargs), (), kwargs)
    return found


def tensors_at(
    keys: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Argument]:
    """Those among them that stand at these places: positions, then names."""
    found: list[Argument] = []
    for key in keys:
        if isinstance(key, str):
            slot, value = f"kwargs.{key}", kwargs.get(key)
        elif key < len(args):
            slot, value = _ARGS[key], args[key]
        else:
            continue
        if isinstance(value, torch.Tensor):
            found.append(Argument(slot, key, NONE, value))
        elif isinstance(value, (list, tuple)):
            _add_list(found, slot, key, value)
    return found


def tensors_returned(result: Any) -> list[Argument]:
    """All tensors that an operator returned."""
    if isinstance(result, torch.Tensor):
        return [Argument("out", 0, NONE, result)]
    found: list[Argument] = []
    if isinstance(result, (list, tuple)):
        _add_list(found, "out", 0, result)
    return found


def _add_list(found: list[Argument], slot: str, key: int | str, values: Sequence[Any]) -> None:
    for element, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            found.append(Argument(f"{slot}.{element}", key, element, value))
        elif isinstance(value, (list, tuple)):  # of an operator that returns lists
            _add_list(found, f"{slot}.{element}", key, value)


_ARGS = tuple(f"args.{position}" for position in range(128))
