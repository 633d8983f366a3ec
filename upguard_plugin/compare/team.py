"""The processes that compare two runs together.

In:  what each of them found.
Out: what all of them found, the same on each.

All processes run the same code. They meet in `share` only, and whatever one of them reads from disk
it reads inside of one: so an error on one process ends all with its sentence.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from upguard_plugin.errors import UpGuardError

Item = TypeVar("Item")


class Team(Protocol):
    """What one process knows of the others."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...
    def share(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        """What all processes make, in order of the processes.

        Raises on every process what was raised on the first that failed.
        """
        ...

    def collect(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        """The same on the first process, and nothing on the others: for what is large."""
        ...


class Alone:
    """One process that does everything."""

    index = 0
    size = 1

    def share(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        return list(make())

    def collect(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        return list(make())


@dataclass(frozen=True, slots=True)
class Part:
    """What one process brings to a meeting."""

    items: Sequence[Any] = ()
    error: UpGuardError | None = None
    fault: str | None = None  # our own mistake, as a traceback

    @classmethod
    def of(cls, make: Callable[[], Sequence[Any]]) -> Part:
        try:
            return cls(items=make())
        except UpGuardError as error:
            return cls(error=error)
        except Exception:  # it must reach the others, which would wait for ever
            return cls(fault=traceback.format_exc())

    def without_items(self) -> Part:
        """Whether it failed, and no more."""
        return Part(error=self.error, fault=self.fault)


class MemberError(RuntimeError):
    """A process failed by a mistake of ours, or died."""


def joined(parts: Sequence[Part]) -> list[Any]:
    """The items of all parts. Raises the error of the first part that has one."""
    for part in parts:
        if part.error is not None:
            raise part.error
        if part.fault is not None:
            raise MemberError(part.fault)
    return [item for part in parts for item in part.items]


@dataclass(slots=True)
class MpiTeam:
    """The processes of an `mpiexec`."""

    communicator: Any  # of mpi4py
    failed: bool = field(default=False)  # all processes know

    @property
    def index(self) -> int:
        return int(self.communicator.Get_rank())

    @property
    def size(self) -> int:
        return int(self.communicator.Get_size())

    def share(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        return self._joined(self.communicator.allgather(Part.of(make)))

    def collect(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        part = Part.of(make)
        self._joined(self.communicator.allgather(part.without_items()))
        parts = self.communicator.gather(part)
        return [] if parts is None else joined(parts)

    def _joined(self, parts: Sequence[Part]) -> list[Any]:
        self.failed = True
        found = joined(parts)
        self.failed = False
        return found


@dataclass(slots=True)
class LocalTeam:
    """Processes of one machine; the first collects what the others found."""

    index: int
    size: int
    connections: Sequence[Any]  # of the first: to each other process; of those: to the first

    def share(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        parts = self._exchanged(Part.of(make), lambda parts: parts)
        return joined(parts)

    def collect(self, make: Callable[[], Sequence[Item]]) -> list[Item]:
        parts = self._exchanged(
            Part.of(make), lambda parts: [part.without_items() for part in parts]
        )
        return joined(parts)

    def _exchanged(
        self, part: Part, told: Callable[[Sequence[Part]], Sequence[Part]]
    ) -> Sequence[Part]:
        """All parts on the first process; on the others what it tells of them."""
        try:
            if self.index:
                self.connections[0].send(part)
                answer: Sequence[Part] = self.connections[0].recv()
                return answer
            parts = [part, *(connection.recv() for connection in self.connections)]
            for connection in self.connections:
                connection.send(told(parts))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise MemberError("a process of --jobs has died") from None
        return parts
