"""What level stage costs a DistributedDataParallel training on two gloo processes, as a ratio.

    python benchmarks/collectives_cost.py [--rounds 20] [--level stage] [--alone]

The model is that of step_cost.py, on one thread per process. In each round both ranks take one step
without a guard and one step with it, on copies of their own, in turns that change from round to
round. A ratio is the median over the rounds of rank 0: by the clock, and by the CPU time of all
threads, which neighbours on the machine disturb less. With --alone the state of the model and the
optimizer is left out: what remains is the share of the collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed as dist
from torch import nn
from training import BATCH, SEQUENCE, VOCABULARY, Gpt

import upguard_plugin
from upguard_plugin.capture.collectives import CollectiveProbe

WARM_UP = 4  # DDP makes its buckets anew after the first step; kernels are compiled in it


class Subject:
    """One copy of the training."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(Gpt())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def step(self):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=self.data)
        logits = self.model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Guarded(Subject):
    """The same with a guard; its collective probe is out while the other copy steps."""

    def __init__(self, folder, level, alone):
        super().__init__()
        config = {"output_dir": folder, "level": level}
        self.guard = upguard_plugin.enable(self.model, self.optimizer, config)
        probes = [p for p in self.guard.probes if isinstance(p, CollectiveProbe)]
        (self.collectives,) = probes
        self.collectives.detach()
        if alone:
            for probe in self.guard.probes:
                probe.detach()

    def step(self):
        super().step()
        self.guard.step()


def measure(rank, folder, rounds, level, alone):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    plain, guarded = Subject(), Guarded(str(Path(folder) / "run"), level, alone)
    clock, cpu = [], []
    for round_number in range(WARM_UP + rounds):
        taken = {}
        for subject in (plain, guarded) if round_number % 2 else (guarded, plain):
            if subject is guarded:
                guarded.collectives.attach()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            subject.step()
            taken[subject] = time.perf_counter() - start[0], time.process_time() - start[1]
            if subject is guarded:
                guarded.collectives.detach()
        if round_number >= WARM_UP:
            clock.append(taken[guarded][0] / taken[plain][0])
            cpu.append(taken[guarded][1] / taken[plain][1])
    guarded.guard.close()
    if rank == 0:
        result = {
            "level": level,
            "alone": alone,
            "rounds": rounds,
            "clock": round(statistics.median(clock), 3),
            "cpu": round(statistics.median(cpu), 3),
        }
        print(json.dumps(result))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--level", default="stage")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.rounds, options.level, options.alone)
        multiprocessing.spawn(measure, arguments, nprocs=2)


if __name__ == "__main__":
    main()
