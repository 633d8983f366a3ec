"""The one broad catch: between us and the training job.

What a training program calls without asking for it (hooks) goes through `shielded`. Our own failure
stops the recording, with the reason in the trace; the training goes on. A wrong setting that shows
only when the first tensor is seen (a placement that does not fit) does stop the job, as long as its
first step has not been finished.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack

from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.capture.uncompiled import can_be_told, leave_alone
from upguard_plugin.errors import ConfigError, PlacementError

_FAKE = torch._C._TorchDispatchModeKey.FAKE

Method = TypeVar("Method", bound=Callable[..., Any])


class Shielded(Protocol):
    """An object whose methods are hooks: it says where to report a failure."""

    recorder: Recorder


def shielded(method: Method) -> Method:
    """Make a method safe to be called by the training program: it returns None when it fails.

    It does nothing at all where torch.compile traces the call: the compiled code has no part of it.
    """

    @wraps(method)
    def call(self: Shielded, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        try:
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():  # modes of the user's are not to see us
                    return method(self, *args, **kwargs)
            return method(self, *args, **kwargs)
        except Exception as error:
            absorb(self.recorder, error)
            return None

    if can_be_told():  # between two compiled graphs it would be compiled, to do nothing
        leave_alone(call.__code__)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def out_of_sight(recorder: Recorder) -> bool:
    """Whether a module is called where tensors are not what they seem; that is noted."""
    if peek_interpreter_stack() is not None:
        recorder.note("module calls inside vmap, grad or jvp were not recorded")
    elif torch._C._get_tracing_state() is not None:
        recorder.note("module calls inside torch.jit.trace were not recorded")
    elif torch._C._get_dispatch_mode(_FAKE) is not None:
        recorder.note("module calls with fake tensors were not recorded")
    elif torch.cuda.default_generators and torch.cuda.is_current_stream_capturing():
        # What we put on the stream would be in the graph, and run with each replay.
        recorder.note("module calls were not recorded while a CUDA graph was captured")
    else:
        return False
    return True


class Hook(partial):
    """A method bound to its first arguments, to be hung on a module.

    A copy of it does nothing: a model that is copied (for a moving average) or pickled with its
    hooks takes no part of the recording with it.
    """

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _do_nothing, ()


def _do_nothing() -> Callable[..., None]:
    return ignore


def ignore(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in the copy of a model."""


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
