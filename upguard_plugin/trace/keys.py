"""`keys.arrow`: the table of distinct event keys of one rank, an Arrow IPC stream.

Row n is the key with number n; the `key` column of the segments refers to it. It is the dictionary
of everything that repeats every step, so a step in the middle is read without the steps before it.
String columns are dictionary-encoded and their dictionaries grow by deltas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from upguard_plugin.records import (
    MOMENTS,
    PHASES,
    ROLES,
    EventKey,
    Group,
    Piece,
    Placement,
    Source,
    Stretch,
)
from upguard_plugin.trace.files import damaged
from upguard_plugin.trace.segments import ARROW_ERRORS

NAME = "keys.arrow"

_TEXTS = (
    "boundary",
    "phase",
    "role",
    "slot",
    "dtype",
    "operator",
    "moment",
    "placement",
    "group",
    "op",
    "source_file",
    "holds",
)
_OPTIONAL = frozenset(("operator", "moment", "placement", "group", "op", "source_file", "holds"))
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [pa.field(name, _DICTIONARY, nullable=name in _OPTIONAL) for name in _TEXTS]
    + [
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("source_line", pa.int32()),
    ]
)


class KeyTable:
    """The writing side: turns new keys into the bytes to append to `keys.arrow`."""

    def __init__(self) -> None:
        self._tape = _Tape()
        options = pa.ipc.IpcWriteOptions(
            compression="zstd", use_threads=False, emit_dictionary_deltas=True
        )
        self._stream = pa.ipc.new_stream(
            pa.PythonFile(self._tape, mode="w"), SCHEMA, options=options
        )
        self._words: dict[str, dict[str, int]] = {name: {} for name in _TEXTS}

    def encode(self, keys: Sequence[EventKey]) -> bytes:
        """The next bytes of the stream; with the first call come those of its schema."""
        rows = [_row(key) for key in keys]
        columns = [self._text_column(name, [row[name] for row in rows]) for name in _TEXTS]
        columns.append(pa.array([key.shape for key in keys], pa.list_(pa.int64())))
        lines = [None if key.source is None else key.source.line for key in keys]
        columns.append(pa.array(lines, pa.int32()))
        self._stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        return self._tape.take()

    def _text_column(self, name: str, texts: Sequence[str | None]) -> pa.DictionaryArray:
        words = self._words[name]
        codes = [None if t is None else words.setdefault(t, len(words)) for t in texts]
        return pa.DictionaryArray.from_arrays(
            pa.array(codes, pa.int32()), pa.array(map(_utf8, words), pa.string())
        )


def _utf8(text: str) -> str:
    # A file name that is not valid UTF-8 has lone surrogates in it, which Arrow refuses.
    return text.encode("utf-8", "backslashreplace").decode()


class _Tape:
    """A file for Arrow to write to, whose bytes we take."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing to do: the bytes are in memory."""

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def _row(key: EventKey) -> dict[str, str | None]:
    source = key.source
    return {
        "boundary": key.boundary,
        "phase": key.phase,
        "role": key.role,
        "slot": key.slot,
        "dtype": key.dtype,
        "operator": key.operator,
        "moment": key.moment,
        "placement": None if key.placement is None else _placement_text(key.placement),
        "group": None if key.group is None else _compact([key.group.name, *key.group.ranks]),
        "op": key.op,
        "source_file": None if source is None else source.file,
        "holds": _holds_text(key.holds) if key.holds else None,
    }


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _holds_text(holds: Sequence[Stretch]) -> str:
    return _compact([[part.start, part.stop, part.name, part.offset] for part in holds])


def _placement_text(placement: Placement) -> str:
    pieces = [
        [p.sizes, p.local_start, p.local_strides, p.logical_start, p.logical_strides]
        for p in placement.pieces
    ]
    return _compact(
        {
            "spec": placement.spec,
            "logical_shape": placement.logical_shape,
            "pieces": pieces,
            "sharded": placement.sharded,
            "partial": placement.partial,
            "mesh": placement.mesh,
        }
    )


