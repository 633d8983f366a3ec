"""Events of single samples, and whole batches that several micro-batches or ranks share.

In:  what all ranks of a run saw under one name, and the units of the step.
Out: the slot of a sample in its unit; or a PlacementError where there is no common whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from upguard_plugin.compare.layouts.parts import Part
from upguard_plugin.compare.layouts.units import Place, SideUnits, is_number
from upguard_plugin.errors import PlacementError
from upguard_plugin.records import EventKey, Layout

OTHER_GROUPS = "the runs put the same samples into other micro-batches"
_NOT_SUMMED = "gradients that the ranks have not summed yet"
_OF_A_SAMPLE = re.compile(r"(.*\[)([0-9]{1,9})(\])$")  # a slot: "0[3]" is sample 3 of slot "0"


def slot_in_unit(key: EventKey, place: Place, units: SideUnits) -> str:
    """The slot, with the number that a sample has in its unit."""
    if key.role == "sample" and is_number(key.slot):
        return str(units.position(place, int(key.slot)))
    if not key.slot.endswith("]"):
        return key.slot
    found = _OF_A_SAMPLE.fullmatch(key.slot)
    return key.slot if found is None else f"{found[1]}{units.position(place, int(found[2]))}]"


def is_of_a_sample(role: str, slot: str) -> bool:
    """Whether such events are those of one sample, whoever computed it."""
    return role == "sample" or (slot.endswith("]") and _OF_A_SAMPLE.fullmatch(slot) is not None)


def place_of(part: Part, layouts: Mapping[int, Layout]) -> Place:
    """The micro-batch of a rank that an event belongs to."""
    axis = layouts[part.rank].axis("dp")
    return 0 if axis is None else axis.index, int(part.batch.microbatch[part.row])


def check_is_whole(
    parts: Sequence[Part], layouts: Mapping[int, Layout], joined: bool, in_line: bool
) -> None:
    """Raises PlacementError unless the tensor is that of all samples of a unit, in order."""
    several = len({place_of(part, layouts) for part in parts}) > 1
    placements = [part.key.placement for part in parts]
    cut = all(placement is not None and "dp" in placement.sharded for placement in placements)
    if not joined and not cut:
        return
    # Of a batch, its samples tell more: the ranks that have an other one.
    is_batch = several and parts[0].key.role == "data"
    if not in_line or several != cut or is_batch:
        raise PlacementError(OTHER_GROUPS)


def check_is_summed(parts: Sequence[Part]) -> None:
    """Raises PlacementError where ranks have other gradients of what they are to have as one.

    They are summed later, and are compared then.
    """
    placement = parts[0].key.placement
    if placement is not None and placement.partial and parts[0].sketch is not None:
        return  # sketches of partial sums add up to that of the sum
    held: dict[object, set[tuple[int, int]]] = {}
    for part in parts:
        pieces = None if part.key.placement is None else part.key.placement.pieces
        held.setdefault(pieces, set()).add(part.value)
    if any(len(values) > 1 for values in held.values()):
        raise PlacementError(_NOT_SUMMED)
