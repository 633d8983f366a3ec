"""Columns that no training writes: across layouts they give a verdict, never a crash."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.layouts.split_runs import Mesh, split_run
from tests.memory_run import MemoryRun
from upguard_plugin.compare.runs import compare_runs

MESHES = st.sampled_from([Mesh(), Mesh(tp=2), Mesh(dp=2), Mesh(tp=2, dp=2), Mesh(tp=4)])
KEYS = st.sampled_from(
    [
        {"dtype": "int8"}, {"shape": (3,)}, {"shape": ()}, {"placement": None},
        {"role": "sample", "slot": "x"}, {"slot": "0[999999999]"}, {"phase": "accumulate"},
        {"boundary": "(root)", "role": "output"}, {"phase": "clip", "role": "scalar"},
        {"role": "rng"}, {"phase": "optimizer", "role": "optimizer_state"}, {"role": "data"},
    ]
)  # fmt: skip
EDITS = st.one_of(
    st.tuples(st.just("microbatch"), st.sampled_from([-5, -1, 3, 2**31 - 1])),
    st.tuples(st.just("call"), st.sampled_from([-1, 5, 2**31 - 1])),
    st.tuples(st.just("key"), st.integers(0, 9)),
    st.tuples(st.just("value"), st.sampled_from([np.nan, np.inf, 1e308])),
    st.tuples(st.just("sketch"), st.sampled_from([np.nan, np.inf, 0.0])),
    st.tuples(st.just("keys"), KEYS),
    st.tuples(st.just("missing"), st.sampled_from(["sketch", "value"])),
)
PLACES = st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 30))


def edited(run: MemoryRun, edits: list) -> MemoryRun:
    for (rank, step, row), (what, how) in edits:
        made = run.batches.get(rank, {}).get(step)
        if made is None or row >= len(made):
            continue
        if what == "keys":
            keys = list(made.keys)
            keys[row] = replace(keys[row], **how)
            made = replace(made, keys=keys)
        elif what == "missing":
            made = replace(made, **{how: None})
        elif getattr(made, what) is not None:
            getattr(made, what)[row] = how
        run.batches[rank][step] = made
    return run


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MESHES, MESHES, st.lists(st.tuples(PLACES, EDITS), min_size=1, max_size=4), st.booleans())
def test_columns_that_make_no_sense_give_a_verdict(ours, theirs, edits, sketch):
    baseline = split_run(ours, sketch=sketch)
    target = edited(split_run(theirs, sketch=sketch, name="target"), edits)

    assert compare_runs(baseline, target).verdict in ("identical", "divergent", "incomparable")
