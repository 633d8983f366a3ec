"""Watches every operator that the dispatcher shows: forward, backward, optimizer.

In:  operators, below autograd, as a `TorchDispatchMode` sees them.
Out: calls of `calls.py`, around each operator that is the training's.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from upguard_plugin.capture.operators.calls import OperatorCalls, Running
from upguard_plugin.capture.operators.modes import below_others, leave_mode
from upguard_plugin.capture.operators.opaque import Memory, OpaqueCode
from upguard_plugin.capture.probe import Host
from upguard_plugin.capture.shield import absorb, shielded
from upguard_plugin.capture.uncompiled import can_be_told, leave_alone
from upguard_plugin.fingerprint.parts import PLAIN_TYPES

_RNG_SLOT = "generator"
_FAKE = torch._C._TorchDispatchModeKey.FAKE
# By name of this module: they are asked for every operator.
_dispatch_mode = torch._C._get_dispatch_mode
_num_function_modes = torch._C._len_torch_function_stack
_is_compiling = torch.compiler.is_compiling


class OperatorProbe(TorchDispatchMode):
    """One mode for the whole run; it looks away outside the selected steps."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would fall back to eager under this mode: another program.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not can_be_told()  # True: torch wraps `__torch_dispatch__` below

    def __init__(self, guard: Host) -> None:
        super().__init__()
        self.recorder = guard.recorder
        self.calls = OperatorCalls(guard)
        self._opaque = OpaqueCode(self)
        self.calls.on_step = self._opaque.watch_kernels
        self._entered = False
        self._inside = guard.recorder.threads_inside

    def attach(self) -> None:
        """Enter the mode, for this thread and for the backward threads it starts."""
        self.recorder.storages = self.calls.storages
        self._opaque.attach()
        self._entered = True
        self.__enter__()

    def detach(self) -> None:
        """Leave the mode, wherever in the stack it is."""
        leave_mode(self)
        self._entered = False
        self._opaque.detach()
        self.recorder.storages = None
        self.calls.forget()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.recorder.active or (self._inside and get_ident() in self._inside):
            return func(*args, **kwargs)
        if _dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)  # nothing is computed: shapes are worked out
        for kind in types:
            if kind not in PLAIN_TYPES:
                return self._pass_to_subclass(func, args, kwargs)
        if _num_function_modes() or _is_compiling():
            return self._run_in_shade(func, args, kwargs)
        # As `shielded`, without a call more for each half.
        try:
            running = self.calls.begin(func, args, kwargs)
        except Exception as error:
            absorb(self.recorder, error)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)  # what it raises is the user's
        if running is not None:
            try:
                self.calls.finish(running, result)
            except Exception as error:
                absorb(self.recorder, error)
        return result

    def _run_in_shade(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator where modes of the user's, or a compiler, must not see what we do."""
        running = self._begin(func, args, kwargs)
        result = func(*args, **kwargs)
        if running is not None:
            self._finish(running, result)
        return result

    @shielded
    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Running | None:
        return self.calls.begin(func, args, kwargs)

    @shielded
    def _finish(self, running: Running, result: Any) -> None:
        self.calls.finish(running, result)

    def _pass_to_subclass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a subclass run it: the operators on the tensors inside come here by themselves."""
        if not torch._C._len_torch_dispatch_stack():
            return NotImplemented
        with below_others(self):  # the modes below want to see it too, before we see what is inside
            return func(*args, **kwargs)

    def watches(self) -> bool:
        """Whether what this thread calls now is the training's, and recorded."""
        return (
            self._entered
            and self.recorder.active
            and get_ident() not in self._inside
            and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
            and not torch.compiler.is_compiling()
        )

    @shielded
    def hand_out(self, memory: Memory) -> None:
        """Somebody gets the address of a tensor's memory: it is never trusted again."""
        if isinstance(memory, torch.UntypedStorage):
            self.calls.storages.hand_out(memory)
        else:
            self.calls.storages.lose_sight(memory, for_good=True)


if can_be_told():
    leave_alone(OperatorProbe.__torch_dispatch__.__code__)
