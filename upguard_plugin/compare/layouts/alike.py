"""Logical events that both runs have under one name and that are not the same thing.

In:  the events of one step of both runs, and how their micro-batches were matched.
Out: the names that are not compared, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isclose

from upguard_plugin.compare.layouts.merge import LogicalEvent, Name, num_microbatches
from upguard_plugin.compare.layouts.samples import OTHER_GROUPS, is_of_a_sample
from upguard_plugin.compare.layouts.shares import ROUNDED, is_rounding
from upguard_plugin.compare.layouts.units import Units
from upguard_plugin.compare.placing import PART

_OTHER_SHARES = "gradients are added up over other micro-batches on each rank"
_OTHER_SCALE = "each run divides the loss of a micro-batch by its own number of micro-batches"
_OTHER_COPIES = "the layouts keep other copies of weights and gradients"
_OTHER_OPTIMIZERS = "the layouts divide the parameters into other optimizers"
_OTHER_PARTS = (
    "a part that was placed afterwards is compared with equal parts only: record both runs with "
    "the placement"
)
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
    if not units.same_order:
        lost |= {name: _OTHER_SHARES for name in names if name[0][0] == "accumulate"}
    counts = (num_microbatches(units.baseline), num_microbatches(units.target))
    if _is_scaled(baseline, target, *counts):
        lost |= {name: _OTHER_SCALE for name in names if name[0][0] in ("loss", "backward")}
    of_units = (n for n in names if n[1] in units.joined and not is_of_a_sample(*n[0][2:4]))
    unlike = (n for n in of_units if not _is_one_tensor(n, baseline, target))
    lost |= {name: OTHER_GROUPS for name in unlike if name not in lost}
    rounded = (n for n in baseline.keys() & target.keys() if _is_rounded(baseline[n], target[n]))
    return lost | dict.fromkeys(rounded, ROUNDED)


def _is_one_tensor(name: Name, baseline: Events, target: Events) -> bool:
    """Whether both runs have a tensor of one shape for all samples of a unit: an expert's, say."""
    if name not in baseline or name not in target:
        return False
    return baseline[name].key.shape == target[name].key.shape


def _is_rounded(one: LogicalEvent, other: LogicalEvent) -> bool:
    """Whether the numbers are sums of other shares, and differ by their rounding only."""
    if one.num_shares == other.num_shares or one.number is None or other.number is None:
        return False
    num_shares = max(one.num_shares, other.num_shares)
    return is_rounding(one.number, other.number, num_shares, one.key.dtype)


def _one_sided(mine: Events, other: Events, left_out: Mapping[Name, str]) -> Iterator[Reason]:
    """What one side has alone because of its layout; anything else alone is a finding."""
    reasons = {name[0]: reason for name, reason in left_out.items()}
    calls = {name[0][1]: reason for name, reason in left_out.items()}
    gradients = {name[0][1] for name in other if _is_summed_gradient(name)}
    parts = {(*name[0][:3], PART.sub("", name[0][3])) for name in other if PART.search(name[0][3])}
    for name in mine.keys() - other.keys():
        _, boundary, role, slot, _ = name[0]
        is_gradient = _is_summed_gradient(name) and boundary in gradients
        if name[0] in reasons:
            yield name, reasons[name[0]]  # of other micro-batches, where other ranks had it
        elif mine[name].key.dtype == "none" and boundary in calls:
            yield name, calls[boundary]
        elif role == "master" or (role, slot) == ("param", "tied") or is_gradient:
            yield name, _OTHER_COPIES
        elif PART.search(slot) or name[0][:4] in parts:
            yield name, _OTHER_PARTS
        elif role == "scalar" and _OF_OPTIMIZER.match(boundary):
            yield name, _OTHER_OPTIMIZERS


def _is_summed_gradient(name: Name) -> bool:
    """Whether it is a gradient of the whole step: `grad` or `main_grad`, as it is and as cut."""
    return name[0][2] in ("grad", "main_grad") and name[0][0] in ("grad_sync", "clip")


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
        if max(baseline[name].num_shares, target[name].num_shares) > 1:
            continue  # sums over all micro-batches
        numbers = baseline[name].number, target[name].number
        if name[0][0] == "loss" and numbers[0] is not None and numbers[1] is not None:
            scaled = (numbers[0] * num_baseline, numbers[1] * num_target)
            if numbers[0] != numbers[1] and isclose(*scaled, rel_tol=1e-2):
                return True
    return False
