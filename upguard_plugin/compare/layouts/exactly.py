"""What differs where sums have no rounding: all of it, but partial sums against their sum.

A rank's partial sums have no fingerprint in common with the sum that another layout took at once.
Their sketches have: they add up as the values do, and of exact values without rounding too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from upguard_plugin.compare.layouts.bounds import apart
from upguard_plugin.compare.layouts.taint import EventsOf
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.steps import Judge

# Numbers of a sketch are sums of up to 2048 elements and more, in float64: a few roundings of the
# last place are left where a tensor is so large that its sums are not exact any more.
_LARGEST = 2.0**-40


def exactly(events_of: EventsOf) -> Judge:
    """A judge by which a partial sum is equal to a sum if their sketches are."""

    def judged(step: int, target_step: int, pairing: Pairing) -> Pairing:
        ours, theirs = events_of(0, step), events_of(1, target_step)
        differs, comparable = pairing.value_differs.copy(), pairing.comparable.copy()
        for pair in np.flatnonzero(differs).tolist():
            one = ours[int(pairing.baseline_rows[pair])]
            other = theirs[int(pairing.target_rows[pair])]
            if one.about.num_summands == other.about.num_summands:
                continue
            found = apart(one, other)
            comparable[pair] = found is not None
            agreed = one.whole.is_agreed and other.whole.is_agreed
            differs[pair] = not agreed or found is None or found.share > _LARGEST
        return replace(pairing, value_differs=differs, comparable=comparable)

    return judged
