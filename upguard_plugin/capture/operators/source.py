"""The line of the user's code that an operator was called from.

The nearest frame outside torch and outside this package. Frames are judged by their code object,
once: walking a stack then costs a dictionary look-up per frame.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch

from upguard_plugin.records import Source

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class SourceFinder:
    """Finds and interns source lines."""

    def __init__(self) -> None:
        self._is_user: dict[CodeType, bool] = {}
        self._sources: dict[tuple[CodeType, int], Source] = {}

    def nearest(self, depth: int = 1) -> Source | None:
        """The user's line nearest to the caller `depth` frames up; None if there is none."""
        frame = sys._getframe(depth)
        is_user = self._is_user
        while frame is not None:
            code = frame.f_code
            wanted = is_user.get(code)
            if wanted is None:
                wanted = is_user[code] = _is_user_code(code)
            if wanted:
                place = (code, frame.f_lineno)
                source = self._sources.get(place)
                if source is None:
                    source = self._sources[place] = Source(code.co_filename, frame.f_lineno)
                return source
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _is_user_code(code: CodeType) -> bool:
    filename = code.co_filename
    return not filename.startswith((*_LIBRARIES, "<frozen"))
