"""DeepSpeed's ZeRO at level `op`: same weights as without, identical repeats, nothing broken."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import replace

import pytest
from deepspeed_training import Training, block, train
from torch import nn

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def even() -> nn.Module:
    """Sizes that two ranks divide without padding."""
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "stage", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_recording_every_operator_keeps_the_bits_and_repeats(deepspeed_ranks, tmp_path, stage):
    model = None if stage < 3 else even  # docs/deepspeed.md: padding of ZeRO-3 is no value
    training = Training(stage, "bf16", 2, zero={"overlap_comm": True}, model=model)
    plain = deepspeed_ranks.run(train, training)
    runs = [tmp_path / "baseline", tmp_path / "target", tmp_path / "outputs"]
    ends = []
    for run in runs:
        deepspeed_ranks.run(gc.collect)  # an engine that dies meanwhile calls operators of its own
        upguard = block(run) | {"level": "op"} | ({"roles": "output"} if run == runs[2] else {})
        ends.append(deepspeed_ranks.run(train, replace(training, upguard=upguard)))

    for rank in (0, 1):
        for name, weight in plain[rank]["weights"].items():
            assert all(weight.equal(end[rank]["weights"][name]) for end in ends), name
    traces = [open_trace(run) for run in runs]
    assert all(trace.end(rank).complete for trace in traces for rank in (0, 1))
    report = check_run(traces[0], Selection())
    assert [one.explanation for one in report.broken] == []
    assert "outputs-awaited" not in {one.invariant for one in report.suspects}
    assert report.checked["outputs-awaited"] > 10
    verdict = compare_runs(*traces[:2])
    assert verdict.verdict == "identical", verdict.first_divergence
    batch = traces[0].read(0, 1)
    assert 0 < len(traces[2].read(0, 1)) < len(batch)
    operators = {batch.key_of(row).operator for row in range(len(batch))}
    assert {"aten.addmm", "aten.mm"} <= operators
