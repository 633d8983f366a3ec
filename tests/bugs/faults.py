"""Faults to plant in a training, below everything that watches it.

A fault is idle in the baseline and acts in the target, so that both run the same operators.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def flip_bit(tensor: torch.Tensor, element: int = 0, bit: int = 0) -> None:
    """Flip one bit of one element in place; bit 0 is the last of the mantissa."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # as_strided: the element in storage order, whatever the strides are.
    storage = tensor.detach().as_strided((tensor.numel(),), (1,))
    bits = storage.view(whole)
    bits[element] ^= 1 << bit


class FlippedCall(TorchDispatchMode):
    """Flips one bit of one element that the n-th call of an operator wrote or returned.

    Of floating-point numbers a bit of the mantissa, of integers and bools the last one.
    """

    def __init__(self, operator: str, nth: int, draw: random.Random) -> None:
        super().__init__()
        self._operator, self._nth, self._draw = operator, nth, draw
        self._seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if f"{func.namespace}.{func.overloadpacket.__name__}" == self._operator:
            if self._seen == self._nth:
                self._flip(result if result is not None else args[0])
            self._seen += 1
        return result

    def _flip(self, result: Any) -> None:
        choices = result if isinstance(result, (tuple, list)) else [result]
        choices = [t for t in choices if isinstance(t, torch.Tensor) and t.numel()]
        tensor = self._draw.choice(choices)
        bit = self._draw.randrange(20) if tensor.is_floating_point() else 0
        flip_bit(tensor, self._draw.randrange(tensor.numel()), bit)


class FlippedOperator(TorchDispatchMode):
    """Flips the last mantissa bit of the largest element in the n-th result of an operator."""

    def __init__(self, operator: str, nth: int, acts: bool) -> None:
        super().__init__()
        self._operator, self._nth, self._acts = operator, nth, acts
        self._seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(self._operator):
            if self._seen == self._nth and self._acts:
                value = result[0] if isinstance(result, tuple) else result
                # The largest element: where a gradient is added to another one, the last bit of a
                # small element would be rounded away, and no later value would differ.
                largest = value.as_strided((value.numel(),), (1,)).abs().argmax()
                flip_bit(value, int(largest))
            self._seen += 1
        return result
