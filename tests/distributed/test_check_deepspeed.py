"""`upguard check` on real DeepSpeed runs of two ranks."""

from __future__ import annotations

import importlib.util

import pytest
from deepspeed_training import Training, block, train

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
