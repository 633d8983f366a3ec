"""Buffers of a collective are left alone from its launch to its completion.

Inputs stay as they are, if they share no memory with an output: the others are what the collective
writes. Outputs are neither read nor written before the program has waited for the work.
"""

from __future__ import annotations

from dataclasses import replace

from upguard_plugin.invariants.events import RankEvents, StepEvents, what
from upguard_plugin.invariants.findings import Findings, Invariant, made
from upguard_plugin.invariants.wires import parts_of
from upguard_plugin.records import EventKey

_WAS_OVER = 1.0  # value of the event of a use: the collective had ended all the same


class InputsUnchanged(Invariant):
    """Nobody, the collective included, writes an input while the collective is under way."""

    name = "inputs-unchanged"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for part in parts_of(step):
            events = part.events
            for slot, row in part.kept.items():
                launch = part.inputs.get(slot)
                if launch is None:
                    found.skip(events, row, "the input was not recorded at launch")
                elif events.content(launch) == events.content(row):
                    found.hold(events, row)
                else:
                    found.breaks(
                        step,
                        {events.rank: row},
                        f"{what(events.key(row))} was overwritten while the collective was under "
                        "way: it is not what it was at launch.",
                    )


class OutputsAwaited(Invariant):
    """Nobody reads or writes an output before its work was waited for.

    Capture records such a use as it happens. It is a suspect where the collective happened to be
    over, because the values are right this time, and where a version counter alone tells of it,
    because a change of shape in place moves that too.
    """

    name = "outputs-awaited"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            for row in events.rows(_is_use):
                self._judge(step, events, row, found)
            for row in events.rows(_is_output):
                if events.level == "op":
                    found.hold(events, row)
                else:
                    found.skip(events, row, "level op alone sees who uses an output")

    def _judge(self, step: StepEvents, events: RankEvents, row: int, found: Findings) -> None:
        key, values = events.key(row), events.batch.value
        was_over = values is not None and values[row] == _WAS_OVER
        output = what(replace(key, role="output"))
        if key.operator is None:
            how = f"{output} was written, or reshaped in place, while the collective was under way"
        else:
            verb = "writes" if key.role == "output" else "reads"
            how = f"{key.operator} {verb} {output} before the program has waited for the collective"
        luck = ", which happened to be over." if was_over else "."
        use = made(self.name, step, {events.rank: row}, how + luck)
        use = replace(use, tensors=())  # what is there before the end is another thing each time
        if was_over or key.operator is None:
            found.suspect(use)
        else:
            found.add(use)


def _is_use(key: EventKey) -> bool:
    return key.group is not None and key.op is None


def _is_output(key: EventKey) -> bool:
    return key.op is not None and key.role == "output" and key.moment == "completion"
