"""Numbers of the optimizer count at every level."""

from __future__ import annotations

import pytest

from tests.bugs.training import compare, found, record

SMALL = {"num_layers": 1, "width": 16, "num_heads": 2, "vocabulary": 32, "length": 8}


def another_decay(model, optimizer, step):
    optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize("level", ["module", "op"])
def test_another_weight_decay_is_named(tmp_path, level):
    baseline = record(tmp_path / "baseline", level=level, **SMALL)
    target = record(tmp_path / "target", level=level, before_step=another_decay, **SMALL)

    verdict = compare(baseline, target)

    assert found(verdict, "step", "phase", "boundary", "kind") == (
        0, "start", "optimizer.group0.weight_decay", "optimizer",
    )  # fmt: skip
