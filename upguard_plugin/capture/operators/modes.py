"""Leaving a dispatch mode that is not on top of the stack.

A mode that stays for a whole run may be covered by modes of the training program. They are taken
off, ours is left, and they are put back in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def leave_mode(mode: TorchDispatchMode) -> None:
    """Take `mode` out of this thread's stack; nothing happens if it is not there."""
    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    above = [_pop_mode() for _ in range(len(stack) - 1 - stack.index(mode))]
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)


@contextmanager
def below_others(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, `mode` is entered as the lowest of this thread's modes."""
    others = [_pop_mode() for _ in range(len(_get_current_dispatch_mode_stack()))]
    mode.__enter__()
    for other in reversed(others):
        _push_mode(other)
    try:
        yield
    finally:
        leave_mode(mode)
