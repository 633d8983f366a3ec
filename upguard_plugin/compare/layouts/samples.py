"""Events of single samples, and whole batches that several micro-batches or ranks share.

In:  what all ranks of a run saw under one name, and the units of the step.
Out: the slot of a sample in its unit; or why there is no common whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from upguard_plugin.compare.layouts.holdings import Holding, Seen
from upguard_plugin.compare.layouts.units import MAX_DIGITS, SideUnits, is_sample

OTHER_GROUPS = "the runs put the same samples into other micro-batches"
NOT_SUMMED = "gradients that the ranks have not summed yet"
_OF_A_SAMPLE = re.compile(
    rf"(.*\[)(\d{{1,{MAX_DIGITS}}})(\])$"
)  # a slot: "0[3]" is sample 3 of slot "0"


def slot_in_unit(seen: Seen, units: SideUnits) -> str:
    """The slot, with the number that a sample has in its unit."""
    _, _, role, slot, _ = seen.what
    if is_sample(role, slot):
        return str(units.position(seen.place, int(slot)))
    if not slot.endswith("]"):
        return slot
    found = _OF_A_SAMPLE.fullmatch(slot)
    return slot if found is None else f"{found[1]}{units.position(seen.place, int(found[2]))}]"


def is_of_a_sample(role: str, slot: str) -> bool:
    """Whether such events are those of one sample, whoever computed it."""
    return is_sample(role, slot) or (
        slot.endswith("]") and _OF_A_SAMPLE.fullmatch(slot) is not None
    )


def why_not_whole(parts: Sequence[Holding], joined: bool, in_line: bool) -> str | None:
    """Why the tensor is not that of all samples of a unit, in order; None where it is."""
    several = len({part.seen.place for part in parts}) > 1
    placements = [part.key.placement for part in parts]
    cut = all(placement is not None and "dp" in placement.sharded for placement in placements)
    if not joined and not cut:
        return None
    # Of a batch, its samples tell more: the ranks that have an other one.
    is_batch = several and parts[0].key.role == "data"
    return OTHER_GROUPS if not in_line or several != cut or is_batch else None
