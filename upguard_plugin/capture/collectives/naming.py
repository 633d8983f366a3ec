"""What a collective is called, and the phase that it belongs to.

In:  a `Plan`, its caller, and those who know whose data a buffer holds.
Out: a boundary such as "all_reduce[dp] bucket 0 (fc.weight)", and a phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from upguard_plugin.capture.collectives.caller import Caller
from upguard_plugin.capture.collectives.groups import Member
from upguard_plugin.capture.collectives.owners import OwnerOf
from upguard_plugin.capture.collectives.plans import Plan

_BEFORE_BACKWARD = ("start", "data", "forward", "loss")
_UP_TO_BACKWARD = (*_BEFORE_BACKWARD, "backward", "recompute", "accumulate")
_GRADIENT_ENDS = (".grad", ".main_grad")  # how a buffer's owner says that it holds gradients


class Reducer(Protocol):
    """Names the buffers that C++ launches in backward, in the order in which it launches them."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...
    def name_next(self, tensor: torch.Tensor) -> str | None: ...


def boundary_of(
    what: Plan,
    member: Member,
    caller: Caller,
    owners: Sequence[OwnerOf],
    reducers: Sequence[Reducer],
) -> str:
    """What people read: the operation, its group, and whose data it is, where known."""
    boundary = unnamed(what, member)
    by_reducer = caller.from_cpp and caller.in_backward
    asked = [one.name_next for one in reducers] if by_reducer else owners
    buffers = what.outputs or what.inputs
    names = [name for buffer in buffers if (name := _name_of(buffer.tensor, asked))]
    if not names:
        return boundary
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{boundary} {names[0]}{more}"


def unnamed(what: Plan, member: Member) -> str:
    """The boundary of a collective on buffers that nobody knows."""
    return f"{what.name}[{member.group.name}]"


def _name_of(tensor: torch.Tensor, asked: Sequence[OwnerOf]) -> str | None:
    return next((name for ask in asked if (name := ask(tensor))), None)


def phase_of(what: Plan, caller: Caller, boundary: str, phase: str) -> str:
    """The loop's phase, which may not know yet that backward has begun.

    Collectives for gradients belong to `grad_sync`, also while backward still runs.
    """
    if phase not in _UP_TO_BACKWARD:
        return phase
    by_reducer = caller.from_cpp and caller.in_backward
    by_gradient_code = caller.in_gradient_code and caller.in_backward
    # What a loop reduces itself between backward and optimizer are its gradients.
    by_loop = phase == "backward" and not caller.in_backward
    of_gradient = boundary.endswith(_GRADIENT_ENDS) or by_loop
    if by_reducer or (what.reduces and (by_gradient_code or of_gradient)):
        return "grad_sync"
    return "backward" if caller.in_backward and phase in _BEFORE_BACKWARD else phase
