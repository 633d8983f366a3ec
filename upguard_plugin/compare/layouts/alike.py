"""Logical events that both runs have under one name and that are not the same thing.

In:  the events of one step of both runs, and how their micro-batches were matched.
Out: the names that are not compared, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose

from upguard_plugin.compare.layouts.merge import LogicalEvent, Name
from upguard_plugin.compare.layouts.units import Place, Units
from upguard_plugin.trace.batch import NONE

_OTHER_SHARES = "gradients are added up over other micro-batches on each rank"
_OTHER_GROUPS = "the runs put the same samples into other micro-batches"
_OTHER_SCALE = "each run divides the loss of a micro-batch by its own number of micro-batches"
_OTHER_DIMS = "the layouts hold the dims in another order"

Events = Mapping[Name, LogicalEvent]


def not_alike(baseline: Events, target: Events, units: Units) -> dict[Name, str]:
    """Why events are not compared, by name."""
    lost = dict.fromkeys(_transposed(baseline, target), _OTHER_DIMS)
    names = baseline.keys() | target.keys()
    if units.baseline != units.target:
        lost |= {name: _OTHER_SHARES for name in names if name[0][0] == "accumulate"}
    if _is_scaled(baseline, target, _num_each(units.baseline), _num_each(units.target)):
        lost |= {name: _OTHER_SCALE for name in names if name[0][0] in ("loss", "backward")}
    if units.same_samples:  # else a batch that has no partner is the divergence
        common = units.common | {NONE}
        lost |= {name: _OTHER_GROUPS for name in names if name[1] not in common}
    return lost


def _transposed(baseline: Events, target: Events) -> Iterator[Name]:
    for name in baseline.keys() & target.keys():
        dims = baseline[name].whole.dims, target[name].whole.dims
        if dims[0] != dims[1] and sorted(dims[0]) == sorted(dims[1]):
            yield name


def _num_each(units: Mapping[Place, int]) -> int:
    """How many micro-batches a rank has."""
    return len({microbatch for _, microbatch in units if microbatch != NONE})


def _is_scaled(baseline: Events, target: Events, num_baseline: int, num_target: int) -> bool:
    """Whether losses of equal micro-batches are apart by the numbers of micro-batches."""
    if 0 in (num_baseline, num_target) or num_baseline == num_target:
        return False
    for name in baseline.keys() & target.keys():
        numbers = baseline[name].number, target[name].number
        if name[0][0] == "loss" and numbers[0] is not None and numbers[1] is not None:
            scaled = (numbers[0] * num_baseline, numbers[1] * num_target)
            if numbers[0] != numbers[1] and isclose(*scaled, rel_tol=1e-2):
                return True
    return False
