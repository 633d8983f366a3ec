"""Copies of a weight that are no replicas: its master, and the same parameter on another stage.

In:  masters as capture has rounded them to the dtype of their weight, and parameters that `tied`
     names; both at the start of a step.
"""

from __future__ import annotations

from collections.abc import Hashable

from upguard_plugin.invariants.events import (
    StepEvents,
    named_ranks,
    odd_ones,
    same_events,
    unequal,
    what,
)
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.records import EventKey


class MastersRound(Invariant):
    """A master, rounded to its weight's dtype, is the weight."""

    name = "masters-round"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            weights: dict[str, int] = {}
            for row in events.rows(_found_at_start):
                key = events.key(row)
                if key.role == "param":
                    weights[key.boundary] = row
                    continue
                weight = weights.get(key.boundary)
                if weight is None or _form(events.key(weight)) != _form(key):
                    found.skip(events, row, "its weight was not recorded in the same form")
                elif events.content(weight) == events.content(row):
                    found.hold(events, row)
                else:
                    found.breaks(
                        step,
                        {events.rank: row},
                        f"{what(key)} does not round to the weight: the next update will replace "
                        "the weight by it.",
                        producer=weight,
                    )


def _found_at_start(key: EventKey) -> bool:
    return key.phase == "start" and (key.role, key.slot) in (
        ("param", "value"),
        ("master", "rounded"),
    )


def _form(key: EventKey) -> Hashable:
    return key.dtype, key.shape, key.placement


class TiedAgree(Invariant):
    """A parameter that several pipeline stages hold has the same bits on each."""

    name = "tied-agree"

    def look(self, step: StepEvents, found: Findings) -> None:
        for sides in same_events(step, _is_tied, _name).values():
            pipelines: dict[tuple[int, ...], dict[int, int]] = {}
            for rank, row in sides.items():
                stages = step.ranks[rank].layout.axis("pp")
                if stages is None:
                    found.skip(step.ranks[rank], row, "the layout has no axis pp")
                else:
                    pipelines.setdefault(stages.ranks, {})[rank] = row
            for mine in pipelines.values():
                self._compare(step, mine, found)

    def _compare(self, step: StepEvents, sides: dict[int, int], found: Findings) -> None:
        contents = {rank: step.ranks[rank].content(row) for rank, row in sides.items()}
        rank, row = next(iter(sides.items()))
        if len(sides) < 2:
            found.skip(step.ranks[rank], row, "no other recorded stage holds it")
        elif len(set(contents.values())) == 1:
            found.hold(step.ranks[rank], row)
        else:
            odd = odd_ones(contents)
            found.breaks(
                step,
                sides,
                f"{what(step.ranks[rank].key(row))} is tied on {named_ranks(sides)}, but "
                f"{unequal(odd, sides)}.",
                ranks=odd,
            )


def _is_tied(key: EventKey) -> bool:
    return key.role == "param" and key.slot == "tied"


def _name(key: EventKey) -> Hashable:
    return key.boundary, key.phase
