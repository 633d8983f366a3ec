"""Code that torch.compile leaves alone, without a wrapper around each call.

torch wraps the `__torch_dispatch__` of every mode so that it is never compiled; the wrapper costs
more than all that a mode does for an operator it does not record. torch can be told the same of a
code object: its frames, and those they call, then run as they are. The seams are private to torch;
where one is missing, torch's own wrapper stays.
"""

from __future__ import annotations

import sys
from types import CodeType

from torch._C._dynamo import eval_frame

_SEAMS = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")


def can_be_told() -> bool:
    """Whether this torch has what `leave_alone` needs."""
    return all(hasattr(eval_frame, seam) for seam in _SEAMS)


def leave_alone(code: CodeType) -> None:
    """Have torch.compile skip these frames, and those they call. Only where `can_be_told`."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(code, strategy)


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # slow to load: not for this question
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
