"""Values that differ without any bearing on the training: no divergence, but noted.

In:  the pairs of a step that differ.
Out: those among them that nothing in the training uses, by the evidence of the trace.

Two kinds. A random generator that nobody draws from, such as Python's in a run that seeds torch
only: it begins and ends every step in the same state. A scalar that the user handed over to be
recorded: nothing behind it differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER
from upguard_plugin.compare.pairing import Pairing

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

States = tuple[int, int]  # fingerprints of a generator's state in the baseline and the target


@dataclass(slots=True)
class Memory:
    """What earlier steps of a rank showed to be harmless."""

    is_first: bool = True  # no step was compared yet
    forms: set[int] = field(default_factory=set)  # identities of another form without effect
    generators: dict[str, States] = field(default_factory=dict)  # unused ones: as a step left them


def unused_generators(pairing: Pairing, values: Bools, memory: Memory) -> Bools:
    """Which pairs are states of generators that differ and that nobody has drawn from.

    A state that was not recorded when the step ended says nothing: it counts as used.
    """
    columns, key = pairing.baseline.columns, pairing.baseline.key[pairing.baseline_rows]
    states = (columns.role[key] == ROLE_NUMBER["rng"]) & ~columns.is_operator[key]
    at_start = columns.phase[key] == PHASE_NUMBER["start"]
    ends: dict[str, list[int]] = {}
    for pair in np.flatnonzero(states & ~at_start).tolist():
        ends.setdefault(columns.keys[int(key[pair])].boundary, []).append(pair)
    unused = np.zeros(len(key), dtype=np.bool_)
    left: dict[str, States] = {}
    for pair in np.flatnonzero(states & at_start & values).tolist():
        name = columns.keys[int(key[pair])].boundary
        found = _states(pairing, pair)
        kept = {_states(pairing, end) for end in ends.get(name, [])} == {found}
        if kept and (memory.is_first or memory.generators.get(name) == found):
            unused[[pair, *ends[name]]] = True
            left[name] = found
    memory.generators = left
    return unused


def _states(pairing: Pairing, pair: int) -> States:
    return (
        int(pairing.baseline.batch.h[pairing.baseline_rows[pair]]),
        int(pairing.target.batch.h[pairing.target_rows[pair]]),
    )


def unused_scalars(pairing: Pairing, values: Bools, places: Ints) -> Bools:
    """Which pairs are recorded scalars that differ with nothing behind them that does."""
    columns, key = pairing.baseline.columns, pairing.baseline.key[pairing.baseline_rows]
    logged = columns.is_logged[key]
    others = values & ~logged
    last = int(places[others].max()) if others.any() else -1
    unused: Bools = values & logged & (places > last)
    return unused


def names_of(pairing: Pairing, pairs: Bools) -> tuple[str, ...]:
    """The boundaries of these pairs, each once."""
    key = pairing.baseline.key[pairing.baseline_rows][pairs].tolist()
    return tuple(dict.fromkeys(pairing.baseline.columns.keys[k].boundary for k in key))
