"""Sums of numbers of which ranks and micro-batches hold shares: a loss, say.

In:  the events of one scalar in one unit, with a placement that says it is a partial sum.
Out: the sum. Other shares may round in another way; `is_rounding` says how far that goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import fsum

import numpy as np

from upguard_plugin.compare.layouts.parts import Part, Whole
from upguard_plugin.compare.layouts.samples import place_of
from upguard_plugin.placement_grammar import parse_placement
from upguard_plugin.records import FINGERPRINT_PRIME, Layout

ROUNDED = "sums of other shares, equal as far as their rounding goes"

_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def summed_axes(part: Part) -> tuple[str, ...]:
    """The axes over which a number is said to be a partial sum; empty for anything else."""
    placement = part.key.placement
    if part.key.role != "scalar" or placement is None or part.batch.value is None:
        return ()
    return parse_placement(placement.spec).partial if "+" in placement.spec else ()


def sum_of(parts: Sequence[Part], layouts: Mapping[int, Layout]) -> tuple[float, int]:
    """The sum of a scalar, and of how many shares.

    Replicas of a share that do not agree all count: there is no right sum.
    """
    axes = summed_axes(parts[0])
    shares: dict[Hashable, set[float]] = {}
    for part in parts:
        assert part.batch.value is not None
        found = (layouts[part.rank].axis(axis) for axis in axes)
        share = (place_of(part, layouts), *(0 if axis is None else axis.index for axis in found))
        shares.setdefault(share, set()).add(float(part.batch.value[part.row]))
    return fsum(number for replicas in shares.values() for number in replicas), len(shares)


def whole_number(number: float, shape: tuple[int, ...]) -> Whole:
    """What stands for the tensor of a sum: its fingerprint is a function of the number's bits."""
    bits = int(np.float64(number).view(np.uint64))
    return Whole(shape, (bits % FINGERPRINT_PRIME, bits), None, True)


def is_rounding(one: float, other: float, num_shares: int, dtype: str) -> bool:
    """Whether two sums that differ may be sums of the same numbers, rounded in another order."""
    bound = num_shares * _EPSILONS.get(dtype, 0.0) * max(abs(one), abs(other))
    return one != other and abs(one - other) <= bound
