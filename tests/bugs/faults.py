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
    """Corrupts one tensor that the n-th call of an operator wrote or returned; see `corrupt`.

    Of floating-point numbers a bit of the mantissa is flipped, of integers and bools the last one.
    """

    def __init__(self, operator: str, nth: int, draw: random.Random, how: str = "bit") -> None:
        super().__init__()
        self._operator, self._nth, self._draw, self._how = operator, nth, draw, how
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
        if self._how == "sign":
            choices = [t for t in choices if t.is_floating_point()] or choices
        tensor = self._draw.choice(choices)
        how = self._how if tensor.is_floating_point() else "bit"
        corrupt(tensor, how, self._draw)


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


def corrupt(tensor: torch.Tensor, how: str, draw: random.Random) -> None:
    """Change a tensor in place: "bit", "two", "strided", "row" or "sign".

    One element, two, every 7th, a whole row of the last dim; or the sign of one. The numbers that a
    float gets are finite.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    bit = draw.randrange(20) if tensor.is_floating_point() else 0
    first = draw.randrange(tensor.numel())
    if how == "sign":
        # Of a zero only the sign may differ, which a sum would lose.
        flip_bit(tensor, int(flat.abs().argmax()), 8 * tensor.element_size() - 1)
        return
    width = tensor.shape[-1] if tensor.dim() else 1
    chosen = {
        "bit": [first],
        "two": sorted({first, draw.randrange(tensor.numel())}),
        "strided": range(first % 7, tensor.numel(), 7),
        "row": range(first // width * width, first // width * width + width),
    }[how]
    for element in chosen:
        if element < tensor.numel():
            flip_bit(tensor, element, bit)