def decode_keys(data: bytes, num_keys: int, path: Path) -> tuple[EventKey, ...]:
    """The first `num_keys` keys of the stream. Raises TraceError if the bytes do not hold them.

    path: of the file the bytes came from, for messages.
    """
    if num_keys == 0:
        return ()
    try:
        table = _read_table(data)
        if not table.schema.equals(SCHEMA):
            raise damaged(path, "its columns are not those of a key table")
        if table.num_rows != num_keys:
            raise damaged(path, f"it holds {table.num_rows} keys, the index says {num_keys}")
        return _keys_of(table)
    except ARROW_ERRORS as error:
        raise damaged(path, f"it holds no valid event keys ({str(error)[:120]})") from None
    except RecursionError:
        raise damaged(path, "it holds no valid event keys (nested too deeply)") from None


def _read_table(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        schema = stream.schema
        batches = list(stream)
    for batch in batches:
        batch.validate(full=True)
    # Dictionaries grow from batch to batch; with one for the whole table, words are decoded once.
    return pa.Table.from_batches(batches, schema=schema).unify_dictionaries().combine_chunks()


def _keys_of(table: pa.Table) -> tuple[EventKey, ...]:
    columns = {name: _values(table.column(name)) for name in table.column_names}
    placements = {
        text: _parse_placement(text) for text in set(columns["placement"]) if text is not None
    }
    groups = {text: _parse_group(text) for text in set(columns["group"]) if text is not None}
    holds = {text: _parse_holds(text) for text in set(columns["holds"]) if text is not None}
    _check_words(columns)
    return tuple(
        EventKey(
            boundary=columns["boundary"][i],
            phase=columns["phase"][i],
            role=columns["role"][i],
            slot=columns["slot"][i],
            dtype=columns["dtype"][i],
            shape=tuple(columns["shape"][i]),
            operator=columns["operator"][i],
            moment=columns["moment"][i],
            placement=placements.get(columns["placement"][i]),
            group=groups.get(columns["group"][i]),
            op=columns["op"][i],
            source=_source(columns["source_file"][i], columns["source_line"][i]),
            holds=holds.get(columns["holds"][i], ()),
        )
        for i in range(table.num_rows)
    )


def _values(column: pa.ChunkedArray) -> list[Any]:
    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    (chunk,) = column.chunks
    words = [*chunk.dictionary.to_pylist(), None]  # None is word -1
    return [words[code] for code in chunk.indices.fill_null(-1).to_pylist()]


def _check_words(columns: dict[str, list[Any]]) -> None:
    for name in ("boundary", "slot", "dtype", "shape"):
        if None in columns[name]:
            raise ValueError(f"a key without {name}")
    for name, known in (("phase", PHASES), ("role", ROLES), ("moment", (None, *MOMENTS))):
        unknown = set(columns[name]) - set(known)
        if unknown:
            raise ValueError(f"unknown {name} {sorted(map(str, unknown))[0]!r}")
    if any(size is None or size < 0 for shape in columns["shape"] for size in shape):
        raise ValueError("a shape that is no shape")


def _source(file: str | None, line: int | None) -> Source | None:
    if (file is None) != (line is None):
        raise ValueError("a source without its file or its line")
    return None if file is None or line is None else Source(file, line)


def _parse_group(text: str) -> Group:
    name, *ranks = json.loads(text)
    return Group(_text(name), _counts(ranks))


def _parse_holds(text: str) -> tuple[Stretch, ...]:
    return tuple(
        Stretch(_count(start), _count(stop), _text(name), _count(offset))
        for start, stop, name, offset in json.loads(text)
    )


def _parse_placement(text: str) -> Placement:
    fields = json.loads(text)
    pieces = tuple(
        Piece(_counts(sizes), _count(start), _counts(strides), _count(at), _counts(logical))
        for sizes, start, strides, at, logical in fields.pop("pieces")
    )
    placement = Placement(
        spec=_text(fields.pop("spec")),
        logical_shape=_counts(fields.pop("logical_shape")),
        pieces=pieces,
        sharded=tuple(map(_text, fields.pop("sharded"))),
        partial=tuple(map(_text, fields.pop("partial"))),
        mesh=_text(fields.pop("mesh")),
    )
    if fields:
        raise ValueError(f"unknown field {next(iter(fields))!r} of a placement")
    return placement


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)
