"""`manifest.json`: what one run was, written once at its start by any of its ranks.

Everything in it was known when recording began; how a rank's trace ended stands in that rank's
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from upguard_plugin.errors import RunDirectoryError, TraceError
from upguard_plugin.records import FINGERPRINT_VERSION, LEVELS, SCHEMA_VERSION
from upguard_plugin.trace.files import damaged, from_json, read_whole, replace_file, to_json

NAME = "manifest.json"
FORMAT = "upguard.trace"  # tells our manifest from those of other tools


@dataclass(frozen=True, slots=True)
class Manifest:
    """One run: its program, its settings and the environment that can move its bits."""

    run_id: str  # see run_directory.run_id_of
    command: tuple[str, ...] = ()  # secrets redacted
    config: Mapping[str, Any] = field(default_factory=dict)  # UpGuard's own settings
    program_digest: str = ""  # hexadecimal; equal digests: the same program
    program: str = ""  # the config field by which users tell variants apart
    sources: Mapping[str, str] = field(default_factory=dict)  # path -> digest of the file
    world_size: int = 1
    level: str = "module"
    versions: Mapping[str, str] = field(default_factory=dict)  # of everything that moves bits
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment, redacted
    devices: Mapping[str, str] = field(default_factory=dict)  # rank -> device
    started_at: str = ""  # ISO 8601, UTC
    schema_version: int = SCHEMA_VERSION
    fingerprint_version: int = FINGERPRINT_VERSION
    notes: tuple[str, ...] = ()
    recorded_ranks: tuple[int, ...] | None = None  # None: all of them

    def missing_ranks(self, found: Collection[int]) -> tuple[int, ...]:
        """The ranks that were to be recorded, without those that were found."""
        expected = range(self.world_size) if self.recorded_ranks is None else self.recorded_ranks
        there = frozenset(found)
        return tuple(rank for rank in expected if rank not in there)


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Write `manifest.json` at once, never half. Raises RunDirectoryError if it cannot be written.

    Values of `config` must be plain JSON values.
    """
    fields = {"format": FORMAT, **asdict(manifest)}
    try:
        replace_file(run / NAME, to_json(fields))
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {run / NAME}: {error.strerror}",
            remedy="name another output directory, or free some space",
        ) from None


def read_manifest(run: Path) -> Manifest:
    """The manifest of a run.

    Raises TraceError for a directory that holds no run, for a manifest of another tool, a newer
    schema, a field of a wrong type, and damage.
    """
    path = run / NAME
    fields = from_json(read_whole(path, limit=1 << 26), path)
    if fields.pop("format", None) != FORMAT:
        raise damaged(path, "it was not written by UpGuard", "name a directory with an UpGuard run")
    refuse_other_schema(fields.get("schema_version"), path)
    try:
        return Manifest(**{name: _CHECKS[name](value) for name, value in fields.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"a field is missing, unknown or of a wrong type ({error})") from None


def refuse_other_schema(version: object, path: Path) -> None:
    """Raise TraceError unless `version` is the schema that this UpGuard reads."""
    if version == SCHEMA_VERSION and type(version) is int:
        return
    if type(version) is int and version > SCHEMA_VERSION:
        raise TraceError(
            f"cannot read {path}: its schema is newer than this UpGuard",
            evidence={"file": f"schema {version}", "UpGuard": f"schema {SCHEMA_VERSION}"},
            remedy="read it with the UpGuard that recorded it, or a later one",
        )
    raise damaged(path, f"unknown schema version {version!r}")


def _is(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"{value!r:.40} is not a {kind.__name__}")
        return value

    return check


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_is(str)(text) for text in _is(list)(value))


def _text_map(value: Any) -> dict[str, str]:
    return {_is(str)(name): _is(str)(text) for name, text in _is(dict)(value).items()}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _level(value: Any) -> str:
    if value not in LEVELS:
        raise ValueError(f"level {value!r:.40}")
    return str(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "run_id": _is(str),
    "command": _texts,
    "config": _is(dict),
    "program_digest": _is(str),
    "program": _is(str),
    "sources": _text_map,
    "world_size": _count,
    "level": _level,
    "versions": _text_map,
    "variables": _text_map,
    "devices": _text_map,
    "started_at": _is(str),
    "schema_version": _count,
    "fingerprint_version": _count,
    "notes": _texts,
    "recorded_ranks": lambda value: None if value is None else tuple(map(_count, value)),
}
