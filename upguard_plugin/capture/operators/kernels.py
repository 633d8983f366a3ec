"""Extension modules that were built against torch: kernels that bypass the dispatcher.

Their functions get the memory of tensors without a word to the dispatcher, and may write it.
Torch's own modules are left out: what they write, the dispatcher shows. So are those that
torch.compile has built: it moves the version counter of what they write.
"""

from __future__ import annotations

import gc
import mmap
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import BuiltinFunctionType, ModuleType

# Of the many that are always there, none to be opened.
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "pyarrow", "numba", "llvmlite", "yaml"}
_LIBRARIES = (b"libc10", b"libtorch", b"c10.dll", b"torch_cpu.dll")  # that they need of torch


class Kernels:
    """The extension modules that are new since the last look."""

    def __init__(self) -> None:
        self._num_loaded = (0, 0)
        self._known: set[int] = set()

    def new_modules(self) -> list[ModuleType]:
        """Those that were not there at the last look; costs nothing where nothing was loaded."""
        num_loaded = (len(sys.modules), _num_built())
        if num_loaded == self._num_loaded:
            return []
        self._num_loaded = num_loaded
        found = []
        for module in gc.get_objects():  # what torch builds is in no table of modules
            if type(module) is ModuleType and id(module) not in self._known:
                self._known.add(id(module))
                if _is_kernels(module):
                    found.append(module)
        return found


def functions_of(module: ModuleType) -> dict[str, BuiltinFunctionType]:
    """The compiled functions of an extension module, by name."""
    return {k: v for k, v in vars(module).items() if isinstance(v, BuiltinFunctionType)}


def _num_built() -> int:
    """How many extension modules torch has built and loaded in this process."""
    building = sys.modules.get("torch.utils.cpp_extension")  # slow to load: not for this question
    return 0 if building is None else len(building.JIT_EXTENSION_VERSIONER.entries)


def _is_kernels(module: ModuleType) -> bool:
    fields = vars(module)
    name, file = fields.get("__name__"), fields.get("__file__")
    return (
        isinstance(name, str)
        and isinstance(file, str)
        and name.partition(".")[0] not in _KNOWN
        and not file.startswith(_folders_of_compiler())
        and _needs_torch(file)
    )


def _folders_of_compiler() -> tuple[str, ...]:
    """Where torch.compile keeps what it has built; nowhere if it has not been asked yet."""
    compiler = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return () if compiler is None else (compiler.cache_dir(),)


@cache
def _needs_torch(file: str) -> bool:
    """Whether a module's file is a library that is linked with torch's."""
    if not file.endswith(tuple(EXTENSION_SUFFIXES)):
        return False
    try:
        with (
            Path(file).open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            return any(text.find(library) >= 0 for library in _LIBRARIES)
    except (OSError, ValueError):  # it is gone, or empty
        return False
