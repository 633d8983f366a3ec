"""The one broad catch: between us and the training job.

What a training program calls without asking for it (hooks) goes through `shielded`. Our own failure
stops the recording, with the reason in the trace; the training goes on. A wrong setting that shows
only when the first tensor is seen (a placement that does not fit) does stop the job, as long as its
first step has not been finished.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.errors import ConfigError, PlacementError

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Shielded(Protocol):
    """An object whose methods are hooks: it says where to report a failure."""

    recorder: Recorder


def shielded(hook: Hook) -> Hook:
    """Make a method safe to be called by the training program: it returns None when it fails."""

    @wraps(hook)
    def call(self: Shielded, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            absorb(self.recorder, error)
            return None

    return call  # type: ignore[return-value]


def absorb(recorder: Recorder, error: Exception) -> None:
    """Stop recording because of `error`; raises it again if a setting is wrong at step 0."""
    if isinstance(error, ConfigError | PlacementError) and recorder.position.step == 0:
        raise error
    recorder.fail(describe(error))


def describe(error: Exception) -> str:
    """The failure in one line, with the place in our code where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"capture failed: {type(error).__name__}: {text}{place}"
