"""Whose line of code a stack frame is.

Both finders of source lines (of collectives, of operators) pass over these files.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import typing_extensions

# Where Python's own wrappers run: `@deprecated` around torch's functions, context managers.
WRAPPERS = tuple(
    module.__file__ or module.__name__
    for module in (contextlib, functools, typing_extensions, warnings)
)
