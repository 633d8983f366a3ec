"""How a difference spread on one rank: the values that it reached, in the order of the step.

In:  the first divergence of a rank, and the pairs of its step.
Out: the divergence and the first boundaries behind it that differ, each with its distance.

One value is seen at several boundaries, as output of one module and input of the next: it counts
once, where it was made, so that every link of the chain is something that was computed anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.describe import distance_between
from upguard_plugin.compare.findings import Finding, pair_places
from upguard_plugin.compare.keys import ROLE_NUMBER
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.verdict import Reached, Spread
from upguard_plugin.verdict_parts import Distance

MAX_LINKS = 10  # boundaries behind the first
MAX_RANKS = 64  # whose chains a verdict holds

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def spread_of(rank: int, step: int, first: Finding, pairing: Pairing, chosen: Bools) -> Spread:
    """chosen: one answer per pair, whether it is looked at."""
    links = [_first(pairing, first)]
    links += [
        _reached(pairing, int(pairing.baseline_rows[pair]), int(pairing.target_rows[pair]))
        for pair in _links(first, pairing, chosen)
    ]
    return Spread(rank=rank, step=step, boundaries=links)


def _links(first: Finding, pairing: Pairing, chosen: Bools) -> list[int]:
    """Pairs behind the first whose values were not seen before."""
    differs = chosen & pairing.comparable & pairing.value_differs
    places = pair_places(pairing)
    behind = np.flatnonzero(differs & (places > first.place))
    seen = set()
    if first.baseline_row is not None and first.target_row is not None:
        seen.add(_values(pairing, first.baseline_row, first.target_row))
    links: list[int] = []
    for pair in behind[np.argsort(places[behind], kind="stable")].tolist():
        values = _values(pairing, int(pairing.baseline_rows[pair]), int(pairing.target_rows[pair]))
        if values in seen:
            continue
        seen.add(values)
        links.append(_made_at(pairing, pair, behind))
        if len(links) == MAX_LINKS:
            break
    return links


def _made_at(pairing: Pairing, pair: int, behind: Ints) -> int:
    """Where a gradient was computed: the hooks of the module in front run before that one's."""
    columns, batches = pairing.baseline.columns, (pairing.baseline.batch, pairing.target.batch)
    rows = (pairing.baseline_rows, pairing.target_rows)
    roles = columns.role[batches[0].key[rows[0][behind]]]
    if columns.role[batches[0].key[rows[0][pair]]] != ROLE_NUMBER["grad_output"]:
        return pair
    same = roles == ROLE_NUMBER["grad_input"]
    for batch, at in zip(batches, rows, strict=True):
        same &= (batch.h[at[behind]] == batch.h[at[pair]]) & (
            batch.s[at[behind]] == batch.s[at[pair]]
        )
    return int(behind[same.argmax()]) if same.any() else pair


def _values(pairing: Pairing, row_b: int, row_t: int) -> tuple[int, ...]:
    baseline, target = pairing.baseline.batch, pairing.target.batch
    return (
        int(baseline.h[row_b]),
        int(baseline.s[row_b]),
        int(target.h[row_t]),
        int(target.s[row_t]),
    )


def _first(pairing: Pairing, first: Finding) -> Reached:
    if first.baseline_row is not None and first.target_row is not None:
        return _reached(pairing, first.baseline_row, first.target_row)
    side, row = first.seen_by(pairing)
    return _link(side.batch, row, None)


def _reached(pairing: Pairing, row_b: int, row_t: int) -> Reached:
    distance = distance_between(pairing, row_b, row_t)
    return _link(pairing.baseline.batch, row_b, distance, _takes_equal(pairing, row_b))


def _takes_equal(pairing: Pairing, row: int) -> bool:
    """Whether an operator takes equal tensors, all of which were recorded under its call."""
    key = pairing.baseline.batch.key_of(row)
    operator = key.operator or ""
    takes_lists = operator.startswith(("aten._foreach_", "aten._fused_"))
    if key.role != "output" or not operator.startswith("aten.") or takes_lists:
        return False  # code of others may use what it was not given, a list belongs to many
    inputs = [pairing.of_call(row, role) for role in ("input", "rng")]
    unequal = pairing.differs | pairing.rounds
    return len(inputs[0]) > 0 and not any(unequal[pairs].any() for pairs in inputs)


def _link(
    batch: EventBatch, row: int, distance: Distance | None, takes_equal: bool = False
) -> Reached:
    key, microbatch = batch.key_of(row), int(batch.microbatch[row])
    return Reached(
        microbatch=None if microbatch < 0 else microbatch,
        phase=key.phase,
        boundary=key.boundary,
        operator=key.operator,
        role=key.role,
        slot=key.slot,
        call=int(batch.call[row]),
        distance=distance,
        inputs_equal=takes_equal,
    )
