"""Sums of numbers of which ranks and micro-batches hold shares: a loss, say.

In:  the events of one scalar in one unit, with a placement that says it is a partial sum.
Out: which of them are replicas of one share. Other shares may round in another way; `is_rounding`
     says how far that goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from upguard_plugin.compare.layouts.holdings import Holding
from upguard_plugin.placement_grammar import parse_placement
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey

ROUNDED = "sums of other shares, equal as far as their rounding goes"

_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def is_share(key: EventKey) -> bool:
    """Whether a number is said to be a partial sum; not for tensors."""
    placement = key.placement
    if key.role != "scalar" or placement is None or "+" not in placement.spec:
        return False
    return bool(parse_placement(placement.spec).partial)


def shares_of(found: Sequence[int], holdings: Sequence[Holding]) -> list[list[int]]:
    """The holdings of each share of a sum. Replicas that do not agree all count."""
    shares: dict[Hashable, list[int]] = {}
    for number in found:
        held = holdings[number]
        shares.setdefault((held.seen.place, held.summand), []).append(number)
    return list(shares.values())


def fingerprint_of(number: float) -> tuple[int, int]:
    """What stands for the fingerprint of a sum: a function of the number's bits."""
    bits = int(np.float64(number).view(np.uint64))
    return bits % FINGERPRINT_PRIME, bits


def is_rounding(one: float, other: float, num_shares: int, dtype: str) -> bool:
    """Whether two sums that differ may be sums of the same numbers, rounded in another order."""
    bound = num_shares * _EPSILONS.get(dtype, 0.0) * max(abs(one), abs(other))
    return one != other and abs(one - other) <= bound
