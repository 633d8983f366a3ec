"""The tainted region: what differs there by rounding, and what by a fault.

In:  the steps of two logical runs, one after the other, in pairs.
Out: the same pairs with those marked that differ by rounding, and those that cannot be judged.

The region starts with the first unequal boundary if that lies directly behind a sum which the runs
take over other numbers of ranks. In it an unequal boundary is rounding while it is no farther apart
than bounds.py allows. Whatever differs before it, or by more, stays a divergence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.findings import pair_places
from upguard_plugin.compare.layouts.bounds import Apart, apart, bound
from upguard_plugin.compare.layouts.merge import LogicalEvent, StepEvents
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.fingerprint.sketch import EPSILON
from upguard_plugin.trace.batch import NONE

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

NO_SKETCHES = (
    "they lie behind a sum that the layouts take in another order, and without sketches nothing "
    "tells rounding from a fault: record both runs with sketch: true"
)
_WEIGHTS = ("param", "master")
_OF_PARAMETERS = (*_WEIGHTS, "grad", "main_grad", "optimizer_state")
_MAX_LISTED = 3

EventsOf = Callable[[int, int], StepEvents]  # side, step -> event of each row


@dataclass(frozen=True, slots=True)
class Judged:
    """One boundary of the region."""

    step: int
    row: int  # of the baseline
    event: LogicalEvent
    in_eps: float  # how far apart, in epsilons of the coarsest dtype so far
    bound: float  # in the same epsilons

    def __str__(self) -> str:
        key = self.event.key
        microbatch = "" if self.event.microbatch == NONE else f", micro-batch {self.microbatch}"
        where = f"step {self.step}{microbatch}, {key.phase}"
        return (
            f"{key.boundary} {key.role} {key.slot} ({where}) by {self.in_eps:.3g} epsilons "
            f"where rounding explains {self.bound:.3g}"
        )

    @property
    def microbatch(self) -> int:
        return self.event.microbatch


class Taint:
    """The region, as far as the comparison has come."""

    def __init__(self, events_of: EventsOf) -> None:
        self._events_of = events_of
        self._masks: dict[int, tuple[Bools, Bools]] = {}  # by step
        self._depth: Counter[int] = Counter()  # boundaries behind sums, by micro-batch
        self._deepest = 0
        self._epsilon = 0.0  # of the coarsest dtype in the region
        self._finest = 1.0  # epsilon of the weights, or of their masters
        self._began: dict[tuple[str, str], Floats] = {}  # sketches of weights in the first step
        self._flows: dict[tuple[str, int], float] = {}  # module, micro-batch -> gradient's norm
        self._cancelled: set[str] = set()  # parameters whose gradients are rounding alone
        self._has_parted = False  # what follows from a fault is no measure of rounding
        self.origin: Judged | None = None
        self.farthest: list[Judged] = []
        self.beyond: Judged | None = None  # rounding does not explain it, and nothing before it
        self.num_updates = 0

    def judged(self, step: int, target_step: int, pairing: Pairing) -> Pairing:
        """The pairs of a step. Steps must be asked for in order; an earlier one may be again."""
        if step not in self._masks:
            if self.origin is not None:
                self.num_updates += 1
            self._masks[step] = self._judge(step, target_step, pairing)
        rounding, unjudged = self._masks[step]
        return replace(
            pairing,
            value_differs=pairing.value_differs & ~rounding,
            comparable=pairing.comparable & ~unjudged,
            rounding=rounding,
        )

    def notes(self) -> list[str]:
        """What is farthest apart in the region, and what rounding does not explain."""
        notes = []
        if self.beyond is not None:
            notes.append(f"rounding: not explained is {self.beyond}")
        if self.farthest:
            notes.append(f"rounding: farthest apart are {'; '.join(map(str, self.farthest))}")
        return notes

    def _judge(self, step: int, target_step: int, pairing: Pairing) -> tuple[Bools, Bools]:
        ours, theirs = self._events_of(0, step), self._events_of(1, target_step)
        rounding, unjudged = (np.zeros(len(pairing.baseline_rows), np.bool_) for _ in range(2))
        first = not self._masks
        self._depth.clear()
        self._flows.clear()
        if not first and not pairing.value_differs.any():
            self._pass_equal(ours, theirs, pairing)
            return rounding, unjudged
        for pair in np.argsort(pair_places(pairing), kind="stable").tolist():
            row = int(pairing.baseline_rows[pair])
            baseline, target = ours[row], theirs[int(pairing.target_rows[pair])]
            self._pass_by(baseline, first)
            behind_sum = baseline.sums != target.sums
            if behind_sum and baseline.microbatch != NONE:
                self._depth[baseline.microbatch] += 1
                self._deepest = max(self._deepest, self._depth[baseline.microbatch])
            if not pairing.value_differs[pair]:
                continue
            if self.origin is None and not behind_sum:
                continue  # a divergence, unless it is noise or nobody uses it
            verdict = self._one(step, row, baseline, target)
            unjudged[pair], rounding[pair] = verdict is None, bool(verdict)
            self._has_parted |= verdict is False
        return rounding, unjudged

    def _pass_equal(self, ours: StepEvents, theirs: StepEvents, pairing: Pairing) -> None:
        """Keep how deep a step goes that is equal throughout."""
        rows = pairing.baseline_rows
        behind_sum = ours.sums[rows] != theirs.sums[pairing.target_rows]
        microbatch = ours.batch.microbatch[rows][behind_sum]
        _, depths = np.unique(microbatch[microbatch != NONE], return_counts=True)
        self._deepest = max(self._deepest, *depths.tolist(), 0)

    def _pass_by(self, event: LogicalEvent, first: bool) -> None:
        """Keep what later events are measured by."""
        key, sketch = event.key, event.whole.sketch
        if first and key.role in _WEIGHTS and key.dtype in EPSILON:
            self._finest = min(self._finest, EPSILON[key.dtype])
        if sketch is None:
            return
        if first and key.phase == "start" and key.role in _WEIGHTS:
            self._began[key.boundary, key.role] = sketch
        if key.phase == "backward" and key.role == "grad_output":
            self._flows[key.boundary, event.microbatch] = float(np.linalg.norm(sketch))

    def _one(self, step: int, row: int, ours: LogicalEvent, theirs: LogicalEvent) -> bool | None:
        """Whether an unequal event differs by rounding; None where nothing can tell."""
        key, epsilon = ours.key, EPSILON.get(ours.key.dtype)
        if epsilon is None or not (ours.whole.is_agreed and theirs.whole.is_agreed):
            return False  # whole numbers do not round, and replicas are copies
        if key.role == "scalar":  # Python's float64 does not tell in which dtype it was computed
            epsilon = max(epsilon, self._finest if self._finest < 1 else 0.0)
        found, epsilon = apart(ours, theirs), max(epsilon, self._epsilon)
        depth = self._depth[ours.microbatch] or self._deepest
        allowed = bound(epsilon, max(depth, 1), self.num_updates)
        share = 0.0 if found is None else found.share
        judged = Judged(step, row, ours, share / epsilon, allowed / epsilon)
        if found is None:
            self.origin = self.origin or judged
            return None
        if self._follows(ours, found):
            pass  # how far weights are apart says nothing of the steps behind
        elif share <= allowed:
            if not self._has_parted:
                listed = sorted([*self.farthest, judged], key=lambda one: -one.in_eps)
                self.farthest = listed[:_MAX_LISTED]
        elif not self._cancels(ours, found, allowed):
            if not self._has_parted:
                self.beyond = judged
            return False
        self.origin = self.origin or judged
        self._epsilon = epsilon
        return True

    def _follows(self, event: LogicalEvent, found: Apart) -> bool:
        """Whether it is a weight, and both runs' are no farther apart than they have moved.

        An optimizer that divides a gradient by its own size makes a whole update of what is
        nothing but rounding.
        """
        key, began = event.key, self._began.get((event.key.boundary, event.key.role))
        if key.role not in _WEIGHTS or began is None or event.whole.sketch is None:
            return False
        return found.difference <= float(np.linalg.norm(event.whole.sketch - began))

    def _cancels(self, event: LogicalEvent, found: Apart, allowed: float) -> bool:
        """Whether it belongs to a parameter whose gradient is a sum that cancels.

        Such a gradient is all rounding, as that of a key's bias; so is what the optimizer makes of
        it. It is measured by the gradients that it is the sum of.
        """
        key = event.key
        if key.boundary in self._cancelled:
            return key.role in _OF_PARAMETERS
        if key.phase != "accumulate":
            return False
        flow = self._flows.get((key.boundary.rpartition(".")[0], event.microbatch), 0.0)
        if found.difference > allowed * flow:
            return False
        self._cancelled.add(key.boundary)
        return True
