"""Who called a collective: the line of code, and whether it is the gradients' own machinery.

In:  the Python stack at the moment of the launch.
Out: a `Caller`. Nothing of a frame is kept.

DDP's reducer launches from C++ in the middle of backward: then the innermost Python frame is that
of autograd, or there is none, because autograd runs on a thread of its own.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import upguard_plugin
from upguard_plugin.capture.frames import WRAPPERS
from upguard_plugin.records import Source

_TORCH_FOLDER = Path(torch.__file__).parent
_TORCH = f"{_TORCH_FOLDER}{os.sep}"
_OURS = f"{Path(upguard_plugin.__file__).parent}{os.sep}"
_AUTOGRAD = str(_TORCH_FOLDER / "autograd" / "graph.py")
_C10D = str(_TORCH_FOLDER / "distributed" / "distributed_c10d.py")
_OF_OBJECTS = ("_object", "_object_list")  # how torch's functions that pickle end
_DDP = str(_TORCH_FOLDER / "nn" / "parallel" / "distributed.py")
_OPERATORS = str(_TORCH_FOLDER / "_ops.py")
# What torch puts around the `__torch_dispatch__` of a mode, ours at level op.
_AROUND_MODES = (str(_TORCH_FOLDER / "_compile.py"), str(_TORCH_FOLDER / "_dynamo/eval_frame.py"))
_NOT_THE_USERS = (_TORCH, "<", *WRAPPERS)
# Code whose reductions in backward are the synchronisation of gradients.
_GRADIENT_CODE = (
    "/torch/distributed/fsdp/",
    "/torch/distributed/algorithms/ddp_comm_hooks/",
    "/torch/nn/parallel/distributed.py",
    "/megatron/core/distributed/",
    "/megatron/core/optimizer/",
    "/deepspeed/runtime/",
)
_NO_BACKWARD = -1  # torch's number of a backward where there is none
_MAX_DEPTH = 40  # frames between a collective and the code that wanted it


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a collective comes from."""

    source: Source | None  # the innermost line outside torch; None on a thread without Python
    from_cpp: bool  # launched and waited for by C++: DDP's reducer and its broadcasts
    returns_work: bool  # by a function of torch.distributed, which waits for its Work or returns it
    functional: bool  # by a functional collective: torch waits for its result, not for its Work
    in_backward: bool  # while autograd runs
    in_gradient_code: bool  # by a framework's own code for gradients
    of_objects: bool  # what travels are pickled Python objects
    factor: float | None = None  # of a reduce op "premul_sum"


def find_caller(*, with_factor: bool = False) -> Caller:
    """Look at the stack of the calling thread."""
    frame = _launching(sys._getframe(1))
    innermost = _AUTOGRAD if frame is None else frame.f_code.co_filename
    source: Source | None = None
    in_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
    in_gradient_code = False
    below_autograd = False
    of_objects = False
    factor: float | None = None
    for _ in range(_MAX_DEPTH):
        if frame is None:
            break
        path = frame.f_code.co_filename
        in_gradient_code = in_gradient_code or (not below_autograd and _is_gradient_code(path))
        if path == _C10D and frame.f_code.co_name.endswith(_OF_OBJECTS):
            of_objects = True
        if with_factor and factor is None:
            factor = getattr(frame.f_locals.get("op"), "factor", None)
        if source is None and not path.startswith(_NOT_THE_USERS):
            source = _source(path, frame.f_lineno)
        below_autograd = below_autograd or path == _AUTOGRAD
        if below_autograd and source is not None:
            break
        frame = frame.f_back
    return Caller(
        source,
        from_cpp=innermost in (_AUTOGRAD, _DDP),
        returns_work=innermost == _C10D,
        functional=innermost == _OPERATORS,
        in_backward=in_backward,
        in_gradient_code=in_gradient_code,
        of_objects=of_objects,
        factor=factor,
    )


def _launching(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the launch itself, whatever dispatch modes it came through."""
    found = frame
    for _ in range(_MAX_DEPTH):
        if frame is None or frame.f_code.co_filename == _AUTOGRAD:
            break
        if _is_a_modes(frame) or (frame is found and _is_between(frame)):
            found = frame.f_back
        frame = frame.f_back
    return found


def _is_a_modes(frame: FrameType) -> bool:
    """Whether a dispatch mode is handling an operator there."""
    return frame.f_code.co_name == "__torch_dispatch__" and isinstance(
        frame.f_locals.get("self"), TorchDispatchMode
    )


def _is_between(frame: FrameType) -> bool:
    """Whether it stands between the call of the operator and us."""
    is_around = frame.f_code.co_filename in _AROUND_MODES
    return is_around or _is_ours(frame) or _is_called_by_us(frame)


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def _is_called_by_us(frame: FrameType) -> bool:
    """Whether it is the operator that our dispatch mode passes on, at level op."""
    return frame.f_code.co_filename == _OPERATORS and _is_ours(frame.f_back)


@lru_cache(maxsize=4096)
def _source(path: str, line: int) -> Source:
    return Source(path, line)


@lru_cache(maxsize=4096)
def _is_gradient_code(path: str) -> bool:
    return any(part in path.replace(os.sep, "/") for part in _GRADIENT_CODE)
