"""What the events around a divergence tell: the evidence from which its cause is decided.

In:  a `Scene`, which is a finding with the steps around it.
Out: answers to single questions; None where nothing was recorded that could tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.chain import operands_agree
from upguard_plugin.compare.findings import Finding
from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER, is_collective, is_operator
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.sides import Side
from upguard_plugin.compare.steps import RankSteps
from upguard_plugin.records import EventKey

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a finding was made."""

    steps: RankSteps
    step: int
    pairing: Pairing
    finding: Finding
    world_size: int
    same_program: bool
    across_layouts: bool = False  # events are those of logical tensors

    @property
    def key(self) -> EventKey:
        return self.finding.key(self.pairing)


def pairs_of(
    pairing: Pairing,
    boundary: str | None,
    phases: tuple[str, ...],
    role: str | None,
    moment: str | None = None,
) -> Ints:
    """Pairs by what their keys say; None matches everything."""
    wanted = [
        number
        for number, key in enumerate(pairing.baseline.columns.keys)
        if boundary in (None, key.boundary)
        and key.phase in phases
        and role in (None, key.role)
        and moment in (None, key.moment)
    ]
    return np.flatnonzero(np.isin(pairing.baseline.batch.key[pairing.baseline_rows], wanted))


def inputs_equal_of(scene: Scene) -> bool | None:
    """Whether what the origin was computed from is equal.

    None where it was not recorded, or differs by rounding.
    """
    key, pairing, row = scene.key, scene.pairing, scene.finding.baseline_row
    if scene.finding.chain is not None:
        return scene.finding.chain.inputs_equal
    if row is None:
        return None
    if key.role == "output":
        inputs = pairing.of_call(row, "input")
    elif key.role == "grad_input":
        inputs = pairing.of_call(row, "grad_output")
    elif key.role in ("grad", "main_grad") and key.phase == "accumulate":
        owner = key.boundary.rpartition(".")[0]
        inputs = pairs_of(pairing, owner, ("backward",), "grad_output")
        inputs = inputs[
            pairing.baseline.batch.microbatch[pairing.baseline_rows[inputs]]
            == pairing.baseline.batch.microbatch[row]
        ]
    elif key.phase in ("grad_sync", "clip", "optimizer") and key.role != "scalar":
        earlier: tuple[str, ...] = ("accumulate", "grad_sync", "clip")
        if key.phase == "grad_sync":
            earlier = ("accumulate",)
        inputs = pairs_of(pairing, key.boundary, earlier, None)
    else:
        return None
    if not len(inputs) or pairing.rounds[inputs].any():
        return None
    if pairing.differs[inputs].any():
        return False
    # Of operators that ran in another order, single inputs may have partners in other calls.
    theirs = scene.finding.target_row
    is_call = key.role == "output" and is_operator(key) and theirs is not None
    return True if not is_call or operands_agree(pairing, row, int(theirs or 0)) else None


def equal_producer(scene: Scene) -> int | None:
    """The pair of the event that wrote the baseline's input last, if it is equal in both runs."""
    key, pairing, row = scene.key, scene.pairing, scene.finding.baseline_row
    producers = pairing.baseline.batch.producer
    if key.role != "input" or row is None or producers is None or producers[row] < 0:
        return None
    seq = pairing.baseline.batch.seq
    written = int(np.searchsorted(seq, producers[row]))
    if written >= len(seq) or seq[written] != producers[row]:
        return None
    pair = np.flatnonzero(pairing.baseline_rows == written)
    return int(pair[0]) if len(pair) and not pairing.differs[pair[0]] else None


def overwritten_producer(scene: Scene) -> int | None:
    """The baseline row of the event that wrote an input last, if both runs have it, equal.

    In both: an input that something else wrote in the target was not overwritten unseen.
    """
    pair, pairing, row = equal_producer(scene), scene.pairing, scene.finding.target_row
    if pair is None or row is None:
        return None
    theirs, made = pairing.target.batch, pairing.target_rows[pair]
    same = theirs.producer is None or theirs.producer[row] == theirs.seq[made]
    return int(pairing.baseline_rows[pair]) if same else None


def draws_of(scene: Scene) -> Literal["equal", "other", "one side", "none", "unknown"]:
    """Which random numbers the call of the origin drew, by the states it found.

    A call that draws is recorded with the state of its generator. "unknown" where the step has no
    such record of any module or operator.
    """
    key, pairing, row = scene.key, scene.pairing, scene.finding.baseline_row
    if row is None or not any(_has_draws(side) for side in (pairing.baseline, pairing.target)):
        return "unknown"
    if key.role != "output":
        return "unknown"
    drawn = pairing.of_call(row, "rng")
    if len(drawn):
        return "other" if pairing.differs[drawn].any() else "equal"
    alone = (
        side.batch.key_of(lonely)
        for side, rows in (
            (pairing.baseline, pairing.baseline_alone),
            (pairing.target, pairing.target_alone),
        )
        for lonely in rows.tolist()
    )
    mine = (key.boundary, key.phase, "rng")
    return "one side" if any((k.boundary, k.phase, k.role) == mine for k in alone) else "none"


def _has_draws(side: Side) -> bool:
    states = (side.columns.role == ROLE_NUMBER["rng"]) & ~_is_generator(side)
    return bool(np.isin(side.batch.key, np.flatnonzero(states)).any())


def _is_generator(side: Side) -> npt.NDArray[np.bool_]:
    """Which keys are a generator's own state, not what a call found."""
    return np.array([key.boundary.startswith("rng.") for key in side.columns.keys], dtype=np.bool_)


