"""The tensors among an operator's arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from upguard_plugin.trace.batch import NONE


@dataclass(slots=True)
class Argument:
    """One tensor that an operator is given or returns."""

    slot: str  # "args.0", "kwargs.out", "args.2.1", "out"
    key: int | str  # position in the schema, or name
    element: int  # its index where the argument is a list, else NONE
    tensor: torch.Tensor


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
    """All tensors that an operator is given, lists included, in the order of the schema."""
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield Argument(_ARGS[position], position, NONE, value)
        elif isinstance(value, (list, tuple)):
            for element, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield Argument(f"args.{position}.{element}", position, element, item)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield Argument(f"kwargs.{name}", name, NONE, value)
        elif isinstance(value, (list, tuple)):
            for element, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield Argument(f"kwargs.{name}.{element}", name, element, item)


def tensors_returned(result: Any) -> Iterator[Argument]:
    """All tensors that an operator returned."""
    if isinstance(result, torch.Tensor):
        yield Argument("out", 0, NONE, result)
    elif isinstance(result, (list, tuple)):
        for element, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                yield Argument(f"out.{element}", 0, element, item)


_ARGS = tuple(f"args.{position}" for position in range(128))
