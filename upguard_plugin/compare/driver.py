"""Several processes that compare two runs together: an `mpiexec`, or `--jobs` on one machine.

In:  what the command line asks for, and how the command was started.
Out: the team that this process belongs to. The first process opens the runs and tells the others
     what is there; each of them then reads its own part.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upguard_plugin.compare.idle_rules import idle_rules
from upguard_plugin.compare.ignoring import read_ignore_rules
from upguard_plugin.compare.pieces import Progress
from upguard_plugin.compare.renaming import RenamedRun, read_rename_rules
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.team import Alone, LocalTeam, MemberError, MpiTeam, Team
from upguard_plugin.errors import EXIT_UNREADABLE, UpGuardError, UsageError
from upguard_plugin.trace.rank_reader import KeyTables
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.verdict import Verdict

# How launchers tell a process how many it has started: MPICH and Intel MPI, Open MPI, MVAPICH.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_INDICES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_KILL_AFTER_S = 5.0  # for a process of --jobs that does not end by itself


@dataclass(frozen=True)
class Comparison:
    """What `upguard compare` was asked for."""

    baseline: Path
    target: Path
    selection: Selection
    same_program: bool = False
    exact: bool = False
    verify: bool = False
    noise: tuple[Path, ...] = ()
    ignore: Path | None = None
    renames: Path | None = None

    def verdict(self, team: Team, progress: Progress = lambda done, total: None) -> Verdict:
        """The answer, the same on every process of the team. Raises what `compare_runs` raises."""
        (opened,) = team.share(lambda: [] if team.index else [self._opened()])
        verdict = compare_runs(
            opened.baseline,
            opened.target,
            opened.selection,
            same_program=self.same_program,
            exact=self.exact,
            verify=self.verify,
            noise=opened.noise,
            team=team,
            progress=progress,
        )
        # Behind the reason of an undecided comparison, which is its first note.
        place = 1 if verdict.verdict == "incomparable" else 0
        notes = [*verdict.notes[:place], *opened.idle_rules, *verdict.notes[place:]]
        return verdict.model_copy(update={"notes": notes})

    def _opened(self) -> _Opened:
        selection = self.selection
        if self.ignore is not None:
            selection = replace(selection, ignore=read_ignore_rules(self.ignore))
        key_tables: KeyTables = {}
        renames = () if self.renames is None else read_rename_rules(self.renames)
        target: Run = open_trace(self.target, key_tables)
        noise = tuple(open_trace(path, key_tables) for path in self.noise)
        baseline = open_trace(self.baseline, key_tables)
        idle = idle_rules(baseline, target, selection, renames)
        if renames:
            target = RenamedRun(target, renames)
        return _Opened(baseline, target, noise, selection, tuple(idle))


@dataclass(frozen=True, slots=True)
class _Opened:
    """The files of a comparison, opened: names of ranks are known, and what rules name."""

    baseline: Run
    target: Run
    noise: tuple[Run, ...]
    selection: Selection
    idle_rules: tuple[str, ...]  # sentences about rules that name nothing


@contextmanager
def team_for(
    comparison: Comparison, jobs: int, environment: Mapping[str, str] = os.environ
) -> Iterator[Team]:
    """The team of this process, as long as it compares.

    jobs: processes to use on this machine where no `mpiexec` has started several.
    Raises UsageError for an `mpiexec` that mpi4py cannot answer to.
    """
    size, index = _number(environment, _SIZES, 1), _number(environment, _INDICES, 0)
    if size > 1:
        try:
            communicator = _communicator(size, jobs)
        except UsageError:
            if index:
                raise SystemExit(EXIT_UNREADABLE) from None  # the first process says it
            raise
        with _mpi_team(communicator) as team:
            yield team
    elif jobs > 1:
        with _local_team(comparison, jobs) as team:
            yield team
    else:
        yield Alone()


def _number(environment: Mapping[str, str], names: Sequence[str], default: int) -> int:
    texts = (environment[name] for name in names if name in environment)
    return next((int(text) for text in texts if text.isdecimal()), default)


def _communicator(size: int, jobs: int) -> Any:
    if jobs > 1:
        raise UsageError(
            f"--jobs {jobs} cannot be used in one of {size} processes of mpiexec",
            remedy="leave --jobs out: the processes of mpiexec share the work",
        )
    try:
        from mpi4py import MPI  # optional
    except (ImportError, RuntimeError):  # not there, or without an MPI library
        raise UsageError(
            f"mpiexec has started {size} processes, but mpi4py cannot be loaded",
            remedy=f"pip install upguard-plugin[mpi], or without mpiexec: --jobs {size}",
        ) from None
    if size != MPI.COMM_WORLD.Get_size():
        raise UsageError(
            f"mpiexec has started {size} processes, but mpi4py sees {MPI.COMM_WORLD.Get_size()}",
            remedy="use the mpiexec of the MPI that mpi4py was built for",
        )
    return MPI.COMM_WORLD


@contextmanager
def _mpi_team(communicator: Any) -> Iterator[Team]:
    team = MpiTeam(communicator)
    try:
        yield team
    except BaseException as error:
        if not team.failed:  # the others wait for this process
            _say(error)
            communicator.Abort(error.exit_code if isinstance(error, UpGuardError) else 1)
        raise


def _say(error: BaseException) -> None:
    text = str(error) if isinstance(error, UpGuardError) else traceback.format_exc()
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _local_team(comparison: Comparison, size: int) -> Iterator[Team]:
    # Spawned, not forked: pyarrow and numpy may have started threads already.
    context = multiprocessing.get_context("spawn")
    members, connections = [], []
    try:
        for index in range(1, size):
            here, there = context.Pipe()
            member = context.Process(
                target=_take_part, args=(comparison, index, size, there), daemon=True
            )
            member.start()
            there.close()
            members.append(member)
            connections.append(here)
        yield LocalTeam(0, size, connections)
    finally:
        for connection in connections:
            connection.close()
        for member in members:
            member.join(_KILL_AFTER_S)
            if member.is_alive():
                member.terminate()


def _take_part(comparison: Comparison, index: int, size: int, connection: Any) -> None:
    """What a process of --jobs runs. The first process has the answer, and says what is wrong."""
    try:
        comparison.verdict(LocalTeam(index, size, [connection]))
    except (UpGuardError, MemberError, KeyboardInterrupt):
        sys.exit(1)
