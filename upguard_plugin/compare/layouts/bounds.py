"""How far apart two logical tensors are, and how far rounding may bring them.

In:  the same event of two logical runs; where it lies in the tainted region.
Out: distances and bounds as shares of the baseline's norm. docs/comparing.md has the rule, and the
     clean and faulty pairs of runs that its numbers were taken from.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from upguard_plugin.compare.layouts.merge import LogicalEvent

# Epsilons behind the first sum. Kernels of 16 bits add in 32 and round once, so that their results
# stay nearer, in their own epsilons, than those of 32 bits, which round at every addition.
_BASE = 256.0
_BASE_OF_16_BITS = 2.0
_SUMS_OF_UPDATES = 4  # as many sums weights bring with them that rounded gradients have updated
_EPSILON_OF_16_BITS = 2.0**-10  # of float16, the finer of the two
_LARGEST = 3 / 8  # what is farther apart is no rounding, however deep


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two tensors are apart."""

    difference: float  # norm of the difference
    norm: float  # of the baseline's

    @property
    def share(self) -> float:
        if self.norm > 0:
            return self.difference / self.norm
        return inf if self.difference else 0.0


def apart(baseline: LogicalEvent, target: LogicalEvent) -> Apart | None:
    """By the numbers of scalars, else by sketches; None where one was not recorded."""
    numbers = (baseline.number, target.number)
    if numbers[0] is not None and numbers[1] is not None:
        difference = abs(numbers[0] - numbers[1])
        return Apart(difference if isfinite(difference) else inf, abs(numbers[0]))
    ours, theirs = baseline.whole.sketch, target.whole.sketch
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    if baseline.whole.num_nonfinite != target.whole.num_nonfinite:
        return Apart(inf, float(np.linalg.norm(ours)))  # a sketch does not see them
    return Apart(float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(ours)))


def bound(epsilon: float, depth: int, num_updates: int) -> float:
    """The largest share of its norm by which rounding may move a tensor.

    epsilon: of the coarsest dtype that a value of the region went through.
    depth: sums taken in another order that lie before it in its micro-batch.
    num_updates: of the weights since the region began.
    """
    if epsilon < _EPSILON_OF_16_BITS:
        allowed = _BASE * sqrt(depth) * (1 + num_updates)
    else:  # most weights that differ by rounding are rounded alike
        depth += _SUMS_OF_UPDATES if num_updates else 0
        allowed = _BASE_OF_16_BITS * sqrt(depth * (1 + num_updates))
    return min(allowed * epsilon, _LARGEST)
