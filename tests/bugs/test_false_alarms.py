"""Twenty repeats of one small training are identical to it, at every level."""

from __future__ import annotations

import pytest

from tests.bugs.training import compare, record

SMALL = {
    "num_layers": 2, "width": 16, "num_heads": 2, "vocabulary": 32, "length": 8, "dropout": 0.1,
}  # fmt: skip
NUM_PAIRS = 20


@pytest.mark.parametrize("level", ["stage", "module", "op"])
def test_repeats_of_a_run_are_identical(tmp_path, level):
    first = record(tmp_path / "first", level=level, **SMALL)
    for k in range(NUM_PAIRS):
        verdict = compare(first, record(tmp_path / f"repeat-{k}", level=level, **SMALL))
        assert verdict["verdict"] == "identical", verdict["first_divergence"]
        assert verdict["coverage"]["compared"] > 0
