"""Runs in memory whose tensors are cut over tp x dp ranks: every logical value is known.

Four micro-batches of one sample each are divided over the dp indexes. A rank sees two weights (one
cut over tp, one whole), activations, gradients, their sum and a loss. Parts are drawn at random, so
that they add up to the logical fingerprint, which is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tests.memory_run import MemoryRun, hash_of
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import FINGERPRINT_PRIME, Axis, EventKey, Group, Layout
from upguard_plugin.trace.batch import NONE, EventBatch

NUM_MICROBATCHES = 4
SKETCH = 4  # numbers in a sketch
SIZE = 8
NUM_LOGICAL = 2 + NUM_MICROBATCHES * 6 + 2 + 1  # events of a step that can be compared


@dataclass(frozen=True)
class Mesh:
    """tp inside of dp."""

    tp: int = 1
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    def layout(self, rank: int) -> Layout:
        dp, tp = divmod(rank, self.tp)
        return Layout(
            (
                Axis("tp", self.tp, tp, tuple(dp * self.tp + i for i in range(self.tp))),
                Axis("dp", self.dp, dp, tuple(i * self.tp + tp for i in range(self.dp))),
            )
        )


@dataclass(frozen=True)
class Seen:
    """An event of a rank, before it is cut."""

    phase: str
    role: str
    boundary: str
    slot: str
    spec: str
    microbatch: int = NONE  # of all ranks; its number on the rank is another one

    @property
    def shape(self) -> tuple[int, ...]:
        return (SIZE,) * len(self.spec.split())

    @property
    def is_cut(self) -> bool:
        return "[tp]" in self.spec


def seen_by(mesh: Mesh, rank: int) -> list[Seen | None]:
    """What a rank sees in a step; None: its reduction over tp."""
    each = NUM_MICROBATCHES // mesh.dp
    first = rank // mesh.tp * each
    weights = [("fc.weight", "o[tp] i"), ("norm.weight", "h")]
    listed: list[Seen | None] = [Seen("start", "param", n, "value", spec) for n, spec in weights]
    for k in range(first, first + each):
        listed += [
            Seen("data", "sample", "tokens", "0", "h", k),
            Seen("forward", "input", "fc", "0", "b i", k),
            Seen("forward", "output", "fc", "0", "b o[tp]", k),
            None,
            Seen("forward", "output", "norm", "0", "b h", k),
            Seen("backward", "grad_output", "fc", "0", "b o[tp]", k),
            Seen("backward", "grad_input", "fc", "0", "b i", k),
        ]
    listed += [Seen("grad_sync", "grad", name, "grad", spec) for name, spec in weights]
    return [*listed, Seen("clip", "scalar", "loss", "value", "+dp")]


def value_of(seen: Seen, step: int, mesh: Mesh, rank: int, sketched: bool) -> tuple[int, list]:
    """Fingerprint and sketch of a rank's part."""
    name = (seen.phase, seen.role, seen.boundary, seen.microbatch, step)
    whole, sketch = hash_of(name), sketch_of(name)
    if not seen.is_cut:
        return whole, sketch
    tp = rank % mesh.tp
    parts = [(hash_of((*name, i)), sketch_of((*name, i))) for i in range(mesh.tp - 1)]
    if tp < len(parts):
        return parts[tp]
    rest = [a - sum(b[k] for _, b in parts) for k, a in enumerate(sketch)]
    return (whole - sum(h for h, _ in parts)) % FINGERPRINT_PRIME, rest


def sketch_of(name: object) -> list[float]:
    return [hash_of((name, k)) / 2**56 for k in range(SKETCH)]


def key_of(seen: Seen | None, mesh: Mesh, rank: int) -> EventKey:
    layout = mesh.layout(rank)
    if seen is None:
        group = Group("tp", layout.axes[0].ranks)
        return EventKey(
            "all_reduce[tp]", "forward", "output", "0", "float32", (SIZE,), group=group,
            op="all_reduce sum",
        )  # fmt: skip
    if seen.role == "scalar":
        placement = resolve_placement("+dp", (), layout)
        return EventKey("loss", seen.phase, "scalar", "value", "float64", (), placement=placement)
    shape = tuple(SIZE // (mesh.tp if "[tp]" in d else 1) for d in seen.spec.split())
    placement = resolve_placement(seen.spec, shape, layout)
    dtype = "int64" if seen.role == "sample" else "float32"
    return EventKey(
        seen.boundary, seen.phase, seen.role, seen.slot, dtype, shape, placement=placement
    )


def split_run(
    mesh: Mesh,
    num_steps: int = 2,
    *,
    flips: Mapping[tuple[int, int, int], int] | None = None,
    sketch: bool = False,
    name: str = "run",
) -> MemoryRun:
    """flips: (rank, step, row) -> what its fingerprint is changed by."""
    batches, layouts = {}, {}
    for rank in range(mesh.num_ranks):
        listed = seen_by(mesh, rank)
        keys = [key_of(seen, mesh, rank) for seen in listed]
        made = [_batch(step, keys, listed, mesh, rank, sketch) for step in range(num_steps)]
        for (on, step, row), change in (flips or {}).items():
            if on == rank and step < num_steps and row < len(listed):
                h = made[step].h.copy()
                h[row] = (int(h[row]) + change) % FINGERPRINT_PRIME
                made[step] = replace(made[step], h=h)
        batches[rank], layouts[rank] = made, mesh.layout(rank)
    return MemoryRun(batches, name, layouts=layouts)


def _batch(
    step: int, keys: list[EventKey], listed: list[Seen | None], mesh: Mesh, rank: int, sketch: bool
) -> EventBatch:
    first = rank // mesh.tp * (NUM_MICROBATCHES // mesh.dp)
    values = [
        (0, [0.0] * SKETCH) if seen is None else value_of(seen, step, mesh, rank, sketch)
        for seen in listed
    ]
    microbatch = [
        NONE if seen is None or seen.microbatch == NONE else seen.microbatch - first
        for seen in listed
    ]
    share = [
        1.0 / mesh.dp if seen is not None and seen.role == "scalar" else np.nan for seen in listed
    ]
    return EventBatch(
        step=step,
        keys=keys,
        key=np.arange(len(keys), dtype=np.int32),
        seq=step * 1000 + np.arange(len(keys)),
        microbatch=np.array(microbatch, np.int32),
        call=np.zeros(len(keys), np.int32),
        h=np.array([h for h, _ in values], np.uint64),
        s=np.zeros(len(keys), np.uint64),
        value=np.array(share),
        sketch=np.array([taken for _, taken in values]) if sketch else None,
    )
