"""What the tests and their ranks say to each other, as JSON. Knows no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
FAULT_STEP = 1  # in which a fault is active


@dataclass(frozen=True)
class Job:
    """One short training of a small Megatron GPT."""

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None  # as tp
    sequence_parallel: bool = False
    distributed: bool = False  # the optimizer
    overlap: bool = False
    dtype: str = "fp32"
    experts: int = 0
    marked: bool = False  # experts as what they are, also where Megatron takes them for dense
    gated: bool = False
    query_groups: int = 4
    recompute: str = ""  # full (layer by layer), pairs (of layers), block, selective
    latent: bool = False  # attention
    qk_layernorm: bool = False
    further_tokens: int = 0  # that are predicted
    fused: bool = False  # gradients are added up in a kernel
    deferred: bool = False  # the output layer's weight has its gradient after all micro-batches
    untied: bool = True
    evaluate: bool = False
    level: str | None = "module"  # None: without capture
    roles: str = ""  # of the events that are recorded, where not all are
    fault: str = ""
    fault_step: int = FAULT_STEP
    smoothing: bool = False  # of labels
    watch: bool = True  # gathers activations
    explicit_groups: bool = False  # given to `attach`, not read from parallel_state
    program: str = ""
    clip: float = 1e6
    layers: int = 4
    hidden: int = 32
    num_steps: int = 2
    num_microbatches: int = 4
    dropout: bool = True  # in bf16
    seed: int = 0  # of weights and data
    sketch: bool = False
    save: str = ""  # folder of a checkpoint to write the first weights to
    load: str = ""  # and to read them from
    ramp: tuple[int, ...] = ()  # micro-batches of each step, where they change

    @property
    def layout(self) -> tuple[int, int, int, int, int]:
        """By which groups are made."""
        return self.tp, self.pp, self.vpp, self.ep, self.tp if self.etp is None else self.etp

    def microbatches_of(self, step: int) -> int:
        """How many micro-batches a step has."""
        return self.ramp[step] if step < len(self.ramp) else self.num_microbatches


def train(jobs: Sequence[Job], folder: Path, num_ranks: int = 2) -> dict[str, list[dict]]:
    """Run the jobs in turn on that many processes. By job: what each rank says of it."""
    in_turn = sorted(jobs, key=lambda job: job.layout)  # groups are made once for each
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in in_turn]))
    inherited = {k: v for k, v in os.environ.items() if "UPGUARD" not in k}
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]  # may name another Megatron
    env = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    processes = []
    for rank in range(num_ranks):
        with (folder / f"rank-{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "tests.megatron_adapter.worker"]
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(num_ranks), str(folder)],
                    cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline_s:
            if any(p.poll() for p in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [r for r, p in enumerate(processes) if p.returncode != 0]
    if failed:
        first = min(failed, key=lambda r: processes[r].returncode < 0)
        raise AssertionError((folder / f"rank-{first}.log").read_text(errors="replace")[-6000:])
    said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(num_ranks)]
    return {job.name: [rank[job.name] for rank in said] for job in jobs}
