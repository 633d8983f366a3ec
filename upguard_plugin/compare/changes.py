"""A chain as the verdict tells it: which operators only one run has, and where that shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from upguard_plugin.compare.chain import Chain
from upguard_plugin.compare.evidence import Scene
from upguard_plugin.compare.keys import is_operator
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.references import event_ref
from upguard_plugin.compare.sides import Side
from upguard_plugin.records import EventKey
from upguard_plugin.verdict_parts import Change

MAX_OPERATORS = 20  # of each run that a verdict lists
_MAX_NAMED = 4  # of each run that a sentence names


def change_of(scene: Scene, rank: int) -> Change | None:
    """None where the first divergence is an event of both runs that nothing stands behind."""
    chain, pairing = scene.finding.chain, scene.pairing
    if chain is None or chain.how is None:
        return None
    rows = (chain.baseline, chain.target)
    sides = (pairing.baseline, pairing.target)
    baseline, target = (
        [event_ref(side.batch, row, rank) for row in listed[:MAX_OPERATORS]]
        for side, listed in zip(sides, rows, strict=True)
    )
    reached = event_ref(pairing.baseline.batch, chain.reached[0], rank)
    return Change(how=chain.how, baseline=baseline, target=target, reached=reached)


def sentence_of(scene: Scene, chain: Chain) -> str:
    """What the chain proves, in one sentence."""
    pairing = scene.pairing
    ours = _operators(pairing.baseline, chain.baseline)
    theirs = _operators(pairing.target, chain.target)
    reached = _event(pairing.baseline.batch.key_of(chain.reached[0]))
    if chain.how == "rewired" and ours == theirs:
        return (
            f"The {reached} is another part of what {ours} made than in the baseline; both runs "
            "have both parts."
        )
    if chain.how == "rewired":
        return f"The {reached} is made by {ours} in the baseline and by {theirs} in the target."
    if chain.how == "replaced":
        told = f"The target runs {theirs} where the baseline runs {ours}"
    elif ours and theirs:
        told = f"The target runs {theirs}, the baseline {ours}"
    elif chain.how == "reordered":
        told = f"The target runs {theirs or ours} {'earlier' if theirs else 'later'}"
    else:
        told = f"Only the {'target' if theirs else 'baseline'} runs {theirs or ours}"
    taken = "what it takes is equal" if chain.inputs_equal else "what both runs give it is equal"
    return f"{told}: {taken}, and it leads to the {reached}, the first value that differs."


def draws_otherwise(pairing: Pairing, chain: Chain) -> bool:
    """Whether the operators of a chain draw random numbers that those of the other run do not.

    An operator that draws has the state of its generator as an input.
    """
    states = [
        [state for row in rows for state in _states_drawn_from(side, row)]
        for side, rows in ((pairing.baseline, chain.baseline), (pairing.target, chain.target))
    ]
    return chain.how != "rewired" and states[0] != states[1]


def _states_drawn_from(side: Side, row: int) -> list[int]:
    """Fingerprints of the random states that the call of an operator found."""
    batch, mine = side.batch, side.batch.key_of(row)
    wanted = [
        number
        for number, key in enumerate(side.columns.keys)
        if (key.boundary, key.phase, key.role, key.operator)
        == (mine.boundary, mine.phase, "rng", mine.operator)
    ]
    drawn = np.isin(batch.key, wanted) & (batch.call == batch.call[row])
    found: list[int] = batch.h[drawn & (batch.microbatch == batch.microbatch[row])].tolist()
    return found


def writer_between(scene: Scene, before: Pairing) -> str:
    """The operator without a partner in the step before that made one of the values."""
    rows = scene.finding.baseline_row, scene.finding.target_row
    sides = (scene.pairing.baseline, before.baseline), (scene.pairing.target, before.target)
    alone = before.baseline_alone, before.target_alone
    for (now, earlier), row, lonely in zip(sides, rows, alone, strict=True):
        if row is None:
            continue
        same = lonely[(earlier.batch.h[lonely] == now.batch.h[row])]
        for made in same[::-1].tolist():
            key = earlier.batch.key_of(made)
            if is_operator(key) and key.role == "output":
                run = "baseline" if earlier is before.baseline else "target"
                at = "" if key.source is None else f" ({key.source.file}:{key.source.line})"
                return f"{key.operator} of {key.boundary}{at}, which only the {run} runs,"
    return "something"


def _operators(side: Side, rows: Sequence[int]) -> str:
    """Consecutive operators of one boundary, then the next: "aten.mm and aten.add of blocks.1"."""
    keys = [side.batch.key_of(row) for row in rows[:_MAX_NAMED]]
    boundaries = list(dict.fromkeys(key.boundary for key in keys))
    named = [
        f"{_and([str(key.operator) for key in keys if key.boundary == boundary])} of {boundary}"
        for boundary in boundaries
    ]
    more = len(rows) - _MAX_NAMED
    return _and([*named, f"{more} more"] if more > 0 else named)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _event(key: EventKey) -> str:
    operator = "" if key.operator is None else f" ({key.operator})"
    return f"{key.role} {key.slot} of {key.boundary}{operator}"
