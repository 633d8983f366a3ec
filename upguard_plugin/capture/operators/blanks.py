"""Memory that nobody has written yet, and copies of it: no value of the run.

In:  operators that allocate, and operators that put elements elsewhere as they are.
Out: to the storages, which bytes are blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from upguard_plugin.capture.contents import JOINS, joined_outermost
from upguard_plugin.capture.extents import extent_of
from upguard_plugin.capture.operators.arguments import Argument, tensors_returned
from upguard_plugin.capture.storages import Storages


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


def copied(storages: Storages, name: str, arguments: Sequence[Argument], result: Any) -> bool:
    """Whether an operator copied memory that nobody wrote: what it made is none of the run."""
    if name in JOINS:
        return _joined(storages, arguments, result)
    source = arguments[-1]
    if not _is_blank(source):
        return False
    if len(arguments) == 1:
        copy = storages.find(result)
        if copy is not None:
            copy.make_blank()
    elif arguments[0].storage is not None:  # into memory that is there
        arguments[0].storage.forget()
        if arguments[0].tensor.is_contiguous():
            arguments[0].storage.blank(extent_of(arguments[0].tensor))
    return True


def _joined(storages: Storages, arguments: Sequence[Argument], result: torch.Tensor) -> bool:
    """As `copied`, of tensors that lie behind each other in the result; others are values."""
    sources = [argument for argument in arguments if argument.key == 0]
    are_blank = [_is_blank(source) for source in sources]
    storage = storages.find(result) if any(are_blank) else None
    if storage is None:
        return False
    storage.make_blank()
    tensors = [source.tensor for source in sources]
    if result.is_contiguous() and joined_outermost(result, tensors):
        begin = int(result.storage_offset()) * result.element_size()
        storage.forget_blank()
        for tensor, is_blank in zip(tensors, are_blank, strict=True):
            end = begin + tensor.numel() * result.element_size()
            if is_blank and begin < end:
                storage.blank((begin, end - 1))
            begin = end
    return True


def _is_blank(argument: Argument) -> bool:
    storage = argument.storage
    return storage is not None and not storage.has_value(argument.tensor)
