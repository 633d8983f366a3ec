"""Functions of a framework, replaced by ones that also tell us, until they are put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace `owner.name` (a class's method or a module's function) until the returned undo runs.

    around: called as `around(original, *args, **kwargs)` in place of `original(*args, **kwargs)`.
    Where somebody has wrapped our wrapper by then, undo leaves theirs alone: `around` must be
    harmless when it has nothing left to do.
    Raises AttributeError if `owner` itself has no such function.
    """
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no function {name!r} of its own")
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)

    def undo() -> None:
        if vars(owner).get(name) is wrapper:
            setattr(owner, name, original)

    return undo
