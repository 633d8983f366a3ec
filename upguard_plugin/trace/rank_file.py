"""`rank.json`: where one rank sits in the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upguard_plugin.records import SCHEMA_VERSION, Axis, Layout
from upguard_plugin.trace.files import damaged, from_json, read_whole, replace_file, to_json
from upguard_plugin.trace.manifest import refuse_other_schema

NAME = "rank.json"

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankFile:
    run_id: str  # of the run directory, so that ranks of different runs cannot be mixed up
    rank: int
    device: str
    layout: Layout


def write(directory: Path, about: RankFile) -> int:
    """Write `rank.json`; returns its size in bytes. Raises OSError."""
    data = to_json({"schema_version": SCHEMA_VERSION, **asdict(about)})
    replace_file(directory / NAME, data)
    return len(data)


def exists(directory: Path) -> bool:
    """Whether there is one. A rank that was killed before it could write it recorded nothing."""
    return (directory / NAME).exists()


def read(directory: Path, axis_ranks: dict[Ranks, Ranks] | None = None) -> RankFile:
    """Raises TraceError if the file is missing, damaged or of another schema.

    axis_ranks: the rank lists of axes that were read before; equal ones are kept once, as each is
    that of every rank in it.
    """
    path = directory / NAME
    fields = from_json(read_whole(path, limit=1 << 26), path)
    refuse_other_schema(fields.get("schema_version"), path)
    known = {} if axis_ranks is None else axis_ranks
    try:
        return RankFile(
            str(fields["run_id"]),
            int(fields["rank"]),
            str(fields["device"]),
            _layout(fields["layout"], known),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(path, f"a field is missing or has a wrong type ({error})") from None


def _layout(fields: dict[str, Any], known: dict[Ranks, Ranks]) -> Layout:
    axes = tuple(
        Axis(
            name=str(axis["name"]),
            size=int(axis["size"]),
            index=int(axis["index"]),
            ranks=known.setdefault(ranks, ranks),
            mesh=str(axis["mesh"]),
        )
        for axis in fields["axes"]
        for ranks in [tuple(int(rank) for rank in axis["ranks"])]
    )
    stage = fields["zero_stage"]
    return Layout(axes, None if stage is None else int(stage))
