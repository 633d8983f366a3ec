"""Hugging Face's Trainer and Accelerate with a DeepSpeed config that has our block."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_training import block
from hugging_face_training import accelerate, ds_config, fine_tune

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.trace.reader import open_trace

NEEDED = ("deepspeed", "transformers", "accelerate")
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in NEEDED), reason=f"needs {NEEDED}"
    ),
]


@pytest.mark.parametrize(
    "train, microbatches",
    [(fine_tune, {-1, 0, 1}), (accelerate, {-1})],
    ids=["trainer", "accelerate"],
)
def test_a_loop_with_the_block_is_recorded_and_keeps_its_weights(
    deepspeed_ranks, tmp_path, train, microbatches
):
    plain = deepspeed_ranks.run(train, str(tmp_path), 2, None)
    runs = [tmp_path / "baseline", tmp_path / "target"]
    recorded = [deepspeed_ranks.run(train, str(tmp_path), 2, block(run)) for run in runs]

    for rank in (0, 1):
        for name, weight in plain[rank].items():
            assert weight.equal(recorded[0][rank][name]), f"capture changed {name}"
    baseline, target = map(open_trace, runs)
    found = compare_runs(baseline, target)
    assert found.verdict == "identical", found.notes
    assert [step.iteration for step in baseline.steps(0)] == [0, 1]
    batch = baseline.read(0, 1)
    assert set(batch.microbatch.tolist()) == microbatches
    roles = {(key.boundary, key.role) for key in batch.keys}
    assert ("transformer.h.0.mlp.c_fc.weight", "master") in roles
    assert ("input_ids", "data") in roles


SCRIPT = """
import json, sys
from pathlib import Path
from accelerate.utils.deepspeed import HfDeepSpeedConfig
config = HfDeepSpeedConfig(json.loads(Path(sys.argv[1]).read_text()))
"""


@pytest.mark.parametrize("enabled, says", [(True, True), (False, False)])
def test_a_block_that_no_engine_ever_sees_is_said(tmp_path, enabled, says):
    config = ds_config(2, block(tmp_path / "run") | {"enabled": enabled})
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UPGUARD")}
    done = subprocess.run(
        [sys.executable, "train.py", "ds.json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert ('has a block "upguard", and DeepSpeed trained nothing' in done.stderr) is says


WITHOUT_DEEPSPEED = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hugging_face_training import Tokens
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=1, report_to=[], save_strategy="no",
    disable_tqdm=True, deepspeed=json.loads(Path("ds.json").read_text()),
)
config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens()).train()
"""


@pytest.mark.long
def test_accelerate_launch_on_cpus_says_that_the_block_had_no_effect(tmp_path):
    config = ds_config(2, block(tmp_path / "run"))
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(WITHOUT_DEEPSPEED)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UPGUARD")}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*launch, "train.py", str(Path(__file__).parent)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "DeepSpeed trained nothing" in done.stderr
    assert not (tmp_path / "run").exists()
