"""The Triton kernels, in Triton's interpreter, agree with the numpy reference bit for bit.

The interpreter is chosen when Triton is imported, so these tests run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run_cases(name, interpreted):
    script = Path(__file__).with_name(name)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)],
        env={**os.environ, "TRITON_INTERPRET": interpreted},
        capture_output=True,
        text=True,
        timeout=300,
    )


@NEEDS_TRITON
def test_triton_kernels_equal_the_reference():
    done = run_cases("triton_cases.py", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_TRITON
def test_triton_kernels_are_built_for_a_gpu():
    done = run_cases("triton_builds.py", "0")
    assert done.returncode == 0, done.stdout + done.stderr
