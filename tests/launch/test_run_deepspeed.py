"""`upguard run` and the config block through the real `deepspeed` command, on two CPU workers."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest

from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

ROOT = Path(__file__).parents[2]
PARTS = ("integrations", "launch")  # folders that are installed inside the package
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # <linux/prctl.h>, <linux/capability.h>

# `mode` is what happens in the second step of rank 1.
TRAIN = """
import argparse, os, sys
import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--mode", default="finish")
parser.add_argument("--note")
arguments = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
engine, *_ = deepspeed.initialize(arguments, model, model_parameters=model.parameters())
torch.manual_seed(engine.global_rank)
for forward in range(4):
    if forward == 2 and arguments.mode == "fail" and engine.global_rank == 1:
        sys.exit(5)
    if forward == 2 and arguments.mode == "wait":
        print("waiting", flush=True)
        import signal; signal.pause()
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    engine.step()
total = sum(p.detach().double().sum() for p in model.parameters()).item()
sys.stdout.write(f"total {total!r} note {arguments.note!r}\\n")
"""
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
}
DEEPSPEED = str(Path(sysconfig.get_path("scripts")) / "deepspeed")
RUN = [sys.executable, "-m", "upguard_plugin.cli", "run", "--output", "run", "--"]
TWO_WORKERS = [DEEPSPEED, "--num_gpus", "2", "my code/train.py", "--deepspeed_config", "ds.json"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [n for n in os.environ if n.startswith("UPGUARD")]:
        monkeypatch.delenv(name)
    Path("my code").mkdir()
    Path("my code/train.py").write_text(TRAIN)
    Path("ds.json").write_text(json.dumps(CONFIG))


def call(*command: str, timeout_s=400, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **kwargs)


def totals(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("total "))


def test_the_block_in_the_json_config_is_all_a_user_writes():
    plain = call(*TWO_WORKERS, "--note", "a b  c")
    block = {"upguard": {"enabled": True, "output_dir": "run"}}
    Path("ds.json").write_text(json.dumps(CONFIG | block))

    done = call(*TWO_WORKERS, "--note", "a b  c")

    assert done.returncode == 0, done.stderr
    assert len(totals(plain.stdout)) == 2 and "note 'a b  c'" in plain.stdout
    assert totals(done.stdout) == totals(plain.stdout)
    trace = open_trace(Path("run"))
    assert trace.ranks == (0, 1)
    assert [len(trace.steps(rank)) for rank in trace.ranks] == [2, 2]


def test_a_failing_rank_leaves_the_trace_and_its_exit_code():
    done = call(*RUN, *TWO_WORKERS, "--mode", "fail")

    assert done.returncode == 5
    assert "upguard: the command ended with exit code 5" in done.stderr
    trace = open_trace(Path("run"))
    assert trace.ranks == (0, 1)
    assert [len(trace.steps(rank)) for rank in trace.ranks] == [1, 1]


def test_ctrl_c_ends_all_workers_and_keeps_the_trace():
    child, terminal = pty.fork()
    if child == 0:
        os.execv(RUN[0], [*RUN, *TWO_WORKERS, "--mode", "wait"])
    said = ""
    with os.fdopen(terminal, "rb", buffering=0) as screen, suppress(OSError):  # the end of a pty
        while chunk := screen.read(4096):
            before = said.count("waiting")
            said += chunk.decode(errors="replace")
            if before < 2 <= said.count("waiting"):
                os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) != 0
    assert "upguard: trace in run: 2 ranks" in said
    assert open_trace(Path("run")).ranks == (0, 1)


PIPELINE = """
import argparse, sys
import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
arguments = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)]
model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
engine, *_ = deepspeed.initialize(arguments, model, model_parameters=[*model.parameters()])
torch.manual_seed(1)
batches = iter([(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(4)])
for _ in range(2):
    engine.train_batch(batches)
total = sum(p.detach().double().sum() for p in model.parameters()).item()
sys.stdout.write(f"total {total!r} of stage {engine.stage_id}\\n")
"""


@pytest.mark.long
def test_two_pipeline_stages_repeat_themselves_and_compute_what_they_did_without():
    Path("my code/train.py").write_text(PIPELINE)
    Path("ds.json").write_text(json.dumps(CONFIG | {"train_batch_size": 4}))
    plain = call(*TWO_WORKERS)
    done = call(*RUN[:-1], "--repeat", "2", "--", *TWO_WORKERS)

    assert done.returncode == 0, done.stderr
    assert totals(done.stdout) == sorted(2 * totals(plain.stdout))
    assert len(totals(plain.stdout)) == 2
    compared = call(sys.executable, "-m", "upguard_plugin.cli", "compare", "run/1", "run/2")
    assert compared.stdout.startswith("IDENTICAL")
    outputs = {}
    for rank in (0, 1):
        batch = open_trace(Path("run/1")).read(rank, 1)
        rows = [r for r in range(len(batch)) if batch.key_of(r).boundary == "(root)"]
        of_phase = [(batch.key_of(r).phase, int(batch.microbatch[r])) for r in rows]
        outputs[rank] = sorted(set(of_phase))
    both = [("backward", 0), ("backward", 1), ("forward", 0), ("forward", 1)]
    assert outputs == {0: both, 1: both}


def without_override() -> None:
    """What may write everywhere may not any more: for the user root, too, a mode is a mode."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_an_install_that_nobody_can_write_to_records_as_any_other(monkeypatch):
    package = Path("site/upguard_plugin")
    for source, target in (("upguard_plugin", package), *((n, package / n) for n in PARTS)):
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [path for path in Path("site").rglob("*") if path.is_dir()]
    monkeypatch.setenv("PYTHONPATH", str(Path("site").absolute()))
    Path("ds.json").write_text(json.dumps(CONFIG | {"train_batch_size": 4}))
    monkeypatch.setenv("HOME", str(Path.cwd()))  # kernels are cached there
    for folder in folders:
        folder.chmod(0o555)
    try:
        # One worker, and time: without their cache, kernels are compiled once more.
        one_worker = [*RUN, DEEPSPEED, "--num_gpus", "1", *TWO_WORKERS[3:]]
        done = call(*one_worker, timeout_s=900, preexec_fn=without_override)
        written = list(Path("site").rglob("__pycache__"))
    finally:
        for folder in folders:
            folder.chmod(0o755)

    assert done.returncode == 0, done.stderr
    assert written == []
    trace = open_trace(Path("run"))
    assert len(trace.steps(0)) == 2 and trace.end(0).complete
