"""Random generators that nobody draws from.

In:  the pairings of a rank's steps, in order.
Out: for each, the pairs that show a state which moves nothing.

A program that never seeds Python's `random` starts each run with another state of it. As long as
that generator does not move in either run, from the first recorded step to the end of the current
one, nothing can depend on it, and its state is no difference. Once it moves, it counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import ROLE_NUMBER
from upguard_plugin.compare.pairing import Pairing, Side

Bools = npt.NDArray[np.bool_]
States = dict[str, list[int]]  # generator -> its states in a step, in program order


class IdleGenerators:
    """What is known of one rank's generators so far."""

    def __init__(self) -> None:
        self._last: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._moved: set[str] = set()
        self.differing: dict[str, int] = {}  # idle generator -> first step where its state differs

    def look(self, step: int, pairing: Pairing) -> Bools:
        """Which pairs of the step are states of generators that have not moved so far."""
        for side, last in zip((pairing.baseline, pairing.target), self._last, strict=True):
            for name, states in _states_in(side).items():
                known = last.get(name, states[0])
                # A generator that is seen once in a step may be drawn from before the step ends.
                if len(states) < 2 or any(state != known for state in states):
                    self._moved.add(name)
                last[name] = states[-1]
        columns, key = pairing.baseline.columns, pairing.baseline.key[pairing.baseline_rows]
        idle = columns.role[key] == ROLE_NUMBER["rng"]
        for pair in np.flatnonzero(idle).tolist():
            drawn = columns.keys[int(key[pair])]
            idle[pair] = drawn.operator is None and drawn.boundary not in self._moved
            if idle[pair] and pairing.differs[pair]:
                self.differing.setdefault(drawn.boundary, step)
        return idle


def _states_in(side: Side) -> States:
    states: States = {}
    for row in np.flatnonzero(side.columns.role[side.key] == ROLE_NUMBER["rng"]).tolist():
        key = side.batch.key_of(row)
        if key.operator is None:  # what an operator drew from is no state of the step
            states.setdefault(key.boundary, []).append(int(side.batch.h[row]))
    return states
