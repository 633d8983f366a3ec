"""What `upguard compare` costs, as a whole process: wall clock, CPU time, largest memory.

    python benchmarks/compare.py [--events 2300,10000000] [--ranks 1] [--folder DIR] [--jobs 1,2]
                                 [--divergent] [--verify] [--mpiexec] [--rounds N] [--json]
    python benchmarks/compare.py --simulated 10240 [--steps 1000] [--folder DIR] [--jobs 1,2] ...
    python benchmarks/compare.py --across [--events 1000000] [--folder DIR] [--jobs 1,2] ...

Traces are generated (`traces.py`). The target is the baseline, or differs from the middle step on
in one event in three; of simulated ranks, one rank does. A trace that the folder holds already is
used again. Numbers of processes take turns in each round; CPU time is that of all processes of the
command. 100 million events take 1.2 GB a side and a minute to write, 10,240 simulated ranks 1.2 GB.
--across compares 64 ranks (tp 8, dp 8) with 32 (tp 4, dp 8), which see half as many events, and
--divergent then is one bit in the last step (`layout_traces.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from layout_traces import write_layout_run
from traces import Cluster, write_run, write_simulated

BASELINE = "baseline"


@dataclass(frozen=True)
class Case:
    """One comparison, by one process or several."""

    name: str  # of the target: identical or divergent
    size: str  # of the traces
    write: Callable[..., None]  # path, other
    write_target: Callable[..., None] | None = None  # where it is no copy
    options: tuple[str, ...] = ()
    processes: int = 1
    by_mpiexec: bool = False

    def command(self, folder: Path) -> list[str]:
        baseline = made(folder / f"{self.size}-{BASELINE}", partial(self.write, other=False))
        target, is_other = folder / f"{self.size}-{self.name}", self.name != "identical"
        if self.write_target is not None:
            made(target, partial(self.write_target, other=is_other))
        elif is_other:
            made(target, partial(self.write, other=True))
        else:
            made(target, partial(shutil.copytree, baseline))
        jobs = [] if self.processes == 1 or self.by_mpiexec else ["--jobs", str(self.processes)]
        pair = [str(baseline), str(target), *self.options, *jobs]
        line = [sys.executable, "-m", "upguard_plugin.cli", "compare", *pair]
        if self.processes > 1 and self.by_mpiexec:
            mpiexec = str(Path(sys.executable).with_name("mpiexec"))
            line = [mpiexec, "-n", str(self.processes), *line]
        return line

    @property
    def how(self) -> str:
        by = "mpiexec -n" if self.by_mpiexec else "--jobs"
        several = [f"{by} {self.processes}"] if self.processes > 1 else []
        return " ".join([*self.options, *several])


def made(path: Path, write: Callable[[Path], object]) -> Path:
    """The run of that name; written if it is not there."""
    if not path.exists():
        unfinished = path.with_name(f"{path.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write(unfinished)
        unfinished.rename(path)
    return path


def cases(options: argparse.Namespace) -> list[Case]:
    """All comparisons that were asked for, but for the number of processes."""
    if options.simulated:
        cluster = Cluster(options.simulated, options.steps)
        size = f"{options.simulated}-simulated-{options.steps}"
        return [Case("divergent", size, lambda path, other: write_simulated(path, cluster, other))]
    if options.across:
        return [case for events in options.events for case in across(events, options)]
    listed = []
    for events in options.events:

        def write(path: Path, other: bool, events: int = events) -> None:
            write_run(path, events, options.ranks, divergent=other)

        size = f"{events}-{options.ranks}"
        listed.append(Case("identical", size, write))
        if options.divergent:
            listed.append(Case("divergent", size, write))
        if options.verify:
            listed.append(Case("identical", size, write, options=("--verify",)))
    return listed


def across(events: int, options: argparse.Namespace) -> list[Case]:
    """Two layouts of one training."""

    def write(path: Path, other: bool) -> None:
        write_layout_run(path, events, tp=8)

    def write_target(path: Path, other: bool) -> None:
        write_layout_run(path, events // 2, tp=4, divergent=other)

    names = ["identical", "divergent"] if options.divergent else ["identical"]
    return [Case(name, f"{events}-across", write, write_target) for name in names]


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
        [sys.executable, "-c", program, *command],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(library_folder())},
    )
    code, wall, cpu, memory = json.loads(told.stdout)
    return {"exit": code, "wall_s": wall, "cpu_s": cpu, "memory_mib": memory}


def library_folder() -> Path:
    """Where the MPI library lies that was installed with mpi4py, perhaps in another environment."""
    found = importlib.util.find_spec("mpi4py")
    return Path(sys.prefix) if found is None else Path(found.origin).parents[3]


def best(commands: list[list[str]], rounds: int) -> list[dict]:
    """The least of each figure; the commands take turns."""
    runs = [[measured(command) for command in commands] for _ in range(rounds)]
    return [
        {name: min(turn[place][name] for turn in runs) for name in runs[0][place]}
        for place in range(len(commands))
    ]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=numbers, default=[2300, 100_000, 10_000_000])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--simulated", type=int, default=0, help="ranks that have digests only")
    parser.add_argument("--steps", type=int, default=1000, help="of simulated ranks")
    parser.add_argument("--across", action="store_true", help="64 ranks against 32")
    parser.add_argument("--jobs", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--divergent", action="store_true", help="also: other in the middle")
    parser.add_argument("--verify", action="store_true", help="also: every step decoded")
    parser.add_argument("--mpiexec", action="store_true", help="--jobs by mpiexec")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for case in cases(options):
            several = [
                replace(case, processes=number, by_mpiexec=options.mpiexec)
                for number in options.jobs
            ]
            commands = [one.command(folder) for one in several]
            for one, told in zip(several, best(commands, options.rounds), strict=True):
                say(one, told, options.json)


def say(case: Case, told: dict, as_json: bool) -> None:
    if as_json:
        about = {"case": case.name, "size": case.size, "processes": case.processes}
        print(json.dumps(told | about | {"options": case.options}), flush=True)
        return
    print(
        f"{case.size:>20}  {case.name:<9} {case.how:<23} exit {told['exit']}  "
        f"{told['wall_s']:6.2f} s  {told['cpu_s']:6.2f} s CPU  {told['memory_mib']:6.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
