"""Collectives that the runs launch in another order, or otherwise.

In:  the `Pairing` of a step, and which pairs are looked at.
Out: one answer per pair.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.pairing import Pairing

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def out_of_order(pairing: Pairing, chosen: Bools) -> Bools:
    """The first call of each group that the target launched later than one that followed it.

    Calls of several groups have no order against each other, unless one of them then gives other
    values. When a collective completes is a matter of time, not of the program.
    """
    columns, key = pairing.baseline.columns, pairing.baseline.key[pairing.baseline_rows]
    late = np.zeros(len(key), dtype=np.bool_)
    pairs = np.flatnonzero(columns.is_launch[key] & chosen)
    if bool((np.diff(pairing.target_rows[pairs]) > 0).all()):
        return late
    by_group: dict[tuple[int, ...], list[int]] = {}
    for pair in pairs.tolist():
        group = columns.keys[int(key[pair])].group
        by_group.setdefault(() if group is None else group.ranks, []).append(pair)
    for members in by_group.values():
        rows = pairing.target_rows[members]
        smallest_behind = np.minimum.accumulate(rows[::-1])[::-1]
        overtaken = np.flatnonzero(rows[:-1] > smallest_behind[1:])
        late[[members[place] for place in overtaken[:1]]] = True
    late[_overtaken_with_effect(pairing, pairs)] = True
    return late


def _overtaken_with_effect(pairing: Pairing, launched: Ints) -> list[int]:
    """The first launch that one of another group overtook, if either has other values then."""
    batch, key = pairing.baseline.batch, pairing.baseline.key[pairing.baseline_rows]
    keys = pairing.baseline.columns.keys

    def call_of(pair: int) -> tuple[str, int, int]:
        row = int(pairing.baseline_rows[pair])
        return keys[int(key[pair])].boundary, int(batch.microbatch[row]), int(batch.call[row])

    collective = pairing.baseline.columns.is_collective[key]
    parted = {call_of(pair) for pair in np.flatnonzero(pairing.differs & collective).tolist()}
    rows = pairing.target_rows[launched]
    for place, pair in enumerate(launched.tolist()):
        overtaking = launched[place + 1 :][rows[place + 1 :] < rows[place]].tolist()
        if overtaking and not parted.isdisjoint(map(call_of, [pair, *overtaking])):
            return [pair]
    return []


def of_other_form(pairing: Pairing, chosen: Bools) -> Bools:
    """Collectives with another dtype on the wire, shape, reduce op, operator or group."""
    key_b = pairing.baseline.key[pairing.baseline_rows]
    key_t = pairing.target.key[pairing.target_rows]
    columns = pairing.baseline.columns
    other = columns.identity[key_b] != pairing.target.columns.identity[key_t]
    found: Bools = columns.is_collective[key_b] & chosen & (other | pairing.form_differs)
    return found
