"""A fault inside a Triton kernel is blamed on its launch.

The interpreter is chosen when Triton is imported, so the trainings run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.bugs.training import compare


def record(output, fault=0.0):
    subprocess.run(
        [sys.executable, "-m", "tests.bugs.triton_run", str(output), str(fault)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return output


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_fault_in_a_triton_kernel_is_blamed_on_its_launch(tmp_path):
    clean, again = record(tmp_path / "clean"), record(tmp_path / "again")
    faulty = record(tmp_path / "faulty", fault=0.5)

    assert compare(clean, again)["verdict"] == "identical"
    first = compare(clean, faulty)["first_divergence"]
    named = [first[field] for field in ("step", "phase", "kind", "boundary", "operator", "slot")]
    assert named == [1, "forward", "forward", "1", "triton.square", "args.1"]
    assert first["inputs_equal"]
