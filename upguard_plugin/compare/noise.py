"""What differs between the baseline and a repeat of it: noise, which no target can be blamed for.

In:  one rank of the baseline and of its repeats.
Out: per step, the boundaries that are left out.

A boundary is noise from the first step on in which a repeat differs there: what came before was
equal, and counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import KeyColumns, KeySpace
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.sides import Side
from upguard_plugin.compare.steps import RankSteps, steps_behind

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Repeat = tuple[Run, Run]  # the baseline and a repeat of it


class RankNoise:
    """Noise of one rank, found as far as the comparison has come."""

    def __init__(self, repeats: Sequence[Repeat], rank: int, space: KeySpace) -> None:
        """space: of the comparison that asks, so that identities mean the same."""
        self._repeats = [
            RankSteps(baseline, repeat, rank, steps_behind(baseline, repeat, rank), space)
            for baseline, repeat in repeats
            if rank in repeat.ranks
        ]
        self._unread = [self._unequal(steps) for steps in self._repeats]
        self._identities: set[int] = set()
        self.names: dict[str, int] = {}  # of what is noise -> the first step where it is

    @staticmethod
    def _unequal(steps: RankSteps) -> deque[int]:
        return deque(steps.common[~steps.has_equal_digests].tolist())

    def hides(self, step: int, columns: KeyColumns) -> Bools:
        """One answer per key: whether it is noise in this step. Asked step by step, in order."""
        for steps, unread in zip(self._repeats, self._unread, strict=True):
            while unread and unread[0] <= step:
                self._learn(steps, unread.popleft())
        found: Bools = np.isin(columns.identity, list(self._identities))
        return found

    def _learn(self, steps: RankSteps, step: int) -> None:
        pairing = steps.pairing(step)
        assert pairing is not None
        for side, rows in _apart(pairing):
            for number in np.unique(side.key[rows]).tolist():
                key = side.columns.keys[number]
                self._identities.add(int(side.columns.identity[number]))
                self.names.setdefault(f"{key.boundary} {key.role} {key.slot}", step)


def _apart(pairing: Pairing) -> list[tuple[Side, Ints]]:
    """The rows that differ, or that only one of the two has."""
    pairs = np.flatnonzero(pairing.value_differs | pairing.form_differs)
    return [
        (pairing.baseline, pairing.baseline_rows[pairs]),
        (pairing.target, pairing.target_rows[pairs]),
        (pairing.baseline, pairing.baseline_alone),
        (pairing.target, pairing.target_alone),
    ]
