"""What recording costs a training step, side by side with other tools, as ratios.

    python benchmarks/step_cost.py [--rounds 20] [--json]

The training, on one thread, and how it is measured: `training.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from training import (
    BATCH,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Gpt,
    Plain,
    measure,
    print_rows,
    rows_of,
)

import upguard_plugin
from upguard_plugin.fingerprint.queue import FingerprintQueue


class Hashing(Plain):
    """The plain step, then as many bytes hashed as level module hashes in a step."""

    name = "plain + hashing alone"

    def __init__(self, folder):
        super().__init__(folder)
        self.queue = FingerprintQueue()
        self.buffer = torch.zeros(1 << 18)  # 1 MiB: no event of this model is much larger

    def step(self):
        self.train()
        for _ in range(bytes_hashed() >> 20):
            self.queue.put(self.buffer)
        self.queue.take()


class UpGuard(Plain):
    level = "module"

    def __init__(self, folder):
        super().__init__(folder)
        config = {"output_dir": str(folder / self.level), "level": self.level}
        self.guard = upguard_plugin.enable(self.model, self.optimizer, config)

    def step(self):
        self.train()
        self.guard.step()

    def close(self):
        self.guard.close()


class Module(UpGuard):
    name = "upguard, level module"


class Debug(Plain):
    """torch's DebugMode with hashes of outputs."""

    name = "DebugMode, hash_tensor of outputs"

    def step(self):
        from torch.utils._debug_mode import DebugMode

        with DebugMode() as mode, mode.log_tensor_hashes(hash_fn="hash_tensor"):
            self.train()


class Msprobe(Plain):
    """msprobe at level L0 with md5 of everything a module passes."""

    name = "msprobe, L0 md5"

    def __init__(self, folder):
        from msprobe.pytorch import PrecisionDebugger

        super().__init__(folder)
        settings = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"}
        config = {"task": "statistics", "rank": [], "step": [], "level": "L0"}
        path = folder / "msprobe.json"
        path.write_text(json.dumps({**config, "statistics": settings}))
        self.debugger = PrecisionDebugger(str(path), dump_path=str(folder / "msprobe"))

    def step(self):
        self.debugger.start(model=self.model)
        self.train()
        self.debugger.stop()
        self.debugger.step()


def bytes_hashed():
    """Bytes that level module hashes in one step of this model, parameters and states included."""
    activation = 4 * BATCH * SEQUENCE * WIDTH
    # In activations: what a block's ten modules take and return, their gradients counted once.
    forward = LAYERS * 33 * activation + 8 * activation + 3 * 4 * BATCH * SEQUENCE * VOCABULARY
    backward = LAYERS * 20 * activation + 4 * activation + 4 * BATCH * SEQUENCE * VOCABULARY
    parameters = 4 * sum(p.numel() for p in Gpt().parameters())
    return forward + backward + 8 * parameters


def make_subjects(folder):
    subjects, skipped = [], {}
    for cls in (Plain, Hashing, Module, Debug, Msprobe):
        try:
            subjects.append(cls(folder))
        except ImportError as error:
            skipped[cls.name] = f"not installed ({error.name})"
    return subjects, skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        subjects, skipped = make_subjects(Path(folder))
        times = measure(subjects, options.rounds)
        for subject in subjects:
            subject.close()
    rows = rows_of(times)
    if options.json:
        print(json.dumps({"rows": rows, "skipped": skipped}))
        return
    print_rows(rows)
    for name, reason in skipped.items():
        print(f"{name:<36} skipped: {reason}")


if __name__ == "__main__":
    main()
