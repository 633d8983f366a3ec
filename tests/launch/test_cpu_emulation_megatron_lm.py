"""The emulation and the modules that come with Megatron-LM's repository, as stand-ins."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from upguard_plugin.launch.cpu_emulation import emulate_cuda


@pytest.fixture
def emulation():
    with emulate_cuda() as handle:
        yield handle


MEGATRON_TRAINING = {
    "initialize": "def _warmup_jit_function():\n    raise RuntimeError('drew random numbers')\n",
    "fused_kernels": "def load(args):\n    raise RuntimeError('ran nvcc')\n",
    "utils": "import os\n\ndef compile_helpers():\n    seen.update(os.environ)\n\nseen = {}\n",
}


@pytest.fixture
def fake_megatron(tmp_path, monkeypatch):
    """The three modules that come with Megatron-LM's repository, or must not be run in a test."""
    for name, folder in (
        ("initialize", "training"),
        ("fused_kernels", "legacy"),
        ("utils", "core/datasets"),
    ):
        file = tmp_path / "megatron" / folder / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(MEGATRON_TRAINING[name])
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "megatron" / "__init__.py").touch()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def test_the_warm_up_draws_no_random_numbers(fake_megatron, emulation):
    from megatron.training.initialize import _warmup_jit_function

    _warmup_jit_function()


def test_fused_kernels_run_no_nvcc(fake_megatron, emulation):
    from megatron.legacy.fused_kernels import load

    load(None)


def test_the_dataset_helper_is_built_for_this_python(fake_megatron, emulation):
    from megatron.core.datasets import utils

    before = dict(os.environ)
    utils.compile_helpers()

    assert utils.seen["MAKEFLAGS"] == f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    assert utils.seen["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")
    assert dict(os.environ) == before


HALF_IMPORTED = """
from upguard_plugin.errors import UsageError
from upguard_plugin.launch.cpu_emulation import emulate_cuda

emulation = emulate_cuda()

def load(args):
    raise RuntimeError("ran nvcc")
"""


def test_a_module_that_is_being_imported_is_mended_when_it_is_done(fake_megatron, tmp_path):
    (tmp_path / "megatron" / "legacy" / "fused_kernels.py").write_text(HALF_IMPORTED)

    from megatron.legacy import fused_kernels

    with fused_kernels.emulation:
        fused_kernels.load(None)


def test_a_module_imported_before_is_mended_and_restored(fake_megatron):
    from megatron.legacy import fused_kernels

    real = fused_kernels.load
    with emulate_cuda():
        fused_kernels.load(None)
    assert fused_kernels.load is real
