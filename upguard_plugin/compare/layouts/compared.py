"""What is compared of a pair of steps, and what is left out of both with its reason.

In:  the merged steps of both runs.
Out: `Compared`: masks of their rows, and what was left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from upguard_plugin.compare.layouts.alike import NumbersApart, not_alike
from upguard_plugin.compare.layouts.held import Bools
from upguard_plugin.compare.layouts.left_out import LeftOut, LostPairs
from upguard_plugin.compare.layouts.merge import LogicalStep
from upguard_plugin.compare.layouts.units import Units


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """What is compared of a pair of steps."""

    rows: tuple[Bools, Bools]  # of each step, one answer per row
    left_out: LeftOut
    lost_pairs: LostPairs

    @classmethod
    def of(
        cls, baseline: LogicalStep, target: LogicalStep, units: Units, numbers: NumbersApart
    ) -> Compared:
        steps = (baseline, target)
        lost = dict(baseline.lost()) | dict(target.lost())
        lost |= not_alike(baseline.events(), target.events(), lost, units, numbers)
        ours, theirs = (
            np.array([about.name not in lost for about in step.abouts], np.bool_) for step in steps
        )
        return cls((ours, theirs), LeftOut.of(lost), LostPairs.of(baseline, target, lost))
