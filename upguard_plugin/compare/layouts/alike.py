"""Logical events that both runs have under one name and that are not the same thing.

In:  the events of one step of both runs, and how their micro-batches were matched.
Out: the names that are not compared, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose

from upguard_plugin.compare.layouts.merge import Number
from upguard_plugin.compare.layouts.names import About, Name, num_microbatches
from upguard_plugin.compare.layouts.samples import OTHER_GROUPS, is_of_a_sample
from upguard_plugin.compare.layouts.shares import ROUNDED, is_rounding
from upguard_plugin.compare.layouts.units import Units

_OTHER_SHARES = "gradients are added up over other micro-batches on each rank"
_OTHER_SCALE = "each run divides the loss of a micro-batch by its own number of micro-batches"
_OTHER_COPIES = "the layouts keep other copies of weights and gradients"
_OTHER_OPTIMIZERS = "the layouts divide the parameters into other optimizers"
_OTHER_DIMS = "the layouts hold the dims in another order"

_OF_OPTIMIZER = re.compile(r"optimizer\d*\.")

Events = Mapping[Name, About]
Numbers = Mapping[Name, Number]
Reason = tuple[Name, str]


@dataclass(frozen=True, slots=True)
class NumbersApart:
    """What the numbers of a step say of why they differ."""

    is_scaled: bool  # each run divides losses by its own number of micro-batches
    rounded: tuple[Name, ...]  # sums of other shares, apart by their rounding only


def numbers_apart(baseline: Numbers, target: Numbers, units: Units) -> NumbersApart:
    """Look at the scalars of both runs."""
    counts = num_microbatches(units.baseline), num_microbatches(units.target)
    both = [(name, baseline[name], target[name]) for name in baseline if name in target]
    return NumbersApart(
        any(name[0][0] == "loss" and _is_scaled(one, other, *counts) for name, one, other in both),
        tuple(name for name, one, other in both if _is_rounded(one, other)),
    )


def not_alike(
    baseline: Events,
    target: Events,
    left_out: Mapping[Name, str],
    units: Units,
    numbers: NumbersApart,
) -> dict[Name, str]:
    """Why events are not compared, by name. left_out: what could not be merged on a side."""
    lost = dict(_one_sided(baseline, target, left_out)) | dict(
        _one_sided(target, baseline, left_out)
    )
    lost |= dict.fromkeys(_transposed(baseline, target), _OTHER_DIMS)
    names = list(dict.fromkeys([*baseline, *target]))
    if not units.same_order:
        lost |= {name: _OTHER_SHARES for name in names if name[0][0] == "accumulate"}
    if numbers.is_scaled:
        lost |= {name: _OTHER_SCALE for name in names if name[0][0] in ("loss", "backward")}
    of_units = (n for n in names if n[1] in units.joined and not is_of_a_sample(*n[0][2:4]))
    lost |= {n: OTHER_GROUPS for n in of_units if not _is_one_tensor(n, baseline, target)}
    return lost | dict.fromkeys(numbers.rounded, ROUNDED)


def _is_one_tensor(name: Name, baseline: Events, target: Events) -> bool:
    """Whether both runs have a tensor of one shape for all samples of a unit: an expert's, say."""
    if name not in baseline or name not in target:
        return False
    return baseline[name].key.shape == target[name].key.shape


def _is_rounded(one: Number, other: Number) -> bool:
    """Whether they are sums of other shares, and differ by their rounding only."""
    num_shares = max(one.about.num_shares, other.about.num_shares)
    if one.about.num_shares == other.about.num_shares:
        return False
    return is_rounding(one.value, other.value, num_shares, one.about.key.dtype)


def _one_sided(mine: Events, other: Events, left_out: Mapping[Name, str]) -> Iterator[Reason]:
    """What one side has alone because of its layout; anything else alone is a finding."""
    reasons = {name[0]: reason for name, reason in left_out.items()}
    calls = {name[0][1]: reason for name, reason in left_out.items()}
    gradients = {name[0][1] for name in other if _is_summed_gradient(name)}
    for name in mine:
        if name in other:
            continue
        _, boundary, role, slot, _ = name[0]
        is_gradient = _is_summed_gradient(name) and boundary in gradients
        if name[0] in reasons:
            yield name, reasons[name[0]]  # of other micro-batches, where other ranks had it
        elif mine[name].key.dtype == "none" and boundary in calls:
            yield name, calls[boundary]
        elif role == "master" or (role, slot) == ("param", "tied") or is_gradient:
            yield name, _OTHER_COPIES
        elif role == "scalar" and _OF_OPTIMIZER.match(boundary):
            yield name, _OTHER_OPTIMIZERS


def _is_summed_gradient(name: Name) -> bool:
    """Whether it is a gradient of the whole step: `grad` or `main_grad`, as it is and as cut."""
    return name[0][2] in ("grad", "main_grad") and name[0][0] in ("grad_sync", "clip")


def _transposed(baseline: Events, target: Events) -> Iterator[Name]:
    for name in baseline:
        if name not in target:
            continue
        dims = baseline[name].dims, target[name].dims
        if dims[0] != dims[1] and sorted(dims[0]) == sorted(dims[1]):
            yield name


def _is_scaled(one: Number, other: Number, num_baseline: int, num_target: int) -> bool:
    """Whether losses of equal micro-batches are apart by the numbers of micro-batches."""
    if 0 in (num_baseline, num_target) or num_baseline == num_target:
        return False
    if max(one.about.num_shares, other.about.num_shares) > 1:
        return False  # sums over all micro-batches
    scaled = (one.value * num_baseline, other.value * num_target)
    return one.value != other.value and isclose(*scaled, rel_tol=1e-2)
