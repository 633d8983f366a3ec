"""What `upguard compare` costs, as a whole process: wall clock, CPU time, largest memory.

    python benchmarks/compare.py [--events 2300,10000000] [--ranks 1] [--folder DIR] [--jobs 1,2]
                                 [--divergent] [--verify] [--mpiexec] [--json]

Traces are generated: the boundaries of a transformer (input, output, gradients, weights, optimizer
states of each module), fingerprints drawn at random, 100,000 events a step and rank at most. The
target is the baseline, or differs from the middle step on in one event in three. A trace that the
folder holds already is used again. CPU time is that of all processes of the command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.writer import RankWriter

STEP_EVENTS = 100_000  # of a rank; a model of some 100 layers at level module
MAX_STEPS = 1000


def keys_of(num_keys: int) -> list[EventKey]:
    """The events of a step in program order: start, forward, backward, optimizer."""
    parts = [
        ("start", "param", "value"),
        ("forward", "input", "args.0"),
        ("forward", "output", "out"),
        ("backward", "grad_output", "out"),
        ("backward", "grad_input", "args.0"),
        ("accumulate", "grad", "grad"),
        ("optimizer", "optimizer_state", "exp_avg"),
        ("optimizer", "param", "value"),
    ]
    of_parameters = ("param", "grad", "optimizer_state")
    keys = []
    num_modules = -(-num_keys // len(parts))
    for phase, role, slot in parts:
        for module in range(num_modules):
            boundary = f"decoder.layers.{module // 8}.module{module % 8}"
            if role in of_parameters:
                boundary += ".weight"
            keys.append(EventKey(boundary, phase, role, slot, "bfloat16", (4096, 1024)))
    return keys[:num_keys]


def write_run(path: Path, num_events: int, num_ranks: int, *, divergent: bool) -> None:
    """A run of about `num_events` events, the same every time."""
    path = claim_run_directory(path, rank=0, run_token="benchmark")
    manifest = {
        "run_id": run_id_of(path), "program_digest": "p", "program": "", "world_size": num_ranks,
        "level": "module", "config": {}, "versions": {"torch": "2.13.0"}, "variables": {},
        "command": (), "fingerprint_version": 1, "notes": (),
    }  # fmt: skip
    write_manifest(path, Manifest(**manifest))
    of_rank = max(1, num_events // num_ranks)
    num_steps = min(MAX_STEPS, max(2, of_rank // STEP_EVENTS)) if of_rank > 1000 else 2
    keys = keys_of(max(1, of_rank // num_steps))
    for rank in range(num_ranks):
        write_rank(path, rank, keys, num_steps, divergent)


def write_rank(path: Path, rank: int, keys: list[EventKey], num_steps: int, divergent: bool):
    writer = RankWriter(path, rank)
    length = len(keys)
    for step in range(num_steps):
        generator = np.random.default_rng([rank, step])
        h = generator.integers(0, 1 << 61, length, dtype=np.uint64)
        if divergent and step >= num_steps // 2:
            h[length // 3 :: 3] ^= np.uint64(1)
        in_model = np.array([key.phase in ("forward", "backward") for key in keys])
        batch = EventBatch(
            step=step,
            keys=keys,
            key=np.arange(length, dtype=np.int32),
            seq=step * length + np.arange(length),
            microbatch=np.where(in_model, 0, -1).astype(np.int32),
            call=np.zeros(length, np.int32),
            h=h,
            s=np.zeros(length, np.uint64),
        )
        writer.write(batch)
    writer.close("")


def measured(command: list[str]) -> dict:
    """Exit code, wall and CPU seconds, and the largest memory of one of its processes, MiB."""
    program = (
        "import resource, subprocess, sys, time, json;"
        "start = time.perf_counter();"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps([done.returncode, time.perf_counter() - start,"
        " used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, check=True
    )
    code, wall, cpu, memory = json.loads(told.stdout)
    return {"exit": code, "wall_s": wall, "cpu_s": cpu, "memory_mib": memory}


def best(command: list[str], rounds: int) -> dict:
    runs = [measured(command) for _ in range(rounds)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def made(folder: Path, num_events: int, num_ranks: int, name: str) -> Path:
    path = folder / f"{num_events}-{num_ranks}-{name}"
    if not path.exists():
        unfinished = path.with_name(f"{path.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_run(unfinished, num_events, num_ranks, divergent=name == "divergent")
        unfinished.rename(path)
    return path


def cases(options: argparse.Namespace) -> list[tuple[str, int, list[str], int]]:
    """Name, number of events, options of the command, processes of mpiexec."""
    listed = []
    for events in options.events:
        for jobs in options.jobs:
            extra = ["--jobs", str(jobs)] if jobs > 1 and not options.mpiexec else []
            processes = jobs if options.mpiexec else 1
            listed.append(("identical", events, extra, processes))
            if options.divergent:
                listed.append(("divergent", events, extra, processes))
            if options.verify:
                listed.append(("identical", events, [*extra, "--verify"], processes))
    return listed


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=numbers, default=[2300, 100_000, 10_000_000])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--divergent", action="store_true", help="also: other in the middle")
    parser.add_argument("--verify", action="store_true", help="also: every step decoded")
    parser.add_argument("--mpiexec", action="store_true", help="--jobs by mpiexec")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for name, events, extra, processes in cases(options):
            pair = [str(made(folder, events, options.ranks, n)) for n in ("baseline", name)]
            line = [sys.executable, "-m", "upguard_plugin.cli", "compare", *pair, *extra]
            if processes > 1:
                mpiexec = str(Path(sys.executable).with_name("mpiexec"))
                line = [mpiexec, "-n", str(processes), *line]
            told = best(line, options.rounds)
            told |= {"case": name, "events": events, "ranks": options.ranks, "options": extra}
            told["processes"] = processes
            if options.json:
                print(json.dumps(told), flush=True)
                continue
            how = " ".join([*extra, *([f"mpiexec -n {processes}"] if processes > 1 else [])])
            print(
                f"{events:>11} events  {options.ranks:>5} ranks  {name:<9} {how:<20} "
                f"exit {told['exit']}  {told['wall_s']:6.2f} s  {told['cpu_s']:6.2f} s CPU  "
                f"{told['memory_mib']:6.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
