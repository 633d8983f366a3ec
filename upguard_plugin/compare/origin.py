"""From the first event that differs to the boundary that made it differ.

In:  the first finding of a step.
Out: the finding that names the origin.

In forward the first is the origin already: a child gives its output before its parent does. In
backward one gradient is seen at several boundaries at once: as `grad_input` of the module that
computed it, of the modules around that one, and as `grad_output` of the module in front. Which hook
runs first says nothing; the origin is the innermost module whose own `grad_output` is equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.findings import Finding, pair_places
from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER
from upguard_plugin.compare.pairing import Pairing

ROOT = "(root)"  # how capture names a model that is the only one

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def origin_of(finding: Finding, pairing: Pairing, chosen: Bools) -> Finding:
    """The finding at the boundary, among the chosen pairs, where the wrong value was made."""
    key = finding.key(pairing)
    if finding.what != "value" or finding.baseline_row is None or finding.chain is not None:
        return finding
    if key.role == "rng" and key.phase != "start":
        return _drawn(finding, pairing, chosen)
    if key.phase == "accumulate" and key.role in ("grad", "main_grad"):
        finding = _gradient_at_owner(finding, pairing, chosen)
        key = finding.key(pairing)
    if key.phase == "backward" and key.role in ("grad_input", "grad_output"):
        return _innermost(finding, pairing, chosen)
    return finding


def _drawn(finding: Finding, pairing: Pairing, chosen: Bools) -> Finding:
    """What a call gave that drew from another random state; the state where that is not seen."""
    row = finding.baseline_row
    assert row is not None
    outputs = pairing.of_call(row, "output")
    outputs = outputs[pairing.differs[outputs] & chosen[outputs]]
    return _finding(pairing, int(outputs[0])) if len(outputs) else finding


def _gradient_at_owner(finding: Finding, pairing: Pairing, chosen: Bools) -> Finding:
    """The unequal gradient that reached the module of a parameter, where there is one."""
    row = finding.baseline_row
    assert row is not None
    owner = finding.key(pairing).boundary.rpartition(".")[0]
    batch, columns = pairing.baseline.batch, pairing.baseline.columns
    wanted = [
        number
        for number, key in enumerate(columns.keys)
        if (key.boundary, key.phase, key.role) == (owner, "backward", "grad_output")
    ]
    rows = pairing.baseline_rows
    pairs = np.flatnonzero(
        (pairing.differs & chosen)
        & np.isin(batch.key[rows], wanted)
        & (batch.microbatch[rows] == batch.microbatch[row])
    )
    return _finding(pairing, int(pairs[0])) if len(pairs) else finding


def _innermost(finding: Finding, pairing: Pairing, chosen: Bools) -> Finding:
    seen = [pair for pair in _same_gradient(finding, pairing) if chosen[pair]]
    made = [pair for pair in seen if _arrived_equal(pairing, pair)]
    names = {pair: pairing.baseline_key(pair).boundary for pair in made}
    inner = [
        pair
        for pair in made
        if not any(_is_inside(names[other], names[pair]) for other in made if other != pair)
    ]
    return _finding(pairing, inner[0]) if inner else finding


def _same_gradient(finding: Finding, pairing: Pairing) -> list[int]:
    """Pairs in which both runs saw the gradient of `finding` as some module's `grad_input`."""
    side_b, side_t = pairing.baseline, pairing.target
    rows_b, rows_t = pairing.baseline_rows, pairing.target_rows
    row_b, row_t = finding.baseline_row, finding.target_row
    assert row_b is not None and row_t is not None
    key = side_b.key[rows_b]
    same = (
        (side_b.columns.phase[key] == PHASE_NUMBER["backward"])
        & (side_b.columns.role[key] == ROLE_NUMBER["grad_input"])
        & (side_b.batch.microbatch[rows_b] == side_b.batch.microbatch[row_b])
    )
    for side, rows, row in ((side_b, rows_b, row_b), (side_t, rows_t, row_t)):
        same &= side.batch.h[rows] == side.batch.h[row]
        same &= side.batch.s[rows] == side.batch.s[row]
    return [int(pair) for pair in np.flatnonzero(same)]


def _arrived_equal(pairing: Pairing, pair: int) -> bool:
    """Whether the gradients of the outputs of that call were seen and are equal."""
    arrived = pairing.of_call(int(pairing.baseline_rows[pair]), "grad_output")
    return len(arrived) > 0 and not pairing.differs[arrived].any()


def _is_inside(boundary: str, outer: str) -> bool:
    return boundary != outer and (outer == ROOT or boundary.startswith(f"{outer}."))


def _finding(pairing: Pairing, pair: int) -> Finding:
    return Finding(
        int(pair_places(pairing)[pair]),
        int(pairing.baseline_rows[pair]),
        int(pairing.target_rows[pair]),
        "value",
    )
