"""Inputs of a collective stay as they are from its launch to its completion.

Only inputs that share no memory with an output: the others are what the collective writes.
"""

from __future__ import annotations

from upguard_plugin.invariants.events import StepEvents, what
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.invariants.wires import parts_of


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
