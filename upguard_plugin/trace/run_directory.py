"""The run directory: who may write where.

In:  the output directory, this process's rank, and the launcher's id for the launch if it has one.
Out: the directory of the run (or of its attempt), with an empty directory for the rank in it.

Ranks agree without communication: the first to come creates `claim.json` exclusively, the others
read it. A restarted job finds the claim of its first attempt and goes to `attempt-2` beside the
first attempt's files.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from upguard_plugin.errors import RunDirectoryError, TraceError
from upguard_plugin.trace import index
from upguard_plugin.trace.files import read_whole
from upguard_plugin.trace.manifest import NAME as MANIFEST_NAME

CLAIM_NAME = "claim.json"
_RANK_NAME = re.compile(r"rank(\d{5,9})")
_ATTEMPT_NAME = re.compile(r"attempt-(\d{1,6})")
_PATIENCE_S = 60.0  # for another rank to write a claim of 100 bytes, on a slow network disk
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def rank_name(rank: int) -> str:
    return f"rank{rank:05d}"


def rank_directories(run: Path) -> dict[int, Path]:
    """The directories of ranks in a run, by rank. Links do not count. Raises OSError."""
    found: dict[int, Path] = {}
    for entry in os.scandir(run):
        match = _RANK_NAME.fullmatch(entry.name)
        if match and entry.name == rank_name(int(match[1])) and entry.is_dir(follow_symlinks=False):
            found[int(match[1])] = run / entry.name
    return dict(sorted(found.items()))


def attempt_directories(run: Path) -> list[Path]:
    """`attempt-2` and so on, in order. Raises OSError."""
    found = {
        int(match[1]): run / entry.name
        for entry in os.scandir(run)
        if (match := _ATTEMPT_NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    }
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Claim:
    run_id: str  # random; the same for all ranks of the run
    run_token: str | None
    restart: str  # tells one start of a job from the next; see _restart
    launcher: str  # the parent process, which ranks on one machine often share


def run_id_of(run: Path) -> str:
    """The id under which all ranks of this run directory record, or "" if nobody claimed it."""
    claim = _read_claim(run)
    return "" if claim is None else claim.run_id


def claim_run_directory(
    output: Path, *, rank: int, run_token: str | None, overwrite: bool = False
) -> Path:
    """The directory in which this rank records; all ranks of one launch get the same.

    run_token: the launcher's id for the launch, the same for all ranks and after a restart. Without
    one, ranks join a claim that lacks their rank and that was made under the same parent process,
    or under which nobody has recorded a step yet.
    overwrite: remove a run that is in the way, once for all ranks.

    A job that was restarted (by a restart count in the environment, or the same token for a rank
    that has recorded already) gets `<output>/attempt-2`, then `attempt-3`. Raises RunDirectoryError
    if `output` holds a run, or cannot be written.
    """
    mine = _Claim(uuid.uuid4().hex, run_token, _restart(os.environ), _launcher())
    restarted = mine.restart != _restart({})
    try:
        output.mkdir(parents=True, exist_ok=True)
        while True:
            claim = _claim_or_read(output, mine)
            if claim.run_token == run_token and (run_token is not None or restarted):
                return _join_attempt(output, mine, rank)
            if _may_join(output, claim, mine) and _make_rank_directory(output, rank):
                return output
            if not overwrite:
                raise _holds_a_run(output)
            _remove_run(output, claim)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot record in {output}: {error.strerror or error}",
            remedy="name an output directory that all ranks can write",
        ) from None


def _holds_a_run(output: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot record in {output}: it holds a run already",
        remedy="name another output directory, or set overwrite to replace that run",
    )


def _restart(environ: Mapping[str, str]) -> str:
    return ".".join(environ.get(name) or "0" for name in _RESTART_COUNTS)


def _launcher() -> str:
    """The parent process: machine, process id and, as ids are used again, its start time."""
    parent = os.getppid()
    try:
        # The name of the program, in parentheses, may contain spaces.
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        started = fields[19]
    except (OSError, IndexError):
        started = ""
    return f"{platform.node()} {parent} {started}".rstrip()


def _join_attempt(output: Path, mine: _Claim, rank: int) -> Path:
    for number in range(1, 1_000_000):
        directory = output if number == 1 else output / f"attempt-{number}"
        directory.mkdir(exist_ok=True)
        claim = _claim_or_read(directory, mine)
        same_launch = (claim.run_token, claim.restart) == (mine.run_token, mine.restart)
        if same_launch and _make_rank_directory(directory, rank):
            return directory
    raise RunDirectoryError(
        f"cannot record in {output}: it holds too many attempts", remedy="name another directory"
    )


def _make_rank_directory(directory: Path, rank: int) -> bool:
    """Make the directory of a rank; False if it is there already."""
    try:
        (directory / rank_name(rank)).mkdir()
    except FileExistsError:
        return False
    return True


def _may_join(directory: Path, claim: _Claim, mine: _Claim) -> bool:
    """Whether a claim can be that of our own launch, as far as a rank can tell by itself."""
    if claim == mine or (claim.run_token, mine.run_token) != (None, None):
        return claim == mine
    if claim.launcher == mine.launcher:
        return True
    empty = len(index.header_bytes())
    files = [path / index.NAME for path in rank_directories(directory).values()]
    return all(not file.exists() or file.stat().st_size <= empty for file in files)


def _claim_or_read(directory: Path, mine: _Claim) -> _Claim:
    """Claim a directory, or read who has. Refuses one that holds a run which nobody claimed."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        claim = _read_claim(directory)
        if claim is not None:
            return claim
        if (directory / MANIFEST_NAME).exists():
            raise RunDirectoryError(
                f"cannot record in {directory}: it holds a {MANIFEST_NAME} of something else",
                remedy="name another output directory",
            )
        try:
            descriptor = os.open(directory / CLAIM_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            if time.monotonic() > deadline:
                raise _stuck(directory / CLAIM_NAME) from None
            time.sleep(0.01)  # another rank is between creating and writing the claim
            continue
        os.write(descriptor, _claim_bytes(mine))
        os.close(descriptor)
        return mine


def _claim_bytes(claim: _Claim) -> bytes:
    return (json.dumps(asdict(claim)) + "\n").encode()


def _read_claim(directory: Path) -> _Claim | None:
    """The claim on a directory, or None if there is none or it is half written."""
    path = directory / CLAIM_NAME
    if not os.path.lexists(path):
        return None
    try:
        return _Claim(**json.loads(read_whole(path, limit=1 << 16)))
    except (ValueError, TypeError, RecursionError):
        return None
    except TraceError:
        if os.path.lexists(path):
            raise
        return None  # removed a moment ago, by a rank that overwrites the run


def _stuck(path: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot record: {path} was left by a process that was killed while making the directory",
        remedy=f"remove {path}, or name another output directory",
    )


def _remove_run(output: Path, claim: _Claim) -> None:
    """Remove the run under `claim`, once, whichever rank comes first; the others wait for it."""
    marker = output / f".overwrite-{claim.run_id}"
    try:
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        _wait_for_removal(output, claim, marker)
        return
    try:
        # A rank that was slow may come here when the run has been replaced: look again.
        if _read_claim(output) == claim:
            for directory in [*rank_directories(output).values(), *attempt_directories(output)]:
                shutil.rmtree(directory)
            (output / MANIFEST_NAME).unlink(missing_ok=True)
            (output / CLAIM_NAME).unlink()
    finally:
        marker.unlink()


def _wait_for_removal(output: Path, claim: _Claim, marker: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while _read_claim(output) == claim:
        if time.monotonic() > deadline:
            raise _stuck(marker)
        time.sleep(0.01)
