"""Traces for `compare.py`: the same ones every time, without a training behind them.

Two families. *Events*: the boundaries of a transformer (input, output, gradients, weights,
optimizer states of each module), fingerprints drawn at random, 100,000 events a step and rank at
most. *Simulated ranks*: a cluster of which every rank has its index, with a digest for each step,
and only one rank has events, as nothing else of such a pair is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from upguard_plugin.records import Axis, EventKey, Layout
from upguard_plugin.trace import end, index, keys, rank_file
from upguard_plugin.trace.batch import NONE, EventBatch
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.run_directory import claim_run_directory, rank_name, run_id_of
from upguard_plugin.trace.writer import RankWriter

STEP_EVENTS = 100_000  # of a rank; a model of some 100 layers at level module
MAX_STEPS = 1000
SIMULATED_EVENTS = 2000  # of a rank in a step

PARTS = (
    ("start", "param", "value"),
    ("forward", "input", "args.0"),
    ("forward", "output", "out"),
    ("backward", "grad_output", "out"),
    ("backward", "grad_input", "args.0"),
    ("accumulate", "grad", "grad"),
    ("optimizer", "optimizer_state", "exp_avg"),
    ("optimizer", "param", "value"),
)
OF_PARAMETERS = ("param", "grad", "optimizer_state")


def keys_of(num_keys: int) -> list[EventKey]:
    """The events of a step in program order: start, forward, backward, optimizer."""
    made = []
    for phase, role, slot in PARTS:
        for module in range(-(-num_keys // len(PARTS))):
            boundary = f"decoder.layers.{module // 8}.module{module % 8}"
            if role in OF_PARAMETERS:
                boundary += ".weight"
            made.append(EventKey(boundary, phase, role, slot, "bfloat16", (4096, 1024)))
    return made[:num_keys]


def claimed(path: Path, num_ranks: int) -> Path:
    """A run directory with its manifest."""
    path = claim_run_directory(path, rank=0, run_token="benchmark")
    manifest = Manifest(
        run_id_of(path),
        program_digest="p",
        world_size=num_ranks,
        versions={"torch": "2.13.0"},
    )
    write_manifest(path, manifest)
    return path


def write_run(path: Path, num_events: int, num_ranks: int, *, divergent: bool) -> None:
    """A run of about `num_events` events. divergent: one in three, from the middle step on."""
    path = claimed(path, num_ranks)
    of_rank = max(1, num_events // num_ranks)
    num_steps = min(MAX_STEPS, max(2, of_rank // STEP_EVENTS)) if of_rank > 1000 else 2
    first_other = num_steps // 2 if divergent else None
    for rank in range(num_ranks):
        write_rank(path, rank, max(1, of_rank // num_steps), num_steps, first_other)


def write_rank(
    path: Path, rank: int, length: int, num_steps: int, first_other: int | None, **more: Layout
) -> None:
    """All events of a rank, `length` a step."""
    named = keys_of(length)
    in_model = np.array([key.phase in ("forward", "backward") for key in named])
    microbatch = np.where(in_model, 0, NONE).astype(np.int32)
    writer = RankWriter(path, rank, **more)
    for step in range(num_steps):
        generator = np.random.default_rng([rank, step])
        h = generator.integers(0, 1 << 61, length, dtype=np.uint64)
        if first_other is not None and step >= first_other:
            h[length // 3 :: 3] ^= np.uint64(1)
        writer.write(
            EventBatch(
                step=step,
                keys=named,
                key=np.arange(length, dtype=np.int32),
                seq=step * length + np.arange(length),
                microbatch=microbatch,
                call=np.zeros(length, np.int32),
                h=h,
                s=np.zeros(length, np.uint64),
            )
        )
    writer.close("")


@dataclass(frozen=True)
class Cluster:
    """tp 8, pp 8 and the rest dp, as far as the number of ranks goes."""

    num_ranks: int
    num_steps: int

    def layout(self, rank: int) -> Layout:
        tp = 8 if self.num_ranks % 8 == 0 else 1
        pp = 8 if self.num_ranks % 64 == 0 else 1
        inner = self.num_ranks // pp  # ranks of a stage
        stage = rank // inner * inner
        return Layout(
            (
                axis("tp", rank // tp * tp, 1, tp, rank),
                axis("dp", stage + rank % tp, tp, inner // tp, rank),
                axis("pp", rank % inner, inner, pp, rank),
            )
        )


def axis(name: str, first: int, stride: int, size: int, rank: int) -> Axis:
    return Axis(
        name, size, (rank - first) // stride, tuple(first + stride * i for i in range(size))
    )


def write_simulated(path: Path, cluster: Cluster, divergent: bool) -> None:
    """A run of which one rank, in the middle, has events.

    divergent: one in three of them, from the middle step on.
    """
    path = claimed(path, cluster.num_ranks)
    chosen = cluster.num_ranks // 2
    for rank in range(cluster.num_ranks):
        layout = cluster.layout(rank)
        if rank == chosen:
            first_other = cluster.num_steps // 2 if divergent else None
            write_rank(path, rank, SIMULATED_EVENTS, cluster.num_steps, first_other, layout=layout)
        else:
            write_index(path, rank, layout, cluster.num_steps)


def write_index(path: Path, rank: int, layout: Layout, num_steps: int) -> None:
    """A rank's directory as its writer leaves it, but for keys and segments."""
    directory = path / rank_name(rank)
    directory.mkdir(exist_ok=True)
    rows = np.zeros(num_steps, index.RECORD)
    rows["step"] = np.arange(num_steps)
    rows["iteration"] = index.NO_ITERATION
    rows["num_events"] = SIMULATED_EVENTS
    digests = np.random.default_rng([rank, num_steps]).bytes(16 * num_steps)
    rows["digest"] = np.frombuffer(digests, "V16")
    header = index.header_bytes()
    crc = crc32(header)
    for place in range(num_steps):
        crc = crc32(rows[place].tobytes()[:-4], crc)
        rows["chain_crc"][place] = crc
    (directory / index.NAME).write_bytes(header + rows.tobytes())
    for name in (keys.NAME, end.NOTES_NAME):
        (directory / name).touch()
    file = end.EndFile(directory / end.NAME)
    file.write(end.EndRecord(True, "", num_steps, crc, num_notes=0, notes_crc=0))
    file.close()
    rank_file.write(directory, rank_file.RankFile(run_id_of(path), rank, "cpu", layout))
