"""Whose elements a collective's buffers hold, where the buffers themselves have no name.

In:  the plan of a reducing collective.
Out: `Stretch`es by (role, slot): of the inputs, and of what becomes of them in the outputs.

At every level a buffer is known by the gradients and parameters that are views of it, at level op
also by the copies that filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from upguard_plugin.capture.collectives.plans import Buffer, Plan
from upguard_plugin.capture.contents import stretches_of
from upguard_plugin.capture.storages import Storages
from upguard_plugin.records import Stretch

Stretches = tuple[Stretch, ...]
HolderOf = Callable[[torch.Tensor], Stretches]
Holds = dict[tuple[str, str], Stretches]


def holds_of(what: Plan, holders: Sequence[HolderOf], storages: Storages | None) -> Holds:
    """What is known of all buffers when the collective is launched."""
    found: Holds = {}
    for buffer in what.inputs:
        stretches = _of_buffer(buffer.tensor, holders, storages)
        if stretches:
            found["input", buffer.slot] = stretches
    for buffer in what.outputs if found else ():
        given = found.get(("input", buffer.slot), ())
        stretches = given if what.name == "all_reduce" else _part_of(given, buffer)
        if stretches:
            found["output", buffer.slot] = stretches
    return found


def _of_buffer(
    tensor: torch.Tensor, holders: Sequence[HolderOf], storages: Storages | None
) -> Stretches:
    # A flat buffer has one dim; what is not flat is looked at by nobody, activations in forward.
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        return ()
    followed = () if storages is None else stretches_of(storages, tensor)
    views = (stretches for holder in holders if (stretches := holder(tensor)))
    return followed or next(views, ())


def _part_of(whole: Stretches, buffer: Buffer) -> Stretches:
    """What a reduce-scatter leaves of its input on this rank."""
    if buffer.placement is None or len(buffer.placement.pieces) != 1:
        return ()
    begin = buffer.placement.pieces[0].logical_start
    end = begin + buffer.tensor.numel()
    return tuple(
        Stretch(
            max(s.start, begin) - begin,
            min(s.stop, end) - begin,
            s.name,
            s.offset + max(begin - s.start, 0),
        )
        for s in whole
        if s.start < end and begin < s.stop
    )
