"""Any edit of an event stream: no crash, and `identical` only where nothing that counts differs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.memory_run import Event, MemoryRun, batch
from tests.toy_training import Toy, train
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.records import PHASES, ROLES

WORDS = {
    "phase": PHASES,
    "role": ROLES,
    "boundary": ("head", "head.weight", "rng.torch_cpu", "(root)", ""),
    "slot": ("0", "args.0"),
    "dtype": ("float32", "bfloat16", "none"),
    "shape": ((), (4, 8), (0,)),
    "operator": (None, "Dropout", "aten.mul", "c10d.allreduce_"),
    "moment": (None, "launch", "completion"),
    "op": (None, "all_reduce sum"),
}


def recorded() -> list[Event]:
    toy = Toy(num_blocks=1, num_microbatches=2)
    toy.grads = {}
    toy.start()
    for mb in range(2):
        toy.backward(toy.forward(mb), mb)
    toy.optimize()
    return toy.events


EVENTS = recorded()
ROWS = st.integers(0, len(EVENTS) - 1)
EDITS = st.one_of(
    st.tuples(st.just("delete"), ROWS),
    st.tuples(st.just("repeat"), ROWS),
    st.tuples(st.just("swap"), ROWS, ROWS),
    st.tuples(st.just("value"), ROWS, st.integers(0, 3)),
    st.tuples(st.just("call"), ROWS, st.integers(0, 2)),
    st.tuples(st.just("microbatch"), ROWS, st.integers(-1, 2)),
    *(st.tuples(st.just(name), ROWS, st.sampled_from(words)) for name, words in WORDS.items()),
)


def edited(edits) -> list[Event]:
    listed = list(EVENTS)
    for what, row, *more in edits:
        row %= len(listed)
        event = listed[row]
        if what == "delete":
            del listed[row]
        elif what == "repeat":
            listed.insert(row, event)
        elif what == "swap":
            other = more[0] % len(listed)
            listed[row], listed[other] = listed[other], event
        elif what in WORDS:
            listed[row] = replace(event, key=replace(event.key, **{what: more[0]}))
        else:
            listed[row] = replace(event, **{what: more[0]})
    return listed


def facts(listed) -> list:
    """What a step digest covers, in any order."""
    keys = [(e.key, e.call, e.value) for e in listed]
    return sorted(
        repr((k.boundary, k.role, k.slot, k.moment, k.dtype, k.shape, call, value))
        for k, call, value in keys
    )


@settings(max_examples=60, deadline=None)
@example([("role", 0, "sample")])
@given(st.lists(EDITS, min_size=1, max_size=4))
def test_an_edit_never_crashes_and_is_never_overlooked(edits):
    listed = edited(edits)
    baseline = MemoryRun({0: [batch(0, EVENTS)]}, "baseline")
    target = MemoryRun({0: [batch(0, listed)]}, "target")

    for verdict in (compare_runs(baseline, target), compare_runs(target, baseline)):
        assert (verdict.first_divergence is None) == (verdict.verdict != "divergent")
        if verdict.verdict == "identical" and not any("not used" in n for n in verdict.notes):
            assert facts(listed) == facts(EVENTS)


def test_no_edit_is_identical():
    assert compare_runs(train(num_steps=1), train(num_steps=1)).verdict == "identical"
