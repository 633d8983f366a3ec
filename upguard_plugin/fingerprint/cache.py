"""Where compiled CPU kernels are kept between processes.

numba writes them beside the module, or in the user's cache directory, whichever is writable; both
are found by numba itself. Where neither is, the kernels are compiled in memory, in each process
(seconds), and `cache_note` says so for the manifest.

numba notices a change in the file of an entry point only: who changes a file that `cpu.py`,
`measure.py` or `spots.py` imports kernels from has to touch these as well, or the old code stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

_notes: list[str] = []


def compile_kernel(*, nogil: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an entry point: compiled at its first call, cached on disk.

    nogil: let other Python threads run meanwhile. For short calls that is a loss: to get the GIL
    back from a busy thread takes up to 5 ms.
    Give each entry point one signature only: numba's cache names files by a counter, and processes
    that start together may overwrite each other's file; with one signature both hold the same code.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(function, nogil=nogil, cache=True)
        except RuntimeError:  # numba: "no locator available", no writable place
            text = "CPU fingerprint kernels were compiled in memory: no writable cache directory"
            if text not in _notes:
                _notes.append(text)
            return numba.njit(function, nogil=nogil)

    return decorate


def cache_note() -> str | None:
    """A sentence for the manifest where kernels are not cached on disk, else None."""
    return _notes[0] if _notes else None
