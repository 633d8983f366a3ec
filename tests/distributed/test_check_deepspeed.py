"""`upguard check` on real DeepSpeed runs of two ranks."""

from __future__ import annotations

import importlib.util

import pytest
from deepspeed_training import Training, block, make_engine, run_steps, train

from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def check(deepspeed_ranks, run, **training):
    deepspeed_ranks.run(train, Training(upguard=block(run), **training))
    return check_run(open_trace(run), Selection())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_broken_in_a_clean_run(deepspeed_ranks, tmp_path, stage, dtype):
    report = check(deepspeed_ranks, tmp_path / "run", stage=stage, dtype=dtype, accumulation=2)

    assert [one.explanation for one in report.broken] == []
    assert report.checked["collectives-match"] > 0
    assert report.checked["replicas-agree"] > 0


def saves_and_loads(training, folder, spoils):
    """Two steps, a save, two steps, a load of it, one of the first masters spoilt, two steps."""
    engine = make_engine(training)
    try:
        run_steps(engine, training)
        engine.save_checkpoint(folder, tag="here")
        run_steps(engine, training)
        original = engine._load_checkpoint
        engine._load_checkpoint = lambda *args, **kw: spoil(engine, original(*args, **kw))
        if not spoils:
            engine._load_checkpoint = original
        engine.load_checkpoint(folder, tag="here")
        run_steps(engine, training)
    finally:
        engine.destroy()


def spoil(engine, loaded):
    """A load that leaves one weight as it was not saved."""
    next(engine.module.parameters()).data.add_(1)
    return loaded


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_what_is_loaded_is_what_was_saved(deepspeed_ranks, tmp_path, stage, dtype):
    training = Training(stage=stage, dtype=dtype, steps=1, upguard=block(tmp_path / "run"))
    deepspeed_ranks.run(saves_and_loads, training, str(tmp_path / "saved"), False)

    report = check_run(open_trace(tmp_path / "run"), Selection())

    assert [one.explanation for one in report.broken] == []
    assert report.checked["saved-is-loaded"] > 20


def test_a_load_that_leaves_other_weights_is_named(deepspeed_ranks, tmp_path):
    training = Training(stage=0, steps=1, upguard=block(tmp_path / "run"))
    deepspeed_ranks.run(saves_and_loads, training, str(tmp_path / "saved"), True)

    first = check_run(open_trace(tmp_path / "run"), Selection()).broken[0]

    assert (first.invariant, first.phase, first.role) == ("saved-is-loaded", "checkpoint", "param")
    assert (first.boundary, first.ranks) == ("0.weight", [0])
