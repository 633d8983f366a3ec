"""What level `op` costs a training step, beside torch's DebugMode, as ratios.

    python benchmarks/op_cost.py [--rounds 20] [--steps 100] [--json]

The training, on one thread, and how it is measured: `training.py`. Then the memory that Python and
the process hold is read over `--steps` further steps of level op.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import ClassVar

import torch
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import Plain, measure, print_rows, rows_of

import upguard_plugin


class Level(Plain):
    """The training, recorded."""

    config: ClassVar[dict[str, object]] = {}

    def __init__(self, folder):
        super().__init__(folder)
        settings = {"level": "op", "output_dir": str(folder / type(self).__name__)} | self.config
        self.guard = upguard_plugin.enable(self.model, self.optimizer, settings)
        # Between its steps its modes must be off: the other subjects' operators are none of it.
        self.modes = [p for p in self.guard.probes if isinstance(p, TorchDispatchMode)]
        self.pause()

    def pause(self):
        for mode in self.modes:
            mode.detach()

    def resume(self):
        for mode in self.modes:
            mode.attach()

    def step(self):
        self.resume()
        self.train()
        self.guard.step()
        self.pause()

    def close(self):
        self.resume()
        self.guard.close()


class Module(Level):
    name = "level module"
    config: ClassVar = {"level": "module"}


class Op(Level):
    name = "level op"


class OpOutputs(Level):
    name = "level op, outputs only"
    config: ClassVar = {"roles": ["output"]}


class OpOneBlock(Level):
    name = "level op, one module, outputs"
    config: ClassVar = {"roles": ["output"], "modules": ["blocks.1.mlp*"]}


class OpOtherSteps(Level):
    name = "level op, outside its steps"
    config: ClassVar = {"steps": "1000000"}


class Debug(Plain):
    name = "DebugMode, hash_tensor, in and out"

    def step(self):
        with DebugMode() as mode, mode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=True):
            self.train()


class DebugOutputs(Plain):
    name = "DebugMode, hash_tensor, outputs"

    def step(self):
        with DebugMode() as mode, mode.log_tensor_hashes(hash_fn="hash_tensor"):
            self.train()


SUBJECTS = (Plain, Module, Op, OpOutputs, OpOneBlock, OpOtherSteps, Debug, DebugOutputs)


def memory(subject, steps):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="steps over which memory is read")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        subjects = [cls(Path(name)) for cls in SUBJECTS]
        rows = rows_of(measure(subjects, options.rounds))
        held = memory(subjects[SUBJECTS.index(Op)], options.steps) if options.steps else None
        for subject in subjects:
            subject.close()
    if options.json:
        print(json.dumps({"rows": rows, "memory": held}))
        return
    print_rows(rows)
    if held is not None:
        print(f"held over {options.steps} steps of level op: {held}")


if __name__ == "__main__":
    main()
