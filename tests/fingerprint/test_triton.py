"""The Triton kernels, in Triton's interpreter, agree with the numpy reference bit for bit.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_equal_the_reference():
    script = Path(__file__).with_name("triton_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout + done.stderr
