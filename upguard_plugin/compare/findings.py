"""The first thing in a step where the runs part.

In:  the `Pairing` of a step, and which events are looked at.
Out: `Finding`s, the first of them in the order of the step.

Three kinds of evidence are told apart. *Values*: other bits in tensors of one dtype and shape; a
collective, a gradient or an optimizer state that one run lacks. Each is a divergence. *Forms*:
another dtype or shape, whose bits cannot be compared, or another implementation of the optimizer;
a divergence if values part behind it.
*Structure*: what only one run has; a divergence only if no value differs anywhere. What is None in
the run that has it is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.chain import Chain, chain_of
from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER, is_collective, is_operator
from upguard_plugin.compare.launches import of_other_form, out_of_order
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.sides import Side
from upguard_plugin.compare.unused import (
    Aside,
    Memory,
    asides_of,
    asides_of_classes,
    asides_without_data,
    passed_otherwise,
    unused_generators,
    unused_scalars,
    without_data,
)
from upguard_plugin.records import EventKey

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Inputs and outputs are those of operators that ran since the last step: the state comes behind.
START_ORDER = (
    "input",
    "param",
    "buffer",
    "grad",
    "main_grad",
    "master",
    "optimizer_state",
    "scalar",
    "rng",
)
_PAST_START = 1 << 48  # places behind the state found at start; more than a step has events
_START_RANK = np.array(
    [
        START_ORDER.index(role) if role in START_ORDER else 0
        for role in sorted(ROLE_NUMBER, key=ROLE_NUMBER.__getitem__)
    ],
    dtype=np.int64,
)
_OF_PARAMETERS = ("grad", "main_grad", "master", "optimizer_state")
MAX_BESIDE = 1000  # states that differ at once; a report names a few of them


@dataclass(frozen=True, slots=True)
class Finding:
    """One event in which the runs differ."""

    place: int  # where in the order of the step
    baseline_row: int | None
    target_row: int | None
    what: str  # "value", "form", "alone", "order"; "operator": one that a chain led to
    chain: Chain | None = None  # behind the first value that differs, if operators explain it

    def key(self, pairing: Pairing) -> EventKey:
        """The event's key: the baseline's, where it has the event."""
        side, row = self.seen_by(pairing)
        return side.batch.key_of(row)

    def seen_by(self, pairing: Pairing) -> tuple[Side, int]:
        """The side and row to describe the event by."""
        if self.baseline_row is not None:
            return pairing.baseline, self.baseline_row
        assert self.target_row is not None
        return pairing.target, self.target_row


@dataclass(frozen=True, slots=True)
class StepFindings:
    """What one step has to say, each list in the order of the step."""

    divergent: tuple[Finding, ...]  # empty, or the first and what stands beside it
    structure: Finding | None  # the first boundary, dtype or shape that differs
    unused: tuple[Aside, ...]  # what differs without any bearing


def find(pairing: Pairing, chosen: Bools, memory: Memory) -> StepFindings:
    """Look through a step.

    chosen: one answer per pair, whether it is looked at.
    memory: of the steps before; this step is added to it.
    """
    places = pair_places(pairing)
    columns, key = pairing.baseline.columns, pairing.baseline.key[pairing.baseline_rows]
    values = chosen & pairing.comparable & pairing.value_differs
    switched = values & columns.is_switch[key]
    generators = unused_generators(pairing, values, memory)
    scalars = unused_scalars(pairing, values & ~switched & ~generators, places)
    found = _of_pairs(pairing, values & ~switched & ~generators & ~scalars, places, "value")
    found += _missing_values(pairing)
    found += _of_pairs(pairing, out_of_order(pairing, chosen), places, "order")
    found += _of_pairs(pairing, of_other_form(pairing, chosen), places, "form")
    found.sort(key=lambda finding: finding.place)
    formed = chosen & pairing.form_differs | switched
    identities = columns.identity[key]
    known = np.isin(identities, list(memory.forms))
    forms = _of_pairs(pairing, formed & ~known, places, "form")
    memory.is_first = False
    other_slots = chosen & pairing.slot_differs
    otherwise = passed_otherwise(pairing, other_slots)
    unused = asides_of(pairing, generators | scalars) + asides_without_data(pairing)
    unused += asides_of_classes(pairing, otherwise)
    if found:
        forms = [form for form in forms if form.place < found[0].place]
        forms = [form for form in forms if _passed_on(pairing, form, found[0])]
        first = _beside(forms + found, pairing)
        return StepFindings((*_behind(first[:1], pairing), *first[1:]), None, unused)
    memory.forms.update(identities[formed].tolist())
    slots = _of_pairs(pairing, other_slots & ~otherwise, places, "form")
    structure = sorted(forms + slots + _alone(pairing), key=lambda finding: finding.place)
    return StepFindings((), structure[0] if structure else None, unused)


def pair_places(pairing: Pairing) -> Ints:
    """Where each pair stands: state at start by role, everything else in program order."""
    columns, key = pairing.baseline.columns, pairing.baseline.key[pairing.baseline_rows]
    at_start = columns.phase[key] == PHASE_NUMBER["start"]
    start_rank = np.where(columns.is_operator[key], 0, _START_RANK[columns.role[key]]) << 40
    return np.where(at_start, start_rank, _PAST_START) + 2 * pairing.baseline_rows


def _place_of_alone(pairing: Pairing, row: int, in_target: bool) -> int:
    side = pairing.target if in_target else pairing.baseline
    key = side.batch.key_of(row)
    if in_target:  # just before the next event that the baseline has too
        later = np.flatnonzero(pairing.target_rows > row)
        row = len(pairing.baseline.batch)
        if len(later):
            row = int(pairing.baseline_rows[later[pairing.target_rows[later].argmin()]])
    part = _PAST_START
    if key.phase == "start":
        part = 0 if is_operator(key) else int(_START_RANK[ROLE_NUMBER[key.role]]) << 40
    return part + 2 * row - int(in_target)


def _of_pairs(pairing: Pairing, mask: Bools, places: Ints, what: str) -> list[Finding]:
    pairs = np.flatnonzero(mask)
    return [
        Finding(place, row_b, row_t, what)
        for place, row_b, row_t in zip(
            places[pairs].tolist(),
            pairing.baseline_rows[pairs].tolist(),
            pairing.target_rows[pairs].tolist(),
            strict=True,
        )
    ]


def _alone(pairing: Pairing) -> list[Finding]:
    """The first event with data that only the baseline has, and that only the target has."""
    found = []
    sides = (
        (False, pairing.baseline, pairing.baseline_alone),
        (True, pairing.target, pairing.target_alone),
    )
    for in_target, side, alone in sides:
        rows = alone[~without_data(side, alone)]
        if len(rows):
            row = int(rows[0])
            row_b, row_t = (None, row) if in_target else (row, None)
            place = _place_of_alone(pairing, row, in_target)
            found.append(Finding(place, row_b, row_t, "alone"))
    return found


def _missing_values(pairing: Pairing) -> list[Finding]:
    """Events that only one run has although both know what they belong to.

    A collective; a gradient or an optimizer state of a parameter that both runs have.
    """
    found = []
    for in_target, side, other, rows in (
        (False, pairing.baseline, pairing.target, pairing.baseline_alone),
        (True, pairing.target, pairing.baseline, pairing.target_alone),
    ):
        key = side.key[rows]
        of_parameter = np.isin(side.columns.role[key], [ROLE_NUMBER[r] for r in _OF_PARAMETERS])
        for row in rows[side.columns.is_collective[key] | of_parameter].tolist():
            named = side.batch.key_of(row)
            known = named.boundary in other.columns.parameters and named.role in other.columns.roles
            if is_collective(named) or known:
                place = _place_of_alone(pairing, row, in_target)
                row_b, row_t = (None, row) if in_target else (row, None)
                found.append(Finding(place, row_b, row_t, "alone"))
                break  # the first is enough: rows are in program order
    return found


def _passed_on(pairing: Pairing, form: Finding, behind: Finding) -> bool:
    """Whether another dtype or shape, or another switch, may have led to what differs behind it."""
    key = form.key(pairing)
    if key.role == "scalar":  # of the optimizer
        return behind.key(pairing).phase in ("optimizer", "param_sync")
    if key.role != "input" or form.baseline_row is None:
        return True
    outputs = pairing.of_call(form.baseline_row, "output")
    return not len(outputs) or bool(pairing.differs[outputs].any())


def _beside(found: list[Finding], pairing: Pairing) -> list[Finding]:
    """The first finding and those that have no order against it: other states, other batches."""
    keys = [finding.key(pairing) for finding in found[:MAX_BESIDE]]
    if keys[0].phase == "start":
        state = [(f, key) for f, key in zip(found, keys, strict=False) if key.phase == "start"]
        weights = {key.boundary for _, key in state if key.role == "param"}
        # A master was made from its weight, or the weight from it: they are one finding.
        return [f for f, key in state if key.role != "master" or key.boundary not in weights]
    if keys[0].role not in ("data", "sample"):
        return found[:1]
    here = _microbatch(found[0], pairing)
    batch = [
        (f, key)
        for f, key in zip(found, keys, strict=False)
        if key.role in ("data", "sample") and _microbatch(f, pairing) == here
    ]
    whole = {key.boundary for _, key in batch if key.role == "data"}
    # A sample of a batch that is there as a whole says nothing more.
    return [f for f, key in batch if key.role == "data" or key.boundary not in whole]


def _behind(findings: list[Finding], pairing: Pairing) -> list[Finding]:
    """The operators that these values were made by, where only one run has them."""
    return [_operator_behind(finding, pairing) or finding for finding in findings]


def _operator_behind(finding: Finding, pairing: Pairing) -> Finding | None:
    rows = finding.baseline_row, finding.target_row
    if finding.what not in ("value", "form") or rows[0] is None or rows[1] is None:
        return None
    chain = chain_of(pairing, rows[0], rows[1])
    if chain is None or chain.named == (None, None):
        return None if chain is None else replace(finding, chain=chain)
    row_b, row_t = chain.named
    row, in_target = (row_t, True) if row_b is None else (row_b, False)
    assert row is not None
    place = min(finding.place, _place_of_alone(pairing, row, in_target))
    return Finding(place, row_b, row_t, "operator", chain)


def _microbatch(finding: Finding, pairing: Pairing) -> int:
    side, row = finding.seen_by(pairing)
    return int(side.batch.microbatch[row])
