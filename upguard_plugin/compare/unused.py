"""What differs without any bearing on the training: no divergence, but noted.

In:  the pairs of a step that differ, and what has no partner.
Out: those among them that nothing in the training uses, by the evidence of the trace.

Four kinds. A random generator that nobody draws from, such as Python's in a run that seeds torch
only: it begins and ends every step in the same state. A scalar that the user handed over to be
recorded: nothing behind it differs. An argument or a result that is None in one run, and that the
other does not have at all: a bias that a layer can give beside its output, say. An equal argument
or result of a module whose class is another one, passed in another way: by keyword, say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER, is_operator
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.sides import Side

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_OF_CALLS = ("input", "output")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer or an expert

States = tuple[int, int]  # fingerprints of a generator's state in the baseline and the target


@dataclass(frozen=True, slots=True)
class Aside:
    """One thing to be noted, as the parts of a sentence: when and where is said in between."""

    word: str
    what: str
    why: str

    def told(self, when: str) -> str:
        return f"{self.word}: {self.what} {when}, and {self.why}"


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


def asides_of(pairing: Pairing, pairs: Bools) -> tuple[Aside, ...]:
    """The boundaries of these pairs, which are generators and scalars, each once."""
    key = pairing.baseline.key[pairing.baseline_rows][pairs].tolist()
    names = dict.fromkeys(pairing.baseline.columns.keys[k].boundary for k in key)
    return tuple(
        Aside(
            "not used",
            f"{name} differs",
            "nobody draws from it" if name.startswith("rng.") else "nothing behind it does",
        )
        for name in names
    )


def without_data(side: Side, rows: Ints) -> Bools:
    """Which of these rows are arguments and results that are None."""
    if not len(rows):
        return np.zeros(0, dtype=np.bool_)
    keys = side.columns.keys
    of_keys = np.array([key.dtype == "none" and key.role in _OF_CALLS for key in keys], np.bool_)
    found: Bools = of_keys[side.key[rows]]
    return found


def asides_without_data(pairing: Pairing) -> tuple[Aside, ...]:
    """What is None in one run and not there in the other, layers and experts in one."""
    sides = (
        ("baseline", "target", pairing.baseline, pairing.baseline_alone),
        ("target", "baseline", pairing.target, pairing.target_alone),
    )
    found: dict[Aside, None] = {}
    for name, other, side, rows in sides:
        numbers = dict.fromkeys(side.key[rows[without_data(side, rows)]].tolist())
        for key in (side.columns.keys[number] for number in numbers):
            what = f"{_NUMBER.sub('*', key.boundary)} {key.role} {key.slot} is None in the {name}"
            found.setdefault(Aside("no data", what, f"the {other} has no such {key.role}"))
    return tuple(found)


def passed_otherwise(pairing: Pairing, slots: Bools) -> Bools:
    """Which of these pairs, in other slots, belong to modules of another class."""
    found = np.zeros(len(slots), dtype=np.bool_)
    for pair in np.flatnonzero(slots).tolist():
        classes = _classes(pairing, pair)
        found[pair] = None not in classes and classes[0] != classes[1]
    return found


def asides_of_classes(pairing: Pairing, pairs: Bools) -> tuple[Aside, ...]:
    """The modules that these pairs belong to, layers and experts in one."""
    found: dict[Aside, None] = {}
    for pair in np.flatnonzero(pairs).tolist():
        name = _NUMBER.sub("*", pairing.baseline_key(pair).boundary)
        ours, theirs = _classes(pairing, pair)
        what = f"{name} is a {ours} in the baseline and a {theirs} in the target"
        found.setdefault(Aside("other class", what, "equal tensors are passed in another way"))
    return tuple(found)


def _classes(pairing: Pairing, pair: int) -> tuple[str | None, str | None]:
    ours, theirs = pairing.baseline_key(pair), pairing.target_key(pair)
    if is_operator(ours) or is_operator(theirs):
        return None, None
    return ours.operator, theirs.operator
