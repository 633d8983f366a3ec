"""Whose elements lie where in a buffer, followed through the copies that fill it.

In:  gradients, named as they are accumulated; operators that move elements without changing their
     order, which level op sees.
Out: `Stretch`es of a flat buffer, as far as they are known.

A copy takes along what is known of its source, so a gradient that is flattened, joined with others
and copied into a bucket keeps its name. A value that is scaled in place is still that gradient's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from upguard_plugin.capture.storages import Held, Storage, Storages
from upguard_plugin.records import Stretch

if TYPE_CHECKING:
    from upguard_plugin.capture.operators.arguments import Argument

# Operators whose result, or destination, has the elements of their arguments one after the other.
MOVES = frozenset({"cat", "stack", "clone", "_to_copy", "div", "mul", "copy_", "_foreach_copy_"})
JOINS = ("aten.cat", "aten.stack")


def name_whole(storages: Storages, tensor: Tensor, name: str) -> None:
    """Say whose elements a tensor holds. One that is not contiguous is left without a name."""
    storages.hold_names = True
    storage = storages.find(tensor)
    if storage is not None and tensor.is_contiguous() and tensor.numel():
        _put(storage, tensor, [Stretch(0, tensor.numel(), name)])


def stretches_of(storages: Storages, tensor: Tensor) -> tuple[Stretch, ...]:
    """What is known of a tensor's elements, in their order; nothing of one with gaps."""
    storage = storages.find(tensor)
    if storage is None or not storage.holds or not tensor.is_contiguous():
        return ()
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    end = begin + tensor.nbytes
    found = []
    for held in storage.holds:
        first, stop = max(held.first, begin), min(held.stop, end)
        if first < stop and held.element_size == size:
            offset = held.offset + (first - held.first) // size
            found.append(
                Stretch((first - begin) // size, (stop - begin) // size, held.name, offset)
            )
    return tuple(sorted(found, key=lambda stretch: stretch.start))


def follow(storages: Storages, name: str, arguments: Sequence[Argument], result: Any) -> None:
    """An operator of `MOVES` has run: its destination holds now what its sources held."""
    if not any(a.storage is not None and a.storage.holds for a in arguments):
        return
    if name == "aten._foreach_copy_":
        filled = [a for a in arguments if a.key == 0]
        given = [a for a in arguments if a.key == 1]
        for one, other in zip(filled, given, strict=False):
            _copied(storages, one.tensor, one.storage, [other.tensor])
    elif name == "aten.copy_":
        into, *given = arguments
        _copied(storages, into.tensor, into.storage, [argument.tensor for argument in given])
    elif isinstance(result, Tensor):
        sources = [a.tensor for a in arguments if a.key == 0]
        if name not in JOINS or joined_outermost(result, sources):
            _copied(storages, result, storages.find(result), sources)


def overwritten(argument: Argument) -> None:
    """The elements of a written argument are nobody's any more."""
    if argument.storage is not None and argument.storage.holds:
        _put(argument.storage, argument.tensor, ())


def joined_outermost(result: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the sources lie behind each other: they were not joined in an inner dim."""
    rows = sum(source.shape[0] if source.dim() == result.dim() else 1 for source in sources)
    return result.dim() > 0 and result.shape[0] == rows


def _copied(
    storages: Storages, into: Tensor, storage: Storage | None, sources: Sequence[Tensor]
) -> None:
    """sources: their elements, one tensor after the other, are those of `into`."""
    if storage is None:
        return
    moved: list[Stretch] = []
    start = 0
    if into.is_contiguous() and sum(source.numel() for source in sources) == into.numel():
        for source in sources:
            moved += [
                Stretch(start + s.start, start + s.stop, s.name, s.offset)
                for s in stretches_of(storages, source)
            ]
            start += source.numel()
    if moved or storage.holds:
        _put(storage, into, moved)


def _put(storage: Storage, tensor: Tensor, stretches: Sequence[Stretch]) -> None:
    """Replace what is known of the bytes that a tensor reaches."""
    size = tensor.element_size()
    storage.forget_held(tensor)
    begin = int(tensor.storage_offset()) * size
    storage.holds = [
        *storage.holds,
        *(
            Held(begin + s.start * size, begin + s.stop * size, s.name, s.offset, size)
            for s in stretches
        ),
    ]
