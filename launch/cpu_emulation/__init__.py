"""Run CUDA-only training programs, Megatron above all, on CPUs and gloo, unedited.

    with emulate_cuda():                     # or: emulation = emulate_cuda(); emulation.restore()
        from megatron.core.models.gpt import GPTModel
        ...

    install()                                # at interpreter start: waits for `import torch`

"cuda" means the CPU to everybody; only torch itself and UpGuard are told that there is no GPU.
Attributes are replaced and put back; no mode is pushed, no file is edited. Call it before Megatron
is imported: names that were copied before are followed, closures over them are not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

from upguard_plugin.errors import UsageError
from upguard_plugin.integrations.when_imported import when_imported
from upguard_plugin.launch.cpu_emulation.megatron import TritonStubFinder, mends
from upguard_plugin.launch.cpu_emulation.patches import Patches

__all__ = ["Emulation", "emulate_cuda", "install"]


class Emulation:
    """What was changed in this process. `restore()`, or leaving the `with` block, undoes it all."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._requests: list[Callable[[], None]] = []  # take back what waits for an import
        self._finder: TritonStubFinder | None = None

    def restore(self) -> None:
        """Put everything back and wait for no import any more. A second call does nothing."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None
        while self._requests:
            self._requests.pop()()
        self._patches.restore()
        _forget_dynamo_rules()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def _start(self) -> None:
        self._finder = TritonStubFinder()
        sys.meta_path.insert(0, self._finder)
        try:
            self._requests.append(when_imported("torch", self._emulate_torch))
            for name, mend in mends(self._patches).items():
                self._requests.append(when_imported(name, mend))
            self._patches.follow_copies()
        except BaseException:
            self.restore()
            raise

    def _emulate_torch(self, torch: ModuleType) -> None:
        # Slow to load: they need torch, which this package must not import by itself.
        from upguard_plugin.launch.cpu_emulation.cuda_api import emulate_cuda_api
        from upguard_plugin.launch.cpu_emulation.devices import emulate_devices
        from upguard_plugin.launch.cpu_emulation.distributed import emulate_process_groups

        if torch.cuda.is_available():
            raise UsageError(
                "cannot put the CPU in the place of CUDA: this process sees a real GPU",
                remedy="hide it with CUDA_VISIBLE_DEVICES= before the program starts",
            )
        emulate_devices(self._patches)
        emulate_cuda_api(self._patches)
        emulate_process_groups(self._patches)
        self._patches.follow_copies()
        _forget_dynamo_rules()


def emulate_cuda() -> Emulation:
    """Put the CPU in the place of CUDA, now.

    Imports torch. Where the process is emulated already, the handle returned undoes nothing:
    whoever began it ends it. Raises UsageError if torch sees a real GPU.
    """
    import torch  # slow to load  # noqa: F401

    emulation = Emulation()
    if not _is_emulated():
        emulation._start()
    return emulation


def install() -> None:
    """Put the CPU in the place of CUDA as soon as torch is imported, for the life of the process.

    For interpreter start (sitecustomize) and torch's entry point: imports no torch, may be called
    twice, and hides real GPUs if torch has not looked for them yet.
    """
    if _is_emulated():
        return
    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    Emulation()._start()


def _forget_dynamo_rules() -> None:
    # torch.compile tells torch's functions by identity and remembers what it found.
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()


def _is_emulated() -> bool:
    return any(isinstance(finder, TritonStubFinder) for finder in sys.meta_path)
