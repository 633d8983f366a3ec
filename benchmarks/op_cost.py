"""What level `op` costs a training step, beside torch's DebugMode, as ratios.

    python benchmarks/op_cost.py [--rounds 20] [--steps 100] [--json]

The model is the GPT of `tests/bugs/gpt.py` (4 layers, d = 256, sequence 128, batch 4, vocabulary
1024, fp32), with AdamW(foreach=False), on one thread. Every subject trains its own copy; their
steps take turns in one process, so that a noisy machine is noisy for all. A ratio is the median,
over the rounds, of a subject's step by the plain step of the same round: by the clock, and by the
CPU time of all threads, which neighbours on the machine disturb less. Then the memory that Python
and the process hold is read over `--steps` further steps of level op.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import ClassVar

import torch
from torch.utils._debug_mode import DebugMode

import upguard_plugin
from tests.bugs.gpt import GPT

BATCH = 4


class Plain:
    """One copy of the training, without a tool."""

    name = "plain"

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.data = torch.Generator().manual_seed(1)

    def train(self) -> None:
        shape = (BATCH, self.model.length + 1)
        text = torch.randint(self.model.vocabulary, shape, generator=self.data)
        self.model.loss(text[:, :-1], text[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.train()

    def close(self) -> None:
        """Nothing to close."""


class Level(Plain):
    """The training, recorded."""

    config: ClassVar[dict[str, object]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        settings = {"level": "op", "output_dir": str(folder / type(self).__name__)} | self.config
        self.guard = upguard_plugin.enable(self.model, self.optimizer, settings)
        # Between its steps its modes must be off: the other subjects' operators are none of it.
        self.pause()

    def pause(self) -> None:
        for probe in self.guard.probes:
            if isinstance(probe, torch.utils._python_dispatch.TorchDispatchMode):
                probe.detach()

    def resume(self) -> None:
        for probe in self.guard.probes:
            if isinstance(probe, torch.utils._python_dispatch.TorchDispatchMode):
                probe.attach()

    def step(self) -> None:
        self.resume()
        self.train()
        self.guard.step()
        self.pause()

    def close(self) -> None:
        self.resume()
        self.guard.close()


class Module(Level):
    name = "level module"
    config: ClassVar[dict[str, object]] = {"level": "module"}


class Op(Level):
    name = "level op"


class OpOutputs(Level):
    name = "level op, outputs only"
    config: ClassVar[dict[str, object]] = {"roles": ["output"]}


class Debug(Plain):
    name = "DebugMode, hash_tensor, in and out"

    def step(self) -> None:
        with DebugMode() as mode, mode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=True):
            self.train()


def measure(subjects: list[Plain], rounds: int) -> list[dict[str, object]]:
    times: dict[str, list[tuple[float, float]]] = {subject.name: [] for subject in subjects}
    for round_ in range(rounds + 2):
        for subject in subjects:
            wall, cpu = time.perf_counter(), time.process_time()
            subject.step()
            if round_ >= 2:
                spent = (time.perf_counter() - wall, time.process_time() - cpu)
                times[subject.name].append(spent)
    rows = []
    for name, own in times.items():
        pairs = list(zip(own, times["plain"], strict=True))
        rows.append(
            {
                "subject": name,
                "step_ms": round(1e3 * statistics.median(wall for wall, _ in own), 1),
                "wall_ratio": round(statistics.median(t[0] / p[0] for t, p in pairs), 3),
                "cpu_ratio": round(statistics.median(t[1] / p[1] for t, p in pairs), 3),
            }
        )
    return rows


def memory(subject: Plain, steps: int) -> dict[str, object]:
    """KiB that Python and the process hold after a third of the steps, and at their end."""
    seen = []
    tracemalloc.start()
    for step in range(steps):
        subject.step()
        if step in (steps // 3, steps - 1):
            gc.collect()
            held = int(Path("/proc/self/statm").read_text().split()[1]) * 4
            seen.append((tracemalloc.get_traced_memory()[0] // 1024, held))
    tracemalloc.stop()
    return {"python_kib": [s[0] for s in seen], "process_kib": [s[1] for s in seen]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="steps over which memory is read")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subjects = [cls(folder) for cls in (Plain, Module, Op, OpOutputs, Debug)]
        rows = measure(subjects, options.rounds)
        held = memory(subjects[2], options.steps) if options.steps else None
        for subject in subjects:
            subject.close()
    if options.json:
        print(json.dumps({"rows": rows, "memory": held}))
        return
    print(f"{'subject':<36} {'step':>10} {'wall':>8} {'CPU':>8}")
    for row in rows:
        ratios = f"{row['wall_ratio']:7.3f}x {row['cpu_ratio']:7.3f}x"
        print(f"{row['subject']:<36} {row['step_ms']:7.1f} ms {ratios}")
    if held is not None:
        print(f"held over {options.steps} steps of level op: {held}")


if __name__ == "__main__":
    main()
