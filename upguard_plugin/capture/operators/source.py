"""The line of the user's code that an operator was called from.

The nearest frame outside torch and outside this package. Frames are judged by their code object,
once: walking a stack then costs a dictionary look-up per frame.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

from upguard_plugin.capture.frames import WRAPPERS
from upguard_plugin.records import Source

_LIBRARIES = (
    str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen",
    "<eval_with_key", *WRAPPERS,  # the former is code that torch has written
)  # fmt: skip
# Of modes and subclasses: an operator passes them by, it is not called from there.
_HANDLERS = {"__torch_dispatch__", "__torch_function__"}
_UNKNOWN: dict[int, Source] = {}


class SourceFinder:
    """Finds and interns source lines."""

    def __init__(self) -> None:
        # By id: code objects are slow to hash. They are kept alive, so an id stays its own. Of each
        # the sources by instruction; None: not the user's code.
        self._lines: dict[int, dict[int, Source] | None] = {}
        self._codes: list[CodeType] = []
        self._sources: dict[Source, Source] = {}

    def nearest(self, depth: int = 1) -> Source | None:
        """The user's line nearest to the caller `depth` frames up; None if there is none."""
        frame: FrameType | None = sys._getframe(depth)
        known = self._lines
        while frame is not None:
            lines = known.get(id(frame.f_code), _UNKNOWN)
            if lines is _UNKNOWN:
                lines = self._judge(frame.f_code)
            if lines is not None:
                at = frame.f_lasti  # much cheaper to ask for than the line
                if at not in lines:
                    lines[at] = self._intern(Source(frame.f_code.co_filename, frame.f_lineno))
                return lines[at]
            frame = frame.f_back
        return None

    def _judge(self, code: CodeType) -> dict[int, Source] | None:
        """What is known of a code object's lines: nothing yet, or None if it is no user's."""
        self._codes.append(code)
        is_user = code.co_name not in _HANDLERS and not code.co_filename.startswith(_LIBRARIES)
        lines = self._lines[id(code)] = {} if is_user else None
        return lines

    def _intern(self, source: Source) -> Source:
        """One object for a line: several operators are called from it."""
        return self._sources.setdefault(source, source)
