"""Logical events that both runs have under one name and that are not the same thing.

In:  the events of one step of both runs, and how their micro-batches were matched.
Out: the names that are not compared, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isclose

from upguard_plugin.compare.layouts.merge import LogicalEvent, Name, num_microbatches
from upguard_plugin.compare.layouts.units import Units
from upguard_plugin.trace.batch import NONE

_OTHER_SHARES = "gradients are added up over other micro-batches on each rank"
_OTHER_GROUPS = "the runs put the same samples into other micro-batches"
_OTHER_SCALE = "each run divides the loss of a micro-batch by its own number of micro-batches"
_OTHER_COPIES = "the layouts keep other copies of weights and gradients"
_OTHER_OPTIMIZERS = "the layouts divide the parameters into other optimizers"
_OTHER_DIMS = "the layouts hold the dims in another order"

_OF_OPTIMIZER = re.compile(r"optimizer\d*\.")

Events = Mapping[Name, LogicalEvent]
Reason = tuple[Name, str]


def not_alike(
    baseline: Events, target: Events, left_out: Mapping[Name, str], units: Units
) -> dict[Name, str]:
    """Why events are not compared, by name. left_out: what could not be merged on a side."""
    lost = dict(_one_sided(baseline, target, left_out)) | dict(
        _one_sided(target, baseline, left_out)
    )
    lost |= dict.fromkeys(_transposed(baseline, target), _OTHER_DIMS)
    names = baseline.keys() | target.keys()
    if units.baseline != units.target:
        lost |= {name: _OTHER_SHARES for name in names if name[0][0] == "accumulate"}
    if _is_scaled(
        baseline, target, num_microbatches(units.baseline), num_microbatches(units.target)
    ):
        lost |= {name: _OTHER_SCALE for name in names if name[0][0] in ("loss", "backward")}
    if units.same_samples:  # else a batch that has no partner is the divergence
        common = units.common | {NONE}
        lost |= {name: _OTHER_GROUPS for name in names if name[1] not in common}
    return lost


def _one_sided(mine: Events, other: Events, left_out: Mapping[Name, str]) -> Iterator[Reason]:
    """What one side has alone because of its layout; anything else alone is a finding."""
    reasons = {name[0]: reason for name, reason in left_out.items()}
    calls = {name[0][1]: reason for name, reason in left_out.items()}
    gradients = {name[0][1] for name in other if name[0][2] == "main_grad"}
    for name in mine.keys() - other.keys():
        phase, boundary, role, slot, _ = name[0]
        is_gradient = role == "grad" and phase in ("grad_sync", "clip") and boundary in gradients
        if name[0] in reasons:
            yield name, reasons[name[0]]  # of other micro-batches, where other ranks had it
        elif mine[name].key.dtype == "none" and boundary in calls:
            yield name, calls[boundary]
        elif role == "master" or (role, slot) == ("param", "tied") or is_gradient:
            yield name, _OTHER_COPIES
        elif role == "scalar" and _OF_OPTIMIZER.match(boundary):
            yield name, _OTHER_OPTIMIZERS


def _transposed(baseline: Events, target: Events) -> Iterator[Name]:
    for name in baseline.keys() & target.keys():
        dims = baseline[name].whole.dims, target[name].whole.dims
        if dims[0] != dims[1] and sorted(dims[0]) == sorted(dims[1]):
            yield name


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
