"""Declared placements fit the classes of the modules they speak of: wrong marks are a common bug.

In:  parameters of declared placement, and the classes of the modules that own them.
Out: suspects only. A class's name says how its weight is usually cut; nothing in a run says that it
     must be.

That a weight declared as cut is in truth the same on all ranks cannot be seen: its parts are hashed
at their places.
"""

from __future__ import annotations

import re

from upguard_plugin.invariants.events import StepEvents, what
from upguard_plugin.invariants.findings import Findings, Invariant, made
from upguard_plugin.records import EventKey

_AXIS = "tp"
_WHOLE = re.compile(r"Norm\d?d?$")  # LayerNorm, RMSNorm, BatchNorm1d
_CUT = re.compile(r"ColumnParallel|RowParallel|VocabParallel")
_NO_RULE = "*"  # the placement of what only an axis called `dp` speaks of


class MarksFit(Invariant):
    """Weights of norms are whole on every rank of `tp`, those of parallel layers are cut."""

    name = "marks-fit"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            axis = events.layout.axis(_AXIS)
            if axis is None or axis.size < 2:
                continue
            classes = {
                key.boundary: key.operator
                for row in events.rows(_is_call)
                if (key := events.key(row))
            }
            for row in events.rows(_is_declared):
                key = events.key(row)
                owner, _, leaf = key.boundary.rpartition(".")
                cls = classes.get(owner)
                assert key.placement is not None  # `_is_declared` says so
                is_cut = _AXIS in key.placement.sharded
                if cls is None or leaf not in ("weight", "bias"):
                    continue
                if key.placement.mesh != axis.mesh:
                    continue  # an expert: its layers may be cut in another way than all others
                if _WHOLE.search(cls) and is_cut:
                    how = f"cuts it over {_AXIS}"
                elif _CUT.search(cls) and leaf == "weight" and not is_cut:
                    how = f"has it whole on every rank of {_AXIS}"
                else:
                    found.hold(events, row)
                    continue
                sentence = f"{what(key)} belongs to a {cls}, but its placement {how}."
                found.suspect(made(self.name, step, {events.rank: row}, sentence))


def _is_call(key: EventKey) -> bool:
    is_module = key.operator is not None and "." not in key.operator
    return is_module and key.group is None and key.role in ("input", "output")


def _is_declared(key: EventKey) -> bool:
    is_weight = key.phase == "start" and key.role == "param" and key.slot == "value"
    return is_weight and key.placement is not None and key.placement.spec != _NO_RULE
