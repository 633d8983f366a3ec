"""The programs of examples/deepspeed/ run as their README says, and are recorded whole."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

EXAMPLES = Path(__file__).parents[2] / "examples" / "deepspeed"
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


@pytest.mark.parametrize(
    "script, config",
    [
        ("train_zero.py", "zero1.json"),
        ("train_zero.py", "zero2.json"),
        ("train_zero.py", "zero3.json"),
        ("train_pipeline.py", "pipeline.json"),
    ],
)
def test_an_example_trains_and_its_run_holds_together(tmp_path, script, config):
    command = str(Path(sysconfig.get_path("scripts")) / "deepspeed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UPGUARD")}
    environment |= {"OMP_NUM_THREADS": "1", "UPGUARD_OUTPUT_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [command, "--num_gpus", "2", script, "--deepspeed_config", config],
        cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "run")
    for rank in (0, 1):
        assert trace.end(rank).complete, trace.end(rank)
        assert len(trace.steps(rank)) == 3
    assert not check_run(trace, Selection()).broken