def rng_parted(scene: Scene) -> bool | None:
    """Whether the generators' states, equal at the start of the step, differ at its end.

    None where their states at the end were not recorded, nor those at the next start.
    """
    ended = _ended(scene)
    if ended is None:
        return None
    pairing, pairs = ended
    return bool(pairing.differs[pairs].any())


def baseline_draws(scene: Scene) -> bool:
    """Whether the baseline itself draws random numbers in the step."""
    ended = _ended(scene)
    if ended is None:
        return False
    began = _states(scene.pairing, _generators(scene.pairing, at_start=True))
    return any(began.get(name) not in (None, state) for name, state in _states(*ended).items())


def _ended(scene: Scene) -> tuple[Pairing, Ints] | None:
    """The states of all generators when the step ended, or when the next began."""
    pairs = _generators(scene.pairing, at_start=False)
    if len(pairs):
        return scene.pairing, pairs
    after = scene.steps.pairing(scene.step + 1)
    if after is None:
        return None
    pairs = _generators(after, at_start=True)
    return (after, pairs) if len(pairs) else None


def _generators(pairing: Pairing, *, at_start: bool) -> Ints:
    side = pairing.baseline
    wanted = (side.columns.role == ROLE_NUMBER["rng"]) & _is_generator(side)
    wanted &= (side.columns.phase == PHASE_NUMBER["start"]) == at_start
    return np.flatnonzero(wanted[side.key[pairing.baseline_rows]])


def _states(pairing: Pairing, pairs: Ints) -> dict[str, int]:
    """State of each generator in the baseline."""
    batch = pairing.baseline.batch
    rows = pairing.baseline_rows[pairs].tolist()
    return {batch.key_of(row).boundary: int(batch.h[row]) for row in rows}


def is_stale(scene: Scene, before: Pairing) -> bool:
    """Whether a weight in use is the one of the step before, or arrives by a collective."""
    columns = before.baseline.columns
    key = before.baseline.key
    gathered = columns.is_collective[key] & (columns.phase[key] == PHASE_NUMBER["param_sync"])
    if gathered.any():
        return True
    if scene.finding.target_row is None or scene.finding.baseline_row is None:
        return False
    old = pairs_of(before, scene.key.boundary, ("start", "forward"), "param")
    now = int(scene.pairing.target.batch.h[scene.finding.target_row])
    if any(int(before.target.batch.h[before.target_rows[pair]]) == now for pair in old):
        return True
    return _has_not_arrived(scene)


def _has_not_arrived(scene: Scene) -> bool:
    """Whether only the baseline's weight changed between the start of the step and its use."""
    pairing, finding = scene.pairing, scene.finding
    assert finding.baseline_row is not None and finding.target_row is not None
    began = pairs_of(pairing, scene.key.boundary, ("start",), "param")
    changed = ~_same_bits(pairing.baseline, pairing.baseline_rows[began], finding.baseline_row)
    waits = _same_bits(pairing.target, pairing.target_rows[began], finding.target_row)
    return bool((changed & waits).any())


def has_local_gradients(pairing: Pairing) -> bool:
    columns, key = pairing.baseline.columns, pairing.baseline.key
    return bool((columns.phase[key] == PHASE_NUMBER["accumulate"]).any())


def is_result_dropped(scene: Scene) -> bool:
    """Whether the target gives on what it was given, and a collective's result is used by nobody.

    The baseline changes it: between the input and the output of the call a collective ran, with
    equal results in both runs.
    """
    finding, pairing = scene.finding, scene.pairing
    entered = {"output": "input", "grad_input": "grad_output"}.get(scene.key.role)
    if finding.what != "value" or finding.baseline_row is None or entered is None:
        return False
    assert finding.target_row is not None
    inputs = pairing.of_call(finding.baseline_row, entered)
    if not len(inputs) or pairing.differs[inputs].any():
        return False
    rows_b, rows_t = pairing.baseline_rows, pairing.target_rows
    unchanged_b = _same_bits(pairing.baseline, rows_b[inputs], finding.baseline_row).any()
    unchanged_t = _same_bits(pairing.target, rows_t[inputs], finding.target_row).any()
    if unchanged_b or not unchanged_t:
        return False
    columns, key = pairing.baseline.columns, pairing.baseline.key[rows_b]
    between = (rows_b > rows_b[inputs].min()) & (rows_b < finding.baseline_row)
    results = columns.is_collective[key] & (columns.role[key] == ROLE_NUMBER["output"]) & between
    return bool(results.any()) and not pairing.differs[results].any()


def is_idle(side: Side, row: int) -> bool:
    """Whether a collective gave this rank what it had already: a maximum that was its own."""
    key, batch = side.batch.key_of(row), side.batch
    if not is_collective(key) or batch.group_seq is None or batch.group_seq[row] < 0:
        return False
    same = np.flatnonzero(batch.group_seq == batch.group_seq[row])
    by_slot = {
        (found.role, found.slot): other
        for other in same.tolist()
        if (found := batch.key_of(other)).boundary == key.boundary and found.group == key.group
    }
    given = [(slot, other) for (role, slot), other in by_slot.items() if role == "output"]
    return bool(given) and all(
        ("input", slot) in by_slot
        and _same_bits(side, np.array([by_slot["input", slot]]), other).all()
        for slot, other in given
    )


def _same_bits(side: Side, rows: Ints, row: int) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = side.batch.h[rows] == side.batch.h[row]
    same &= side.batch.s[rows] == side.batch.s[row]
    return same


def lacking(scene: Scene) -> str | None:
    """Half a sentence that says which run has no such event; None where both have it."""
    if scene.finding.what != "alone":
        return None
    return f"is missing in the {'target' if scene.finding.target_row is None else 'baseline'}"
