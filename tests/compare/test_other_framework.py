"""A Megatron-Core model against a plain PyTorch one of the same computation, by a map of names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upguard_plugin.compare.driver import Comparison
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.team import Alone
from upguard_plugin.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
MAP = """
rename:
  - from: blocks.*.up
    to: layers.*.linear_fc1
  - from: blocks.*.down
    to: layers.*.linear_fc2
  - from: blocks
    to: layers
"""
IGNORE = """
ignore:
  - boundaries: [optimizer.group0]
    reason: it lists the names of the parameters
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed")
    folder = tmp_path_factory.mktemp("frameworks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compare.frameworks", str(folder)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "map.yaml").write_text(MAP)
    (folder / "ignore.yaml").write_text(IGNORE)
    return folder


def verdict(runs: Path, target: str) -> Verdict:
    comparison = Comparison(
        runs / "megatron",
        runs / target,
        Selection(),
        renames=runs / "map.yaml",
        ignore=runs / "ignore.yaml",
    )
    return comparison.verdict(Alone())


def test_the_same_computation_is_identical(runs):
    """Megatron's layers give a bias beside their output, which is None here."""
    found = verdict(runs, "plain")

    assert (found.verdict, found.first_divergence) == ("identical", None)
    told = ("not used", "no data", "other class", "structure")
    assert [n for n in found.notes if n.startswith(told)] == [
        "not used: rng.torch_cpu differs from step 0 on (rank 0), and nobody draws from it",
        *(
            f"no data: {name} output out.1 is None in the baseline from step 0 on (rank 0), and the"
            " target has no such output"
            for name in ("layers.*.linear_fc1", "layers.*.linear_fc2", "layers.*")
        ),
        *(
            f"other class: {name} is a {ours} in the baseline and a {theirs} in the target from "
            "step 0 on (rank 0), and equal tensors are passed in another way"
            for name, ours, theirs in (
                ("layers.*", "MLP", "Block"),
                ("layers.*.linear_fc1", "ColumnParallelLinear", "Linear"),
                ("layers.*.linear_fc2", "RowParallelLinear", "Linear"),
            )
        ),
    ]
    assert found.coverage.differ == 4  # that generator, at both ends of both steps
    assert (found.coverage.unmatched_baseline, found.coverage.unmatched_target) == (12, 0)


def test_another_activation_is_found_in_the_other_framework(runs):
    first = verdict(runs, "wrong").first_divergence

    assert (first.step, first.phase, first.kind) == (0, "forward", "forward")
    assert (first.boundary, first.role) == ("layers.1.linear_fc2", "input")
