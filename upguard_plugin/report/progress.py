"""A progress bar for whatever takes over a second, on a terminal only.

It writes to stderr, so that the report on stdout stays clean, and loads rich when the first second
is over: quick commands never pay for it.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

PATIENCE_S = 1.0


class Progress:
    """Call it with how much is done; it shows a bar once a second has passed."""

    def __init__(self, quiet: bool = False, what: str = "comparing") -> None:
        self._shown = not quiet and sys.stderr.isatty()
        self._what = what
        self._start_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: float, total: int) -> None:
        if not self._shown or time.monotonic() - self._start_s < PATIENCE_S:
            return
        if self._bar is None:
            from rich.console import Console  # slow to load
            from rich.progress import Progress as Bar  # slow to load

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
