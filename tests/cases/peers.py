"""What DebugMode of torch answers to the cases: `python -m tests.cases.scoreboard FILE --peers`.

In:  a case; its variants are trained under DebugMode with hashes of all outputs, UpGuard off.
Out: what `DebugMode.check_hash_mismatches` says of the target and of the clean twin.

It compares two logs of one process and knows operators by their place in the log: no steps, no
modules, parameters, ranks, kinds. On several ranks each compares its own; the first that differs is
quoted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.utils._debug_mode import DebugMode

from tests.cases.case import Case, seed_all
from tests.cases.recordings import Recordings

_EQUAL = "no mismatch"
TEXT = """## What DebugMode says

`make cases-peers` trains each case of one layout under `torch.utils._debug_mode.DebugMode` (hashes
of all outputs by `hash_tensor`, UpGuard off) and asks `check_hash_mismatches`. Its answer is the
first operator in its log whose output differs, and how many do. There is no step, module, rank or
kind in it to grade; logs of other lengths or operators are refused. On several ranks the buffers of
collectives are hashed while they are in flight, which differs from run to run. "fails": the
training does not come to its end under it. msprobe is no dependency of the tests, and is left out.
"""
HEAD = ("| case | target | clean twin |", "| --- | --- | --- |")


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What it says, in words."""

    target: str
    twin: str


def logs_of(case: Case, variant: str) -> list[Any]:
    """The log of one training in this process."""
    seed_all()
    with (
        tempfile.TemporaryDirectory() as folder,
        DebugMode(record_realtensor=True) as mode,
        DebugMode.log_tensor_hashes("hash_tensor"),
    ):
        case.train(variant, {"enabled": False, "output_dir": f"{folder}/run"})
        return mode.logs


def said_of(baseline: Sequence[Any], other: Sequence[Any]) -> str:
    """Its comparison in a few words."""
    try:
        found = DebugMode.check_hash_mismatches(list(baseline), list(other))
    except ValueError as error:
        return f"refused: {str(error).split(':')[0].lower()}"
    if not found:
        return _EQUAL
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"`{found[0]['call']}`{more}"


def answer_here(module: str) -> PeerAnswer:
    """On this rank. For a case that `module` defines."""
    case = import_module(module).CASE
    logs = {v: logs_of(case, v) for v in {"baseline", case.twin_of, "target", "twin"}}
    return PeerAnswer(
        said_of(logs["baseline"], logs["target"]), said_of(logs[case.twin_of], logs["twin"])
    )


def answers_of(case: Case, recordings: Recordings) -> PeerAnswer:
    """On all ranks of a job; "fails" where a training under DebugMode does not come to its end."""
    try:
        return first_of(recordings.on_ranks(case.num_ranks, answer_here, case.module))
    except (AssertionError, EOFError, RuntimeError):
        recordings.close()  # ranks of a call that failed cannot be used again
        return PeerAnswer("fails", "fails")


def section(answers: Mapping[int, PeerAnswer | None]) -> str:
    """Of the document; None for what one layout or one process cannot compare."""
    rows = [
        f"| {number} | {said.target} | {said.twin} |"
        for number, said in answers.items()
        if said is not None
    ]
    silent = sum(said is not None and said.twin == _EQUAL for said in answers.values())
    return "\n".join(
        [TEXT, f"Its twins are silent in {silent} of {len(rows)}.\n", *HEAD, *rows, ""]
    )


def first_of(answers: Sequence[PeerAnswer]) -> PeerAnswer:
    """Of all ranks: what the first says that says anything."""
    return PeerAnswer(
        *(
            next((getattr(a, name) for a in answers if getattr(a, name) != _EQUAL), _EQUAL)
            for name in ("target", "twin")
        )
    )
