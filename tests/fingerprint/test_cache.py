"""Loading: nothing is compiled or even imported early, and no writable place is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import upguard_plugin
from upguard_plugin.fingerprint import fingerprint

PACKAGE = Path(upguard_plugin.__file__).parent

SCRIPT = """
import torch
from upguard_plugin.fingerprint import FingerprintQueue, fingerprint
print(fingerprint(torch.arange(1000.0)).hex)
print(*FingerprintQueue().notes, sep="\\n")
"""


def run_python(code, **options):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_package_and_the_reference_load_neither_torch_nor_numba():
    code = """
import sys
import upguard_plugin.fingerprint as package
import upguard_plugin.placement, upguard_plugin.placement_cover
import numpy as np
package.fingerprint_array(np.arange(5)), package.estimate_distance
print({"torch", "numba", "triton"} & set(sys.modules))
"""
    assert run_python(code) == ["set()"]


def copy_of_the_package(folder):
    """The package in a folder of its own, without any compiled kernel."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "upguard_plugin", ignore=ignore)
    return folder


def test_kernels_are_compiled_in_memory_where_nothing_can_be_written(tmp_path):
    site = copy_of_the_package(tmp_path)
    # Read-only for root too: a plain file stands where the cache folders would be made.
    (site / "upguard_plugin" / "fingerprint" / "__pycache__").touch()
    (tmp_path / "home").touch()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)

    lines = run_python(SCRIPT, cwd=site, env=environment)

    assert lines == [
        fingerprint(torch.arange(1000.0)).hex,
        "CPU fingerprint kernels were compiled in memory: no writable cache directory",
    ]


PLAIN_CPU = """
import numpy as np, torch
from upguard_plugin.fingerprint import fingerprint, fingerprint_array
from upguard_plugin.fingerprint.vector import FUSED, WIDE
draw = np.random.default_rng(0)
for size in (1, 7, 8, 63, 64, 200, 8192, 8200, 16_384, 40_003, 100_000):
    data = draw.integers(0, 256, size, dtype=np.uint8)
    assert fingerprint(torch.from_numpy(data)) == fingerprint_array(data), size
print(FUSED, WIDE)
"""


def test_code_for_a_cpu_without_wide_or_fused_multiplies_gives_the_same(tmp_path):
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}

    assert run_python(PLAIN_CPU, env=environment) == ["False False"]


@pytest.mark.long
def test_processes_that_start_together_share_one_cache(tmp_path):
    site = copy_of_the_package(tmp_path)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", SCRIPT]

    running = [
        subprocess.Popen(command, cwd=site, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = [process.communicate(timeout=300)[0].splitlines() for process in running]

    expected = fingerprint(torch.arange(1000.0)).hex
    assert found == [[expected, ""]] * 2
    assert list((site / "upguard_plugin" / "fingerprint" / "__pycache__").glob("cpu.hash_*.nbi"))
