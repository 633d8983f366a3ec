"""Named boundaries around code that may bypass the dispatcher.

In:  calls of `torch.autograd.Function` (forward and backward), launches of Triton kernels,
     functions of extension modules, and memory that is handed out of torch (`numpy()`, DLPack,
     `data_ptr()`).
Out: events of operator `autograd.<Class>`, `triton.<kernel>`, `<module>.<function>`; and storages
     that are trusted no more: what such code wrote was not seen, so it is hashed again.

All of it is attribute replacement, on classes of torch and Triton and on extension modules;
`detach` takes it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction, Function

from upguard_plugin.capture.operators.kernels import Kernels, functions_of
from upguard_plugin.capture.pauses import inside_kernel

if TYPE_CHECKING:
    from upguard_plugin.capture.operators.probe import OperatorProbe

Memory = torch.Tensor | torch.UntypedStorage
_HANDED_OUT = (
    (torch.Tensor, "numpy"), (torch.Tensor, "__dlpack__"), (torch.Tensor, "data_ptr"),
    (torch.UntypedStorage, "data_ptr"),
)  # fmt: skip


class OpaqueCode:
    """Stands around opaque code and tells the operator probe of it."""

    def __init__(self, probe: OperatorProbe) -> None:
        self._probe = probe
        self._undo: list[Callable[[], None]] = []
        self._kernels = Kernels()

    def attach(self) -> None:
        """Replace the attributes."""
        self._replace(Function, "apply", self._function(Function.__dict__["apply"].__func__))
        self._replace(BackwardCFunction, "apply", self._backward(BackwardCFunction.apply))
        self._replace(
            BackwardCFunction, "apply_boxed", self._backward(BackwardCFunction.apply_boxed)
        )
        for owner, name in _HANDED_OUT:
            self._replace(owner, name, self._export(getattr(owner, name)))
        if "triton" in sys.modules:
            from triton.runtime.jit import KernelInterface  # optional, and loaded already

            self._replace(KernelInterface, "__getitem__", self._launch(KernelInterface.__getitem__))
        self.watch_kernels()

    def watch_kernels(self) -> None:
        """Stand around the functions of extension modules that were not there before.

        They may have been taken out of their module already, and write in methods of its classes:
        where there is such a module, no hash is used again.
        """
        for module in self._kernels.new_modules():
            self._probe.calls.storages.sample = 1
            for name, function in functions_of(module).items():
                self._replace(module, name, self._kernel(f"{module.__name__}.{name}", function))

    def detach(self) -> None:
        """Put back what was there."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: type | ModuleType, name: str, new: Any) -> None:
        inherited = name not in owner.__dict__
        old = owner.__dict__.get(name)
        setattr(owner, name, new)

        def undo() -> None:
            if owner.__dict__.get(name) is not new:
                return  # somebody has put himself around ours since: ours does nothing from now on
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self._undo.append(undo)

    def _function(self, original: Callable[..., Any]) -> Any:
        probe = self._probe

        @wraps(original)
        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            if not probe.watches():
                return original(cls, *args, **kwargs)
            running = probe.calls.begin_opaque(f"autograd.{cls.__name__}", args, kwargs)
            result = original(cls, *args, **kwargs)
            probe.calls.finish_opaque(running, result)
            return result

        return classmethod(apply)

    def _backward(self, original: Callable[..., Any]) -> Any:
        probe = self._probe

        @wraps(original)
        def apply(node: Any, *grads: Any) -> Any:
            if not probe.watches():
                return original(node, *grads)
            name = f"autograd.{node._forward_cls.__name__}"
            running = probe.calls.begin_opaque(name, grads, {})
            result = original(node, *grads)
            probe.calls.finish_opaque(running, result, node)
            return result

        return apply

    def _kernel(self, name: str, original: Callable[..., Any]) -> Any:
        probe = self._probe

        @wraps(original)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not probe.watches():
                return original(*args, **kwargs)
            running = probe.calls.begin_opaque(name, args, kwargs, writes=True)
            result = original(*args, **kwargs)
            probe.calls.finish_opaque(running, result)
            return result

        return kernel

    def _launch(self, original: Callable[..., Any]) -> Any:
        probe = self._probe

        @wraps(original)
        def get_launcher(kernel: Any, grid: Any) -> Any:
            launcher = original(kernel, grid)

            def launch(*args: Any, **kwargs: Any) -> Any:
                if not probe.watches():
                    return launcher(*args, **kwargs)
                name = f"triton.{_name_of(kernel)}"
                running = probe.calls.begin_opaque(name, args, kwargs, writes=True)
                with inside_kernel(probe.recorder):
                    result = launcher(*args, **kwargs)
                probe.calls.finish_opaque(running, None)
                return result

            return launch

        return get_launcher

    def _export(self, original: Callable[..., Any]) -> Any:
        probe = self._probe

        @wraps(original)
        def export(owner: Memory, *args: Any, **kwargs: Any) -> Any:
            if probe.watches():
                probe.hand_out(owner)
            return original(owner, *args, **kwargs)

        return export


def _name_of(kernel: Any) -> str:
    while not isinstance(getattr(kernel, "__name__", None), str):
        kernel = kernel.fn  # an autotuner, a heuristic
    return str(kernel.__name__)
