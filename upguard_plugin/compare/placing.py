"""Placements that a user adds to what was recorded without one.

    place:
      - boundaries: ["*.router"]
        roles: [output]
        placement: "t e"

In:  rules, and a run.
Out: a `Run` that reads the same events with placements.

A fingerprint belongs to the place at which it was taken, and what was recorded without a placement
was hashed as if it were the whole. So a rule can say that it is (a replica, or a partial sum). What
a rule says is a part of a tensor becomes a tensor of its own, `out.0 (part 2 of 4 over tp)`: it is
compared with the same part of a run that is cut alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from upguard_plugin.compare.ignoring import pattern_of
from upguard_plugin.compare.keys import is_collective, is_operator
from upguard_plugin.compare.rule_files import one_of, read_rules
from upguard_plugin.compare.run import Run, RunView
from upguard_plugin.errors import PlacementError, UsageError
from upguard_plugin.placement import parse_placement, replicated, resolve_placement
from upguard_plugin.records import ROLES, EventKey, Layout, Placement
from upguard_plugin.trace.batch import EventBatch

PART = re.compile(r" \(part \d+ of \d+ over [\w, ]+\)$")  # at the end of a part's slot

_OPTION = "--place"
_FIELDS = {"boundaries": True, "roles": False, "placement": True}
_TENSOR = re.compile(r"b?float|complex|q?u?int|bool")  # how the dtypes of tensors begin


@dataclass(frozen=True)
class PlaceRule:
    """A placement for the events that have none."""

    boundaries: tuple[str, ...]  # globs
    roles: tuple[str, ...]  # empty: every role
    placement: str
    number: int = 1  # in its file

    def matches(self, key: EventKey) -> bool:
        named = self._pattern.match(key.boundary) is not None
        return named and (not self.roles or key.role in self.roles)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self.boundaries)


def read_place_rules(path: Path) -> tuple[PlaceRule, ...]:
    """Raises UsageError if the file does not hold such rules."""
    rules = []
    for number, rule in enumerate(read_rules(path, _OPTION, "place", _FIELDS), 1):
        try:
            parse_placement(rule["placement"][0])
        except PlacementError as error:
            raise UsageError(
                f"cannot use {path} for {_OPTION}: rule {number}: {error.sentence}"
            ) from None
        roles = (one_of(path, _OPTION, number, "roles", r, ROLES) for r in rule.get("roles", ()))
        rules.append(PlaceRule(rule["boundaries"], tuple(roles), rule["placement"][0], number))
    return tuple(rules)


class PlacedRun(RunView):
    """A run of which more placements are known."""

    def __init__(self, run: Run, rules: Sequence[PlaceRule]) -> None:
        super().__init__(run)
        self._rules = tuple(rules)
        # By identity of the table of keys, which grows, and by rank: its place in the layout tells.
        self._tables: dict[tuple[int, int], tuple[Sequence[EventKey], list[EventKey]]] = {}

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        """Raises UsageError if a rule does not fit a tensor."""
        batch = self._run.read(rank, step, verify=verify)
        return replace(batch, keys=self._placed(batch.keys, rank))

    def _placed(self, keys: Sequence[EventKey], rank: int) -> Sequence[EventKey]:
        known, made = self._tables.get((id(keys), rank), (None, []))
        if known is not keys:
            made = []
            self._tables[id(keys), rank] = keys, made
        if len(made) < len(keys):
            layout = self._run.layout(rank)
            made += [self._key(key, layout) for key in keys[len(made) :]]
        return made

    def _key(self, key: EventKey, layout: Layout) -> EventKey:
        is_tensor = _TENSOR.match(key.dtype) is not None and key.role != "rng"
        if key.placement is not None or not is_tensor or is_collective(key) or is_operator(key):
            return key
        rule = next((rule for rule in self._rules if rule.matches(key)), None)
        if rule is None or (not key.shape and rule.placement.strip(" ")[:1] not in ("", "+")):
            return key  # a number has no dims: an optimizer's step count, say
        try:
            placement = resolve_placement(rule.placement, key.shape, layout)
        except PlacementError as error:
            raise UsageError(
                f"rule {rule.number} of {_OPTION} does not fit {key.boundary} ({key.role}) of "
                f"{self.path}: {error.sentence}"
            ) from None
        if _is_where_it_was_hashed(placement, key):
            return replace(key, placement=placement)
        own = replace(replicated(key.shape, placement.mesh), partial=placement.partial)
        return replace(key, slot=key.slot + _part(placement, layout), placement=own)


def _is_where_it_was_hashed(placement: Placement, key: EventKey) -> bool:
    """Whether every element is counted, at the place that it has in the rank's own tensor."""
    held = sum(prod(piece.sizes) for piece in placement.pieces)
    return held == prod(key.shape) and all(
        piece.local_start == piece.logical_start
        and all(
            local == logical or size == 1
            for size, local, logical in zip(
                piece.sizes, piece.local_strides, piece.logical_strides, strict=True
            )
        )
        for piece in placement.pieces
    )


def _part(placement: Placement, layout: Layout) -> str:
    """Which part it is, as the end of its slot."""
    number, count = 0, 1
    for name in placement.sharded:
        axis = layout.axis(name, placement.mesh)
        if axis is not None:
            number, count = number * axis.size + axis.index, count * axis.size
    return f" (part {number + 1} of {count} over {', '.join(placement.sharded) or 'padding'})"
