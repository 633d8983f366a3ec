"""A run as compare sees it: what the trace reader gives, and what stands in for it.

`Run` is the reader's `Trace`; a `RunView` that renames boundaries, say, offers the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from upguard_plugin.records import Layout
from upguard_plugin.trace.batch import EventBatch, RankEnd, StepEntry

Array = npt.NDArray[Any]


class Manifest(Protocol):
    """What compare reads of a run's manifest."""

    @property
    def run_id(self) -> str: ...
    @property
    def program_digest(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def level(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def variables(self) -> Mapping[str, str]: ...
    @property
    def command(self) -> Sequence[str]: ...
    @property
    def fingerprint_version(self) -> int: ...
    @property
    def notes(self) -> Sequence[str]: ...

    def missing_ranks(self, found: Collection[int]) -> tuple[int, ...]: ...


class Run(Protocol):
    """The events of a run, one rank and one step at a time."""

    @property
    def path(self) -> Path: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def listed_ranks(self) -> tuple[int, ...]:
        """Ranks that may have recorded something."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that recorded something."""
        ...

    @property
    def missing_ranks(self) -> tuple[int, ...]: ...
    @property
    def attempts(self) -> tuple[Path, ...]: ...
    def has_trace(self, rank: int) -> bool:
        """Whether a listed rank recorded something."""
        ...

    def layout(self, rank: int) -> Layout: ...
    def steps(self, rank: int) -> Sequence[StepEntry]: ...
    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch: ...
    def end(self, rank: int) -> RankEnd: ...
    def has_tensors(self, rank: int, name: str) -> bool:
        """Whether the rank kept tensors whole under that name."""
        ...

    def read_tensors(self, rank: int, name: str) -> dict[str, Array]: ...


class RunView:
    """A run that reads like another one; what differs is overridden."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def path(self) -> Path:
        return self._run.path

    @property
    def manifest(self) -> Manifest:
        return self._run.manifest

    @property
    def listed_ranks(self) -> tuple[int, ...]:
        return self._run.listed_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._run.ranks

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return self._run.missing_ranks

    @property
    def attempts(self) -> tuple[Path, ...]:
        return self._run.attempts

    def has_trace(self, rank: int) -> bool:
        return self._run.has_trace(rank)

    def layout(self, rank: int) -> Layout:
        return self._run.layout(rank)

    def steps(self, rank: int) -> Sequence[StepEntry]:
        return self._run.steps(rank)

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        return self._run.read(rank, step, verify=verify)

    def end(self, rank: int) -> RankEnd:
        return self._run.end(rank)

    def has_tensors(self, rank: int, name: str) -> bool:
        return self._run.has_tensors(rank, name)

    def read_tensors(self, rank: int, name: str) -> dict[str, Array]:
        return self._run.read_tensors(rank, name)
