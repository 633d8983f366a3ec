"""The line of the user's code that an operator was called from.

The nearest frame outside torch and outside this package. Frames are judged by their code object,
once: walking a stack then costs a dictionary look-up per frame.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch

from upguard_plugin.capture.frames import WRAPPERS
from upguard_plugin.records import Source

_LIBRARIES = (
    str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen", *WRAPPERS,
)  # fmt: skip


class SourceFinder:
    """Finds and interns source lines."""

    def __init__(self) -> None:
        # By id: code objects are slow to hash. They are kept alive, so an id stays its own.
        self._lines: dict[int, dict[int, Source] | None] = {}  # None: not the user's code
        self._codes: list[CodeType] = []

    def nearest(self, depth: int = 1) -> Source | None:
        """The user's line nearest to the caller `depth` frames up; None if there is none."""
        frame = sys._getframe(depth)
        known = self._lines
        while frame is not None:
            code = frame.f_code
            if id(code) not in known:
                self._codes.append(code)
                is_user = not code.co_filename.startswith(_LIBRARIES)
                known[id(code)] = {} if is_user else None
            lines = known[id(code)]
            if lines is not None:
                line = frame.f_lineno
                if line not in lines:
                    lines[line] = Source(code.co_filename, line)
                return lines[line]
            frame = frame.f_back  # type: ignore[assignment]
        return None
