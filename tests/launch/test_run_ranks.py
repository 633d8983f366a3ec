"""`upguard run` with real launchers and real ranks: a hand-written loop, unedited, is recorded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from upguard_plugin.trace.reader import open_trace

# A data-parallel loop as people write it. `die RANK` ends one rank in the middle of step 7.
TRAIN = r"""
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("RANK", os.environ.get("PMI_RANK", "0"))
os.environ.setdefault("WORLD_SIZE", os.environ.get("PMI_SIZE", "1"))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)
for step in range(8 if "die" in sys.argv else 3):
    loss = model(torch.randn(2, 4)).square().mean()
    if step == 7 and sys.argv[1:] == ["die", str(rank)]:
        os._exit(9)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.detach().double().sum() for p in model.parameters())
sys.stdout.write(f"rank {rank} {total.item()!r} {sys.argv[1:]}\n")  # one write: lines stay whole
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [n for n in os.environ if n.startswith("UPGUARD")]:
        monkeypatch.delenv(name)
    Path("train.py").write_text(TRAIN)


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return call(sys.executable, "-m", "upguard_plugin.cli", "run", "--", *command)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def results(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def test_all_ranks_of_torchrun_are_in_one_run_and_compute_what_they_did_without():
    plain = call(*TORCHRUN, "train.py", "a b")
    done = run(*TORCHRUN, "train.py", "a b")

    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == results(plain.stdout)
    assert len(results(plain.stdout)) == 2
    trace = open_trace(Path("runs/train-1"))
    assert trace.ranks == (0, 1)
    assert [len(trace.steps(rank)) for rank in trace.ranks] == [3, 3]
    assert all(trace.end(rank).complete for rank in trace.ranks)
    assert done.stderr.splitlines()[-2:] == [
        "upguard: trace in runs/train-1: 2 ranks, 3 steps",
        "  compare it  upguard compare runs/train-1 OTHER_RUN",
    ]


def test_when_a_rank_dies_the_trace_of_all_ranks_is_kept():
    done = run(*TORCHRUN, "train.py", "die", "1")

    assert done.returncode == 1
    assert "upguard: the command ended with exit code 1" in done.stderr
    trace = open_trace(Path("runs/train-1"))
    assert trace.ranks == (0, 1)
    # Seven steps were done; one may have been about to be written, and four were allowed to wait.
    assert all(2 <= len(trace.steps(rank)) <= 7 for rank in trace.ranks)
    assert not trace.end(1).complete
    assert "  incomplete  rank 1: still running or killed" in done.stderr


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs an mpiexec")
def test_ranks_of_mpiexec_are_in_one_run(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    done = run("mpiexec", "-n", "2", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert open_trace(Path("runs/train-1")).ranks == (0, 1)


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=8)
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(64, (16, 8))
arguments = TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=[dict(input_ids=t, labels=t) for t in tokens]).train()
print("total", sum(p.detach().double().sum() for p in model.parameters()).item())
"""


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_hugging_face_trainer_is_recorded_with_its_microbatches():
    Path("trainer.py").write_text(TRAINER)
    plain = call(sys.executable, "trainer.py")
    done = run(sys.executable, "trainer.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    trace = open_trace(Path("runs/trainer-1"))
    assert len(trace.steps(0)) == 2
    batch = trace.read(0, 1)
    rows = [r for r in range(len(batch)) if batch.key_of(r).boundary == "transformer.h.0"]
    outputs = [int(batch.microbatch[r]) for r in rows if batch.key_of(r).role == "output"]
    assert sorted(set(outputs)) == [0, 1]
