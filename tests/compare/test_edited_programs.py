"""Random programs of operators, in which one was inserted, left out, exchanged or fed otherwise.

What an operator makes is a function of its name, of numbers that no trace shows, and of what it
takes, so everything behind the edit differs, and the answer is known: the operator that was edited,
whatever its neighbours are called.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from tests.memory_run import Event, MemoryRun, batch
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import NONE

NAMES = ("aten.mul", "aten.add", "aten.gelu", "aten.mm")
BOUNDARIES = ("fc1", "fc2", "layer")
NUM_CALLS = 24
ADDED = 99  # its number in the edited program


@dataclass(frozen=True)
class Call:
    """One operator: what it is, and the calls whose results it takes; -1 and -2 are the batch."""

    name: str
    boundary: str
    takes: tuple[int, ...]
    number: int  # its name among the calls of the program it belongs to


def program_of(rng: random.Random) -> list[Call]:
    calls: list[Call] = []
    for number in range(NUM_CALLS):
        # The last result is always taken: nothing that differs can be lost.
        others = range(max(-2, number - 6), number)
        takes = (number - 1, *rng.sample(others, rng.randrange(2)))
        boundary = BOUNDARIES[number * len(BOUNDARIES) // NUM_CALLS]
        calls.append(Call(rng.choice(NAMES), boundary, takes, number))
    return [*calls, Call("aten.mean", "(root)", (NUM_CALLS - 1,), NUM_CALLS)]


def events_of(calls: list[Call]) -> list[Event]:
    """The step as it would be recorded. `writer` is the row of the result that is read."""
    listed: list[Event] = []
    results: dict[int, tuple[str, int]] = {-1: ("x", NONE), -2: ("y", NONE)}
    counted: Counter[tuple[str, str]] = Counter()

    def put(role: str, slot: str, value: str, call: Call, writer: int = NONE) -> None:
        key = EventKey(call.boundary, "forward", role, slot, "float32", (4, 8), operator=call.name)
        times = counted[call.boundary, call.name]
        listed.append(Event(key, 0, times, value, writer=writer))

    for call in calls:
        for place, taken in enumerate(call.takes):
            put("input", f"args.{place}", results[taken][0], call, results[taken][1])
        given = ",".join(results[taken][0] for taken in call.takes)
        value = given if call.name == "aten.clone" else f"{call.name}{call.number}({given})"
        put("output", "out", str(hash_of_text(value)), call)
        results[call.number] = (str(hash_of_text(value)), len(listed) - 1)
        counted[call.boundary, call.name] += 1
    return listed


def hash_of_text(text: str) -> str:
    return text if len(text) < 40 else f"#{random.Random(text).getrandbits(60):x}"


def fed(call: Call, old: int, new: int) -> Call:
    return replace(call, takes=tuple(new if taken == old else taken for taken in call.takes))


def edited(rng: random.Random, calls: list[Call], how: str) -> tuple[list[Call], Call]:
    """The edited program, and the call of either program that is the answer."""
    place = rng.randrange(2, NUM_CALLS)
    chosen = calls[place]
    before, behind = calls[:place], calls[place + 1 :]
    if how == "extra":
        added = Call(rng.choice(NAMES), chosen.boundary, (place,), ADDED)
        return [*before, chosen, added, *(fed(call, place, ADDED) for call in behind)], added
    if how == "missing":
        return [*before, *(fed(call, place, chosen.takes[0]) for call in behind)], chosen
    if how == "replaced":
        name = rng.choice([name for name in (*NAMES, "aten.silu") if name != chosen.name])
        return [*before, replace(chosen, name=name), *behind], chosen
    others = [taken for taken in range(-1, place) if taken not in chosen.takes]
    return [*before, fed(chosen, chosen.takes[0], rng.choice(others)), *behind], chosen


def compared(baseline: list[Call], target: list[Call]):
    runs = [
        MemoryRun({0: [batch(0, events_of(calls))]}, name)
        for calls, name in ((baseline, "baseline"), (target, "target"))
    ]
    return compare_runs(*runs)


def result_of(calls: list[Call], number: int) -> str:
    """The fingerprint of a call's result."""
    made = batch(0, events_of(calls))
    outputs = [row for row in range(len(made)) if made.key_of(row).role == "output"]
    place = next(i for i, call in enumerate(calls) if call.number == number)
    return f"{int(made.h[outputs[place]]):016x}"


