"""Batches like those of a small GPT, for the tests of the trace."""

from __future__ import annotations

import numpy as np

from upguard_plugin.records import Axis, EventKey, Group, Layout, Piece, Placement, Source, Stretch
from upguard_plugin.trace.batch import EventBatch

LAYOUT = Layout((Axis("tp", 2, 1, (0, 1)), Axis("ep", 1, 0, (1,), "expert")), zero_stage=1)
TP_GROUP = Group("tp", (0, 1))


def make_keys(num_keys: int = 12) -> list[EventKey]:
    """Keys that use every field, and leave each optional one out somewhere."""
    return [_key(number) for number in range(num_keys)]


def _key(number: int) -> EventKey:
    layer, part = divmod(number, 4)
    name = f"decoder.layers.{layer}.mlp.fc{part}"
    if part == 0:
        return EventKey(name, "forward", "output", "0", "bfloat16", (4, 16), operator="Linear")
    if part == 1:
        return EventKey(
            name,
            "grad_sync",
            "grad",
            "args.0",
            "float32",
            (16,),
            operator="c10d.allreduce_",
            moment="completion",
            group=TP_GROUP,
            op="all_reduce sum",
            holds=(Stretch(0, 12, "größe.grad"), Stretch(12, 16, f"{name}.grad", 4)),
        )
    if part == 2:
        piece = Piece((8, 16), 0, (16, 1), 128 * layer, (16, 1))
        placement = Placement("o[tp] i", (16, 16), (piece,), ("tp",), ())
        source = Source("training/größe.py", 17)
        return EventKey(
            name, "start", "param", "weight", "float64", (8, 16), placement=placement, source=source
        )
    return EventKey(f"lr.{layer}", "optimizer", "scalar", "value", "int64", ())


def make_batch(
    step: int, keys: list[EventKey], *, num_events: int | None = None, **optional
) -> EventBatch:
    """A batch of `num_events` events (default: one per key); the same arguments, the same batch."""
    num_events = len(keys) if num_events is None else num_events
    random = np.random.default_rng(1000 + step)
    rows = np.arange(num_events)
    return EventBatch(
        step=step,
        keys=keys,
        key=(rows % len(keys)).astype(np.int32),
        seq=rows + 1_000_000 * step,
        microbatch=np.minimum(rows // len(keys), 3).astype(np.int32),
        call=np.zeros(num_events, np.int32),
        h=random.integers(0, 2**61 - 1, num_events, dtype=np.uint64),
        s=np.zeros(num_events, np.uint64),
        **optional,
    )


def all_optional(num_events: int) -> dict[str, np.ndarray]:
    """Every optional column, with NONE and NaN in them."""
    rows = np.arange(num_events)
    some = rows % 3 == 0
    return {
        "producer": np.where(some, rows - 5, -1),
        "value": np.where(some, rows * 0.1, np.nan),
        "nonfinite": np.where(some, rows, -1),
        "max_abs": np.where(some, rows * 1.5, np.nan),
        "sketch": np.arange(num_events * 8, dtype=np.float64).reshape(num_events, 8),
        "group_seq": np.where(some, rows, -1),
        "peer": np.where(some, 1, -1).astype(np.int32),
        "tag": np.where(some, 7, -1).astype(np.int32),
        "pair_seq": np.where(some, rows, -1),
    }


def same(found: EventBatch, expected: EventBatch) -> bool:
    """Whether two batches hold the same events; their key tables may be numbered differently."""
    for name in EventBatch.__slots__:
        mine, other = getattr(found, name), getattr(expected, name)
        if name == "keys":
            continue
        if name == "key":
            keys = [found.keys[i] for i in mine]
            if keys != [expected.keys[i] for i in other]:
                return False
        elif isinstance(other, np.ndarray):
            if mine is None or mine.dtype != other.dtype or mine.tobytes() != other.tobytes():
                return False
        elif mine != other:
            return False
    return True
