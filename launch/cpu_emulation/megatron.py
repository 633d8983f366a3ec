"""Places of Megatron that CUDA lets pass and a CPU does not, mended right after their import.

`mends` names the modules and what is done to each. Nothing is edited on disk, and a module that is
never imported costs nothing. Known to fit Megatron-LM core_v0.14 to core_v0.16.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from upguard_plugin.launch.cpu_emulation.patches import Patches

_MOE = "megatron.core.transformer.moe.moe_utils"
_NORM = "megatron.core.transformer.torch_norm"
_DATASETS = "megatron.core.datasets.utils"
_FUSED_KERNELS = "megatron.legacy.fused_kernels"
_INITIALIZE = "megatron.training.initialize"
_TRITON_USER = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def mends(patches: Patches) -> Mapping[str, Callable[[ModuleType], None]]:
    """What to do with each module after its import; every change goes into `patches`."""
    by_module = {
        _MOE: _mend_moe,
        _NORM: _mend_norm,
        _DATASETS: _mend_dataset_helper,
        _FUSED_KERNELS: _mend_fused_kernels,
        _INITIALIZE: _mend_warmup,
    }
    return {name: functools.partial(mend, patches) for name, mend in by_module.items()}


def _mend_moe(patches: Patches, module: ModuleType) -> None:
    import torch  # slow to load

    if not hasattr(module, "te_general_gemm"):
        # Without Transformer Engine the name is never bound, and the router's guard needs it.
        patches.set(module, "te_general_gemm", None)

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        # The real one leaves CPU tensors alone; all_to_all then refuses them as split sizes.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if hasattr(module, "maybe_move_tensor_to_cpu"):
        patches.set(module, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu)


def _mend_norm(patches: Patches, module: ModuleType) -> None:
    """torch's norm refuses sequence parallel only because it does not mark its parameters.

    Apex and Transformer Engine set `sequence_parallel` on them, by which Megatron knows whose
    gradients to sum over the tensor-parallel group.
    """
    real = module.WrappedTorchNorm.__new__

    def marked_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm = real(cls, accepted, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    patches.set(module.WrappedTorchNorm, "__new__", staticmethod(marked_norm))


def _mend_dataset_helper(patches: Patches, module: ModuleType) -> None:
    """The helper's Makefile asks `python3` and `python3-config` from PATH for names and suffix.

    A virtual environment has no python3-config, so another Python's suffix would be used.
    """
    real = module.compile_helpers

    @functools.wraps(real)
    def compile_helpers() -> None:
        settings = Patches()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        settings.set_item(os.environ, "PATH", path)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        settings.set_item(os.environ, "MAKEFLAGS", f"LIBEXT={suffix}")
        try:
            real()
        finally:
            settings.restore()

    patches.set(module, "compile_helpers", compile_helpers)


def _mend_fused_kernels(patches: Patches, module: ModuleType) -> None:
    # It builds nothing, but runs `nvcc -V` first.
    patches.set(module, "load", lambda args: None)


def _mend_warmup(patches: Patches, module: ModuleType) -> None:
    # It draws random numbers, as many as the tensor-parallel size says; CPU and "CUDA" share one
    # generator here, so that weights would depend on the layout.
    patches.set(module, "_warmup_jit_function", lambda: None)


class TritonStubFinder(MetaPathFinder):
    """Lets one module of Megatron be imported that imports triton at its top and may never use it.

    The stub is there only while that module runs: torch probes for triton too, and would use it.
    Its place in `sys.meta_path` is also how a process knows that it is emulated already.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of that module with a loader that provides the stub; else None."""
        if name != _TRITON_USER or self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _provide_triton(spec.loader)
        return spec


def _provide_triton(loader: Any) -> None:
    real = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the loader stays on the module: leave it as it was found
        with triton_stub_if_missing():
            real(module)

    loader.exec_module = exec_module


@contextmanager
def triton_stub_if_missing() -> Iterator[None]:
    """Put an empty triton in its place for the time being, if there is none."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    stubs = Patches()
    triton = _Stub("triton")
    language = _Stub("triton.language")
    vars(triton)["language"] = language
    stubs.set_item(sys.modules, "triton", triton)
    stubs.set_item(sys.modules, "triton.language", language)
    try:
        yield
    finally:
        stubs.restore()


class _Stub(ModuleType):
    """Any attribute, as a decorator that returns its function, with or without arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorate


def _decorate(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args and callable(args[0]) else _decorate
