"""Sums of numbers of which ranks and micro-batches hold shares: a loss, say.

In:  the numbers of one scalar in one unit, each with the place and the partial sum it belongs to.
Out: their sum. Other shares may round in another way; `is_rounding` says how far that goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import fsum

import numpy as np

from upguard_plugin.records import FINGERPRINT_PRIME

ROUNDED = "sums of other shares, equal as far as their rounding goes"

_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def sum_of(shares: Mapping[Hashable, set[float]]) -> float:
    """The sum of the shares. Replicas of one that do not agree all count: there is no right sum."""
    return fsum(number for replicas in shares.values() for number in replicas)


def value_of(number: float) -> tuple[int, int]:
    """What stands for the fingerprint of a sum: a function of its bits."""
    bits = int(np.float64(number).view(np.uint64))
    return bits % FINGERPRINT_PRIME, bits


def is_rounding(one: float, other: float, num_shares: int, dtype: str) -> bool:
    """Whether two sums that differ may be sums of the same numbers, rounded in another order."""
    bound = num_shares * _EPSILONS.get(dtype, 0.0) * max(abs(one), abs(other))
    return one != other and abs(one - other) <= bound
