"""`segment-00000.arrow`: the events themselves, Arrow IPC streams of plain numbers.

One record batch per step. A batch holds the columns that the recorder had and no others; batches
with other columns go to another segment, because an Arrow stream has one schema. There are no
dictionaries in a segment, so any of its batches is read by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.trace.files import damaged

REQUIRED: dict[str, pa.DataType] = {
    "key": pa.int32(),  # row of keys.arrow
    "seq": pa.int64(),
    "microbatch": pa.int32(),
    "call": pa.int32(),
    "h": pa.uint64(),
    "s": pa.uint64(),
}
OPTIONAL: dict[str, pa.DataType] = {
    "producer": pa.int64(),
    "value": pa.float64(),
    "nonfinite": pa.int64(),
    "max_abs": pa.float64(),
    "sketch": pa.float64(),  # a list of fixed length per event; this is its element
    "group_seq": pa.int64(),
    "peer": pa.int32(),
    "tag": pa.int32(),
    "pair_seq": pa.int64(),
}
# What comes out of Arrow, and of ourselves, for bytes that are not what they should be.
ARROW_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, TypeError, KeyError, MemoryError)
_END_OF_STREAM_BYTES = 8
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
_SKETCH_LIMIT = 1 << 16


def segment_name(number: int) -> str:
    return f"segment-{number:05d}.arrow"


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as it goes into a segment."""

    schema: pa.Schema
    head: bytes  # the schema message that begins every segment of this schema
    body: memoryview  # the record batch message


def encode(batch: EventBatch, key: np.ndarray) -> EncodedBatch:
    """The bytes of a batch. key: int32 [events], rows of the key table in the file."""
    columns: dict[str, pa.Array] = {}
    for name, kind in REQUIRED.items():
        values = key if name == "key" else getattr(batch, name)
        columns[name] = _to_arrow(values, kind)
    for name, kind in OPTIONAL.items():
        values = getattr(batch, name)
        if values is not None:
            columns[name] = _to_arrow(values, kind)
    schema = pa.schema([pa.field(name, c.type, nullable=False) for name, c in columns.items()])
    head = schema.serialize().to_pybytes()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
    whole = memoryview(sink.getvalue())
    return EncodedBatch(schema, head, whole[len(head) : -_END_OF_STREAM_BYTES])


def _to_arrow(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    plain = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype())
    flat = pa.array(plain.reshape(-1), type=kind, from_pandas=False)
    return flat if plain.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, plain.shape[1])


def decode_schema(head: bytes, path: Path) -> pa.Schema:
    """The schema of a segment. Raises TraceError if it is not one of ours."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(head))
    except ARROW_ERRORS:
        raise damaged(path, "it does not begin with an Arrow schema") from None
    names = [name for name in [*REQUIRED, *OPTIONAL] if name in schema.names]
    fields = [pa.field(name, _expected_type(name, schema), nullable=False) for name in names]
    if not schema.equals(pa.schema(fields), check_metadata=True) or not set(REQUIRED) <= set(names):
        raise damaged(path, "its columns are not those of a segment")
    return schema


def _expected_type(name: str, schema: pa.Schema) -> pa.DataType:
    kind = REQUIRED.get(name) or OPTIONAL[name]
    if name != "sketch":
        return kind
    stored = schema.field(schema.names.index(name)).type
    width = stored.list_size if pa.types.is_fixed_size_list(stored) else 0
    return pa.list_(kind, min(width, _SKETCH_LIMIT))


def decode(body: bytes, schema: pa.Schema, num_events: int, path: Path) -> dict[str, Any]:
    """The columns of a batch as read-only numpy arrays, by name."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(body), schema)
        batch.validate()
        if batch.num_rows != num_events:
            raise damaged(path, f"a batch of {batch.num_rows} events, the index says {num_events}")
        return {name: _to_numpy(batch.column(i)) for i, name in enumerate(schema.names)}
    except ARROW_ERRORS as error:
        raise damaged(path, f"a batch cannot be decoded ({str(error)[:120]})") from None


def _to_numpy(column: Any) -> Any:
    if column.null_count:
        raise ValueError("a column with nulls")
    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=True)
    values = column.flatten()
    if values.null_count:
        raise ValueError("a column with nulls")
    return values.to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)
