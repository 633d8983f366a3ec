"""Memory that nobody has written yet, and what is made of it: no value of the run.

In:  operators that allocate, that put elements elsewhere, and that work element by element.
Out: to the storages, which bytes are blank.

A copy of blank memory is blank. What an operator computes from a tensor that nobody wrote at all is
a value: it has been read. Padding, which is blank among values, makes padding where an operator
works element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from upguard_plugin.capture import padding
from upguard_plugin.capture.contents import JOINS, joined_outermost
from upguard_plugin.capture.extents import extent_of
from upguard_plugin.capture.operators.arguments import Argument, tensors_returned
from upguard_plugin.capture.operators.schema import Operator
from upguard_plugin.capture.padding import Elements
from upguard_plugin.capture.storages import Storages
from upguard_plugin.trace.batch import NONE


@dataclass(frozen=True, slots=True)
class Blank:
    """Elements of an operator's results that hold no value."""

    # (index in a list, shape, elements) of what they were made of; no shape: of any
    parts: tuple[tuple[int, torch.Size | None, Elements], ...] = ()
    is_vague: bool = False  # which elements it are is not known: the results are no events

    def of(self, argument: Argument) -> Elements:
        """Those of one result."""
        shape = argument.tensor.shape
        return padding.union(
            one
            for element, like, elements in self.parts
            if element == argument.element and like in (None, shape)
            for one in elements
        )


_ADDED = "grad_added_to_main_grad"
_VAGUE = Blank(is_vague=True)


def made(storages: Storages, arguments: Sequence[Argument], result: Any) -> None:
    """An operator has allocated memory and not written it."""
    for argument in arguments:
        if argument.storage is not None and argument.tensor is result:  # resize_
            before = argument.storage.size
            storages.find(result)  # reads the new size
            argument.storage.grow_blank(before)
            return
    for returned in tensors_returned(result):
        storage = storages.find(returned.tensor)
        if storage is not None:
            storage.make_blank()


def left_by(
    storages: Storages, operator: Operator, arguments: Sequence[Argument], result: Any
) -> Blank | None:
    """What an operator that has run leaves without a value; None: nothing."""
    if operator.name in JOINS:
        return _joined(storages, arguments, result)
    if operator.copies:
        return _copied(storages, arguments, result)
    parts = []
    for argument in arguments:
        storage = argument.storage
        if storage is None or not storage.pads or is_replaced(operator, argument):
            continue
        elements = padding.blank_elements(storage, argument.tensor)
        if elements:
            parts.append((argument.element, argument.tensor.shape, elements))
    return Blank(tuple(parts)) if parts else None


def stand_ins(storages: Storages, node: Any, returned: Sequence[Argument]) -> list[Argument]:
    """Gradients that hold no value: a kernel has added the real ones to `main_grad` itself.

    A backward that does so marks the weight, and returns memory that nobody wrote so that the
    weight's hooks run (Megatron, Transformer Engine).
    """
    weights: list[Any] = [getattr(made_by, "variable", None) for made_by, _ in node.next_functions]
    shapes = [weight.shape for weight in weights if getattr(weight, _ADDED, False)]
    found = [a for a in returned if shapes and a.tensor.shape in shapes and _is_blank(a)]
    for argument in found:
        assert argument.storage is not None
        argument.storage.pads = storages.have_padding = True
    return found


def is_replaced(operator: Operator, argument: Argument) -> bool:
    """Whether what was in the memory of an argument before plays no part."""
    replaces = operator.overwrites or isinstance(argument.key, str)  # out=
    return replaces and argument.key in operator.written


def _copied(storages: Storages, arguments: Sequence[Argument], result: Any) -> Blank | None:
    source = arguments[-1]
    if not _is_blank(source):
        return None
    assert source.storage is not None
    into = arguments[0].tensor if len(arguments) > 1 else result
    elements = padding.blank_elements(source.storage, source.tensor)
    if elements and into.is_contiguous() and into.shape == source.tensor.shape:
        return Blank(((NONE, None, elements),))
    _make_all_blank(storages, into)
    return _VAGUE


def _joined(
    storages: Storages, arguments: Sequence[Argument], result: torch.Tensor
) -> Blank | None:
    """Of tensors that lie behind each other in the result the elements are known."""
    sources = [argument for argument in arguments if argument.key == 0]
    if not any(_is_blank(source) for source in sources):
        return None
    found: list[tuple[int, int]] = []
    begin = 0
    if result.is_contiguous() and joined_outermost(result, [one.tensor for one in sources]):
        for source in sources:
            if _is_blank(source):
                assert source.storage is not None
                elements = padding.blank_elements(source.storage, source.tensor)
                if elements is None:
                    elements = ((0, source.tensor.numel()),)
                found += [(begin + first, begin + stop) for first, stop in elements]
            begin += source.tensor.numel()
        return Blank(((NONE, None, padding.union(found)),))
    _make_all_blank(storages, result)
    return _VAGUE


def _make_all_blank(storages: Storages, tensor: torch.Tensor) -> None:
    """One with gaps is left as it is: the bytes between them are another's."""
    storage = storages.find(tensor)
    if storage is None:
        return
    storage.forget()
    if tensor.is_contiguous():
        storage.blank(extent_of(tensor))


def _is_blank(argument: Argument) -> bool:
    storage = argument.storage
    return storage is not None and not storage.has_value(argument.tensor)