@pytest.mark.parametrize("how", ["extra", "missing", "replaced", "rewired"])
@pytest.mark.parametrize("seed", range(15))
def test_the_edited_operator_is_the_answer(how, seed):
    rng = random.Random(f"{how} {seed}")
    calls = program_of(rng)
    target, answer = edited(rng, calls, how)

    first = compared(calls, target).first_divergence

    assert (first.boundary, first.operator) == (answer.boundary, answer.name), first.explanation
    told = first.target if how == "extra" else first.baseline
    if first.role == "output":
        assert told.fingerprint == result_of(target if how == "extra" else calls, answer.number)
    assert first.inputs_equal is not False


def graph_of(rng: random.Random) -> list[Call]:
    """Operators of which many could run in another order; all results are added up in the end."""
    calls: list[Call] = []
    for number in range(NUM_CALLS):
        others = range(max(-2, number - 8), number)
        takes = tuple(rng.sample(others, min(len(others), rng.randrange(1, 3))))
        boundary = BOUNDARIES[number * len(BOUNDARIES) // NUM_CALLS]
        calls.append(Call(rng.choice(NAMES), boundary, takes, number))
    taken = {number for call in calls for number in call.takes}
    ends = [number for number in range(NUM_CALLS) if number not in taken]
    for number, end in enumerate(ends, NUM_CALLS):
        takes = (end,) if number == NUM_CALLS else (number - 1, end)
        calls.append(Call("aten.sum", "(root)", takes, number))
    return calls


def shuffled(rng: random.Random, calls: list[Call], times: int) -> list[Call]:
    """The same values, with neighbours exchanged and copies made."""
    for number in range(100, 100 + times):
        place = rng.randrange(1, len(calls) - 1)
        one, other = calls[place : place + 2]
        if rng.random() < 0.3:
            copy = Call("aten.clone", one.boundary, (one.number,), number)
            behind = [fed(call, one.number, number) for call in calls[place + 1 :]]
            calls = [*calls[: place + 1], copy, *behind]
        elif one.number not in other.takes:
            calls = [*calls[:place], other, one, *calls[place + 2 :]]
    return calls


@pytest.mark.parametrize("seed", range(30))
def test_operators_that_changed_places_are_no_difference(seed):
    rng = random.Random(f"places {seed}")
    calls = graph_of(rng)

    verdict = compared(calls, shuffled(rng, calls, 4))

    assert verdict.coverage.differ == 0
    assert verdict.first_divergence is None or verdict.first_divergence.kind == "structure"


@pytest.mark.parametrize("how", ["extra", "missing", "replaced", "rewired"])
@pytest.mark.parametrize("seed", range(10))
def test_the_edited_operator_is_the_answer_among_those_that_changed_places(how, seed):
    rng = random.Random(f"{how} among others {seed}")
    calls = graph_of(rng)
    target, answer = edited(rng, calls, how)

    first = compared(calls, shuffled(rng, target, 3)).first_divergence

    assert (first.boundary, first.operator) == (answer.boundary, answer.name), first.explanation


@pytest.mark.parametrize("seed", range(10))
def test_copies_are_never_the_answer(seed):
    rng = random.Random(f"copies {seed}")
    calls = program_of(rng)
    place = rng.randrange(2, NUM_CALLS)
    copy = Call("aten.clone", calls[place].boundary, (place,), ADDED)
    behind = [fed(call, place, ADDED) for call in calls[place + 1 :]]
    target = [*calls[: place + 1], copy, *behind]

    verdict = compared(calls, target)

    assert verdict.first_divergence.kind == "structure"
    assert verdict.first_divergence.change is None
    assert verdict.coverage.differ == 0
