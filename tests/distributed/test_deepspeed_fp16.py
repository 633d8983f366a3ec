"""fp16 with a dynamic loss scale, overflow and skipped steps, on two CPU ranks.

DeepSpeed asks its accelerator whether the device can do fp16, and refuses it on most CPUs. torch's
kernels are there, so here the accelerator says yes; all the rest is DeepSpeed's own.
"""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
from deepspeed_faults import loss_is_not_scaled
from deepspeed_runs import answer, broken, last_events, merged, verdict
from deepspeed_training import Training, allow_fp16, block, train
from memory_trace import hash_of

from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

SCALING = {"initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
EVERYDAY = ((0, 1), (1, 2), (3, 1))
# Stage 0 of this DeepSpeed does not scale the loss, so that nothing overflows.
MARKS = {0: [None] * 5, 1: ["skipped"] * 3 + [None] * 2}
SCALES = {
    0: [2.0**18, 2.0**18, 2.0**19, 2.0**19, 2.0**20],
    1: [2.0**n for n in (17, 16, 15, 15, 15)],
}


@pytest.fixture
def fp16_ranks(deepspeed_ranks):
    deepspeed_ranks.run(allow_fp16, True)
    yield deepspeed_ranks
    if deepspeed_ranks.usable:
        deepspeed_ranks.run(allow_fp16, False)


def values(run, boundary, phase):
    """A scalar of every step, on rank 0."""
    trace, found = open_trace(run), []
    for step in trace.steps(0):
        batch = trace.read(0, step.step)
        keys = [batch.key_of(row) for row in range(len(batch))]
        rows = [r for r, k in enumerate(keys) if (k.boundary, k.phase) == (boundary, phase)]
        found += [float(batch.value[row]) for row in rows]
    return found


@pytest.mark.parametrize(
    "stage, accumulation",
    [
        pytest.param(*one, marks=[] if one in EVERYDAY else pytest.mark.long)
        for one in product((0, 1, 2, 3), (1, 2))
    ],
)
def test_skipped_steps_are_marked_and_twins_are_identical(
    fp16_ranks, tmp_path, stage, accumulation
):
    def run(upguard=None):
        training = Training(
            stage, "fp16", accumulation, steps=5, config={"fp16": SCALING}, upguard=upguard
        )
        return fp16_ranks.run(train, training)

    plain = run()
    runs = [tmp_path / "baseline", tmp_path / "target"]
    ends, _ = (run(block(folder)) for folder in runs)

    for rank in (0, 1):
        for name, weight in plain[rank]["weights"].items():
            assert weight.equal(ends[rank]["weights"][name]), f"capture changed {name}"
    found = verdict(*runs)
    assert (found.verdict, found.coverage.not_comparable) == ("identical", 0)
    assert broken(runs[0]) == []
    kind = min(stage, 1)
    assert [step.mark for step in open_trace(runs[0]).steps(0)] == MARKS[kind]
    assert values(runs[0], "found_inf", "clip") == [float(mark is not None) for mark in MARKS[kind]]
    assert values(runs[0], "loss_scale", "optimizer") == SCALES[kind]
    masters = last_events(runs[0], "optimizer", "master", "master")
    assert len(masters) == 5
    for name, whole in ends[0]["masters"].items():
        assert merged(masters[name]).h == hash_of(whole), name


def test_a_loss_that_is_not_scaled_is_named(fp16_ranks, tmp_path):
    for name, fault in (("baseline", None), ("faulty", loss_is_not_scaled)):
        training = Training(
            1, "fp16", config={"fp16": SCALING | {"initial_scale_power": 8}}, fault=fault,
            upguard=block(tmp_path / name, program="faulty" if fault else "clean"),
        )  # fmt: skip
        fp16_ranks.run(train, training)

    found = verdict(tmp_path / "baseline", tmp_path / "faulty").first_divergence
    assert answer(found) == "0 - backward (root) grad_output backward 0 1"
