"""Traces of one training in two layouts, for `compare.py --across`: every tensor's parts add up.

A stack of layers, each a norm, a column-parallel and a row-parallel product: weights, activations,
gradients and optimizer states on tp x dp ranks, one micro-batch of four samples on each dp index.
Logical fingerprints are drawn at random and cut into random parts that add up to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from traces import axis, claimed

from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import FINGERPRINT_PRIME, EventKey, Group, Layout
from upguard_plugin.trace.batch import NONE, EventBatch
from upguard_plugin.trace.writer import RankWriter

DP = 8
NUM_LAYERS = 70
SAMPLES = 4
PRIME = np.uint64(FINGERPRINT_PRIME)
HIDDEN = 64

WEIGHTS = {"norm.weight": "h", "fc1.weight": "o[tp] i", "fc2.weight": "o i[tp]"}
MODULES = {"norm": ("b h", "b h"), "fc1": ("b h", "b o[tp]"), "fc2": ("b o[tp]", "b h")}
ALL_REDUCE = EventKey(
    "all_reduce[tp]", "forward", "output", "0", "bfloat16", (SAMPLES, HIDDEN), op="all_reduce sum"
)
STATES = (
    ("start", "param", "value"),
    ("grad_sync", "grad", "grad"),
    ("optimizer", "optimizer_state", "exp_avg"),
    ("optimizer", "optimizer_state", "exp_avg_sq"),
    ("optimizer", "param", "value"),
)


@dataclass(frozen=True)
class Seen:
    """An event of a layer: where a rank sees it, and how its tensor is cut."""

    key: EventKey
    spec: str | None  # None: of a collective

    @property
    def is_cut(self) -> bool:
        return self.spec is not None and "tp" in self.spec

    @property
    def of_samples(self) -> bool:
        return self.key.phase in ("data", "forward", "backward")


@dataclass(frozen=True)
class Mesh:
    """tp x dp ranks, tp inside."""

    tp: int

    @property
    def num_ranks(self) -> int:
        return self.tp * DP

    def layout(self, rank: int) -> Layout:
        return Layout(
            (
                axis("tp", rank // self.tp * self.tp, 1, self.tp, rank),
                axis("dp", rank % self.tp, self.tp, DP, rank),
            )
        )


def seen_in_a_step() -> list[Seen]:
    """What every rank sees, in program order, but for the placements."""
    layers = range(NUM_LAYERS)
    listed = [
        Seen(EventKey("tokens", "data", "sample", str(i), "int64", (HIDDEN,)), None)
        for i in range(SAMPLES)
    ]
    listed = [*states(layers, STATES[0]), *listed]
    for layer in layers:
        listed += calls(layer, "forward", ("input", "output"), MODULES)
    for layer in reversed(layers):
        listed += calls(
            layer, "backward", ("grad_output", "grad_input"), dict(reversed(MODULES.items()))
        )
    for state in STATES[1:]:
        listed += states(layers, state)
    return listed


def states(layers: range, state: tuple[str, str, str]) -> list[Seen]:
    return [
        seen(f"layers.{layer}.{name}", state, spec)
        for layer in layers
        for name, spec in WEIGHTS.items()
    ]


def calls(layer: int, phase: str, roles: tuple[str, str], modules: dict) -> list[Seen]:
    """The modules of a layer; a row-parallel output is summed before it is seen."""
    made = []
    for name, specs in modules.items():
        for role, spec in zip(roles, specs if phase == "forward" else specs[::-1], strict=True):
            if (name, role) == ("fc2", "output"):
                made.append(Seen(ALL_REDUCE, None))
            made.append(seen(f"layers.{layer}.{name}", (phase, role, "0"), spec))
    return made


def seen(boundary: str, what: tuple[str, str, str], spec: str) -> Seen:
    return Seen(EventKey(boundary, *what, "bfloat16", shape_of(spec)), spec)


def shape_of(spec: str) -> tuple[int, ...]:
    return tuple(SAMPLES if dim == "b" else HIDDEN for dim in spec.split())


def placed(one: Seen, mesh: Mesh, rank: int) -> EventKey:
    """The key as this rank has it, with its part's shape and placement."""
    key, layout = one.key, mesh.layout(rank)
    if key.op is not None:
        return replace(key, group=Group("tp", layout.axes[0].ranks))
    if one.spec is None:
        return key
    shape = tuple(
        size // (mesh.tp if "tp" in dim else 1)
        for size, dim in zip(key.shape, one.spec.split(), strict=True)
    )
    return replace(key, shape=shape, placement=resolve_placement(one.spec, shape, layout))


def write_layout_run(path: Path, num_events: int, tp: int, *, divergent: bool = False) -> None:
    """A run on tp x 8 ranks. num_events: of all ranks; steps hold some 2,000 each.

    divergent: one bit of one activation, on the last rank and in the last step.
    """
    mesh, listed = Mesh(tp), seen_in_a_step()
    path = claimed(path, mesh.num_ranks)
    num_steps = max(2, num_events // (len(listed) * mesh.num_ranks))
    for rank in range(mesh.num_ranks):
        keys = [placed(one, mesh, rank) for one in listed]
        writer = RankWriter(path, rank, layout=mesh.layout(rank))
        for step in range(num_steps):
            h = words(listed, step, mesh, rank)
            if divergent and (rank, step) == (mesh.num_ranks - 1, num_steps - 1):
                h[len(h) // 3] ^= np.uint64(1)
            writer.write(batch(step, keys, listed, h))
        writer.close("")


def words(listed: list[Seen], step: int, mesh: Mesh, rank: int) -> np.ndarray:
    """The fingerprints of a rank's parts: those of all tp ranks add up to the whole's."""
    dp, tp = divmod(rank, mesh.tp)
    of_samples = np.array([one.of_samples for one in listed])
    is_cut = np.array([one.is_cut for one in listed])
    whole = np.where(of_samples, drawn(step, dp, len(listed)), drawn(step, DP, len(listed)))
    # The last part is what the others leave; a replica is the whole.
    part = whole
    for index in range(mesh.tp - 1):
        share = np.where(
            of_samples, drawn(step, dp, len(listed), index), drawn(step, DP, len(listed), index)
        )
        if index == tp:
            part = share
            break
        part = (part + (PRIME - share)) % PRIME
    return np.where(is_cut, part, whole)


def drawn(*seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, FINGERPRINT_PRIME, seed[2], dtype=np.uint64)


def batch(step: int, keys: list[EventKey], listed: list[Seen], h: np.ndarray) -> EventBatch:
    length = len(keys)
    return EventBatch(
        step=step,
        keys=keys,
        key=np.arange(length, dtype=np.int32),
        seq=step * length + np.arange(length),
        microbatch=np.where([one.of_samples for one in listed], 0, NONE).astype(np.int32),
        call=np.zeros(length, np.int32),
        h=h,
        s=np.zeros(length, np.uint64),
    )
