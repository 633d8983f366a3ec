"""The Hugging Face Trainer, unedited but for a callback."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


class Regression(nn.Module):
    """As the Trainer wants a model: its output begins with the loss."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.hidden, self.head, self.scale = nn.Linear(4, 6), nn.Linear(6, 1), scale

    def forward(self, x, y):
        predicted = self.head(torch.tanh(self.hidden(x)))[:, 0] * self.scale
        return {"loss": (predicted - y).square().mean(), "logits": predicted}


def fine_tune(folder, run=None, scale=1.0) -> list[torch.Tensor]:
    """Two steps of two micro-batches, an evaluation after each; the weights."""
    from transformers import Trainer, TrainingArguments, set_seed

    from upguard_plugin.integrations.torch_native.trainer import UpGuardCallback

    set_seed(0)
    model = Regression(scale)
    rows = [{"x": torch.randn(4), "y": torch.randn(())} for _ in range(12)]
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=2, per_device_train_batch_size=3,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    callbacks = [] if run is None else [UpGuardCallback({"output_dir": str(run)})]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:3], callbacks=callbacks
    )
    trainer.train()
    return [p.detach().clone() for p in model.parameters()]


def test_a_trainer_is_recorded_by_steps_and_microbatches_and_trains_as_without(tmp_path):
    bare = fine_tune(tmp_path / "out")
    for name, scale in (("baseline", 1.0), ("target", 1.0), ("other", 0.5)):
        weights = fine_tune(tmp_path / "out", tmp_path / name, scale)
        assert scale != 1.0 or all(map(torch.equal, weights, bare))
    runs = {name: open_trace(tmp_path / name) for name in ("baseline", "target", "other")}

    batches = [runs["baseline"].read(0, step) for step in (0, 1)]
    assert [batch.iteration for batch in batches] == [0, 1]
    assert {0, 1} <= {int(k) for batch in batches for k in batch.microbatch}
    phases = {batches[1].key_of(row).phase for row in range(len(batches[1]))}
    assert {"start", "data", "forward", "eval", "accumulate", "clip", "optimizer"} <= phases
    assert check_run(runs["baseline"], Selection()).broken == []
    assert compare_runs(runs["baseline"], runs["target"]).verdict == "identical"
    first = compare_runs(runs["baseline"], runs["other"]).first_divergence
    assert (first.step, first.microbatch, first.phase) == (0, 0, "forward")
