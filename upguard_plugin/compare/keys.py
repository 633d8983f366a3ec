"""Event keys of both runs as numbers of one space.

In:  a run's table of `EventKey`s.
Out: per key, what compare asks of it, as columns: `columns.identity[batch.key]` serves all events.

Two keys have one identity if they name the same boundary. dtype and shape are not part of it: they
are values to compare. Neither is a module's class: it may be replaced and is still that module.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upguard_plugin.records import CHECKPOINT, PHASES, ROLES, EventKey

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
ROLE_NUMBER = {role: number for number, role in enumerate(ROLES)}
DTENSOR = "dtensor "  # how a placement begins that a tensor carries with it
SWITCHES = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """One row per key of a table."""

    keys: Sequence[EventKey]
    identity: Ints
    loose: Ints  # identity without operator, op and group
    argument: Ints  # of which call it is an argument or its gradient, whatever its slot; 0: of none
    is_keyword: Bools  # an argument passed by keyword
    form: Ints  # dtype and shape
    slot: Ints
    placement: Ints  # 0: not known
    partial: Ints  # the axes over which a DTensor says it is a partial sum; 0: it says nothing
    phase: Ints  # place in PHASES
    role: Ints  # place in ROLES
    is_operator: Bools  # an operator call; else a module, a state, a batch
    is_collective: Bools
    is_launch: Bools  # what a collective is given when it is launched
    is_switch: Bools  # chooses an implementation of the optimizer, not what it computes
    is_of_file: Bools  # what a checkpoint's file holds: paths, dates and arguments among it
    is_logged: Bools  # a scalar that the user handed over, perhaps for the log only
    parameters: frozenset[str]  # boundaries that are parameters
    roles: frozenset[str]


class KeySpace:
    """Numbers that mean the same on both sides."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {None: 0}
        self._tables: dict[int, KeyColumns] = {}

    def columns(self, keys: Sequence[EventKey]) -> KeyColumns:
        """The columns of a table, made once as long as the table does not grow."""
        known = self._tables.get(id(keys))
        if known is not None and known.keys is keys and len(known.identity) == len(keys):
            return known
        made = KeyColumns(
            keys,
            self._numbered([_identity(key) for key in keys]),
            self._numbered([("loose", *_place(key)) for key in keys]),
            self._numbered([_argument(key) for key in keys]),
            np.array([key.slot.startswith("kwargs.") for key in keys], dtype=np.bool_),
            self._numbered([(key.dtype, key.shape) for key in keys]),
            self._numbered([("slot", key.slot) for key in keys]),
            self._numbered([key.placement for key in keys]),
            self._numbered([_partial(key) for key in keys]),
            np.array([PHASE_NUMBER[key.phase] for key in keys], dtype=np.int64),
            np.array([ROLE_NUMBER[key.role] for key in keys], dtype=np.int64),
            np.array([is_operator(key) for key in keys], dtype=np.bool_),
            np.array([is_collective(key) for key in keys], dtype=np.bool_),
            np.array([_is_launch(key) for key in keys], dtype=np.bool_),
            np.array([_is_switch(key) for key in keys], dtype=np.bool_),
            np.array([_is_of_file(key) for key in keys], dtype=np.bool_),
            np.array([_is_logged(key) for key in keys], dtype=np.bool_),
            frozenset(key.boundary for key in keys if key.role == "param"),
            frozenset(key.role for key in keys),
        )
        self._tables[id(keys)] = made
        return made

    def _numbered(self, values: Sequence[Hashable]) -> Ints:
        numbers = self._numbers
        return np.array(
            [numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64
        )


def is_operator(key: EventKey) -> bool:
    """Whether the key belongs to an operator call: "aten.addmm", not a module's class name."""
    return key.operator is not None and "." in key.operator


def called(key: EventKey) -> str | None:
    """The operator, or None for a module: its class may be another one."""
    return key.operator if is_operator(key) else None


def is_collective(key: EventKey) -> bool:
    return key.op is not None or key.group is not None


def _is_launch(key: EventKey) -> bool:
    return is_collective(key) and key.role == "input" and key.moment != "completion"


def _partial(key: EventKey) -> Hashable:
    # The rules of a user say nothing of what a program does; a DTensor does.
    if key.placement is None or not key.placement.spec.startswith(DTENSOR):
        return None
    return ("partial", *key.placement.partial)


def _is_switch(key: EventKey) -> bool:
    return key.role == "scalar" and key.boundary.rpartition(".")[2] in SWITCHES


def _is_of_file(key: EventKey) -> bool:
    return key.phase == "checkpoint" and key.boundary == CHECKPOINT


def _is_logged(key: EventKey) -> bool:
    # Gradient norm, loss scale, clip coefficient, an optimizer's settings: the training's own.
    own = key.phase in ("start", "clip") or re.match(r"optimizer\d*\.", key.boundary)
    return key.role == "scalar" and not own


def _place(key: EventKey) -> tuple[Hashable, ...]:
    slot = key.slot
    if slot == "out.0" and key.role in ("output", "grad_output"):
        slot = "0"  # the first of several outputs is the output: some return a bias beside it
    return (key.phase, key.boundary, key.role, slot, key.moment)


def _argument(key: EventKey) -> Hashable:
    if key.role not in ("input", "grad_input") or not key.slot.startswith(("args.", "kwargs.")):
        return None
    return ("argument", key.phase, key.boundary, key.role, key.moment, key.dtype, key.shape)


def _identity(key: EventKey) -> Hashable:
    return (*_place(key), called(key), key.op, None if key.group is None else key.group.ranks)
