"""Faults to plant in a training, below everything that watches it.

A fault is idle in the baseline and acts in the target, so that both run the same operators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: torch.Tensor, element: int = 0, bit: int = 0) -> None:
    """Flip one bit of one element in place; bit 0 is the last of the mantissa."""
    # as_strided: the element in storage order, whatever the strides are.
    storage = tensor.detach().as_strided((tensor.numel(),), (1,))
    bits = storage.view(_WORDS[tensor.element_size()])
    bits[element] ^= 1 << bit


@dataclass(frozen=True)
class Corruption:
    """What becomes of one tensor that an operator returned or wrote; see `corrupt`."""

    operator: str
    nth: int  # of the operator's calls in the run
    slot: str  # where the tensor is, in the words of a trace: `out.1`, `args.0`
    how: str


class CorruptedCalls(TorchDispatchMode):
    """Corrupts what the chosen calls of operators leave behind."""

    def __init__(self, corruptions: Iterable[Corruption], draw: random.Random) -> None:
        super().__init__()
        self._chosen = {(one.operator, one.nth): one for one in corruptions}
        self._num_seen = dict.fromkeys((operator for operator, _ in self._chosen), 0)
        self._draw = draw

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = f"{func.namespace}.{func.overloadpacket.__name__}"
        if operator in self._num_seen:
            one = self._chosen.get((operator, self._num_seen[operator]))
            self._num_seen[operator] += 1
            if one is not None:
                where, *path = one.slot.split(".")
                place: Any = {"out": result, "args": args, "kwargs": kwargs}[where]
                for name in path:
                    place = place[int(name) if name.isdecimal() else name]
                corrupt(place, one.how, self._draw)
        return result


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
    """Change a tensor in place, at a random place.

    "bit", "two", "strided", "row": a random bit of the mantissa, of one element, of two, of every
    7th, of a row of the last dim; "sign": the sign of one element. Of integers, the last bit.
    """
    first, bit = draw.randrange(tensor.numel()), 0
    if tensor.is_floating_point():
        mantissa = -int(math.log2(torch.finfo(tensor.dtype).eps))
        bit = 8 * tensor.element_size() - 1 if how == "sign" else draw.randrange(mantissa)
    flips = torch.zeros(tensor.numel(), dtype=_WORDS[tensor.element_size()])
    width = tensor.shape[-1] if tensor.dim() else 1
    if how == "two" and tensor.numel() > 1:
        chosen: Any = draw.sample(range(tensor.numel()), 2)
    elif how == "strided":
        chosen = slice(first % min(7, tensor.numel()), None, 7)
    elif how == "row":
        chosen = slice(first // width * width, first // width * width + width)
    else:
        chosen = first
    flips[chosen] = torch.tensor(1).bitwise_left_shift(bit).to(flips.dtype)
    words = tensor.detach().view(flips.dtype)
    words.bitwise_xor_(flips.view(tensor.shape))
