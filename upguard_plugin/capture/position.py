"""Where the training is: the step, micro-batch and phase that new events belong to.

One mutable object per Guard, moved by probes and adapters, read by the recorder for every event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from upguard_plugin.trace.batch import NONE


@dataclass(slots=True)
class Position:
    """The place in the run.

    `step` counts from 0 at `enable`; `iteration` is the framework's own number.
    """

    step: int = 0
    iteration: int | None = None
    microbatch: int = NONE
    backward_microbatch: int = NONE  # of the forward whose gradients are flowing
    phase: str = "start"
    module: str = ""  # the innermost module whose forward is running; the next two are of its call
    module_call: int = 0
    module_microbatch: int = NONE
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Events inside belong to `phase`; afterwards the phase is what it was."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def outside_microbatches(self, phase: str) -> Iterator[None]:
        """As `in_phase`, for events of the whole step: state, the optimizer's work."""
        before, self.microbatch = self.microbatch, NONE
        try:
            with self.in_phase(phase):
                yield
        finally:
            self.microbatch = before

    def next_call(self, boundary: str) -> int:
        """Number this call of a boundary in its step and micro-batch, from 0."""
        place = (boundary, self.microbatch)
        call = self.calls.get(place, 0)
        self.calls[place] = call + 1
        return call

    def next_step(self) -> None:
        """Move to the start of the next step."""
        self.step += 1
        self.iteration = None if self.iteration is None else self.iteration + 1
        self.microbatch = self.backward_microbatch = NONE
        self.phase = "start"
        self.calls.clear()
