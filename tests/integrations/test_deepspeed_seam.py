"""The seam against a framework that behaves as DeepSpeed does where it matters; no DeepSpeed."""

from __future__ import annotations

import base64
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from upguard_plugin.errors import ConfigError, UsageError
from upguard_plugin.integrations.deepspeed import patch
from upguard_plugin.integrations.deepspeed.block import find_settings, read_config
from upguard_plugin.trace.batch import NONE
from upguard_plugin.trace.reader import open_trace


class FakeEngine(nn.Module):
    """Counts as DeepSpeedEngine does: `micro_steps` per step(), `global_steps` per boundary."""

    pipeline_parallelism = False

    def __init__(self, model, config):
        super().__init__()
        self.module = model
        self._config = SimpleNamespace(_param_dict=config)
        self.optimizer = self.basic_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.overflow = False
        self.destroyed = False

    def gradient_accumulation_steps(self):
        return self._config._param_dict.get("gradient_accumulation_steps", 1)

    def zero_optimization_stage(self):
        return 0

    def forward(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        if (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0:
            if self.overflow:
                self.skipped_steps += 1
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1
        self.micro_steps += 1

    def destroy(self):
        self.destroyed = True


@pytest.fixture
def deepspeed(monkeypatch):
    """The module as it is after our patch; everything is put back at the end."""
    monkeypatch.delenv("UPGUARD", raising=False)
    module = ModuleType("deepspeed")

    class DeepSpeedEngine(FakeEngine):
        pass

    for name in ("__init__", "forward", "backward", "step", "destroy"):
        setattr(DeepSpeedEngine, name, vars(FakeEngine)[name])

    def initialize(args=None, model=None, config=None, config_params=None):
        engine = DeepSpeedEngine(model, config or config_params)
        return engine, engine.optimizer, None, None

    module.__version__ = "0.19.8"
    module.initialize, module.DeepSpeedEngine = initialize, DeepSpeedEngine
    before = dict(vars(DeepSpeedEngine))
    undo = patch(module)
    yield module
    undo()
    assert module.initialize is initialize
    assert dict(vars(DeepSpeedEngine)) == before


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def train(engine, num_forwards: int) -> None:
    for _ in range(num_forwards):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


def microbatches(run, step: int) -> list[int]:
    batch = open_trace(run).read(0, step)
    rows = [r for r in range(len(batch)) if batch.key_of(r).boundary == "2"]
    return [int(batch.microbatch[r]) for r in rows if batch.key_of(r).role == "output"]


def block(run, **more) -> dict:
    return {"upguard": {"enabled": True, "output_dir": str(run)}, **more}


def test_the_block_alone_records_steps_and_their_microbatches(deepspeed, tmp_path):
    config = block(tmp_path / "run", gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=tiny(), config=config)
    train(engine, 4)
    engine.eval()
    engine(torch.ones(2, 4))  # belongs to no micro-batch of a step
    engine.destroy()

    trace = open_trace(tmp_path / "run")
    assert [(s.iteration, s.mark) for s in trace.steps(0)] == [(0, None), (1, None)]
    assert [microbatches(tmp_path / "run", step) for step in (0, 1)] == [[0, 1], [0, 1]]
    assert trace.end(0).complete and engine.destroyed


def test_without_accumulation_there_are_no_microbatches(deepspeed, tmp_path):
    engine, *_ = deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    train(engine, 2)
    engine.destroy()
    assert microbatches(tmp_path / "run", 1) == [NONE]


def test_a_backward_past_the_engine_is_still_counted(deepspeed, tmp_path):
    config = block(tmp_path / "run", gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=tiny(), config=config)
    for _ in range(2):
        engine(torch.ones(2, 4)).square().mean().backward()
        engine.step()
    engine.destroy()
    assert microbatches(tmp_path / "run", 0) == [0, 1]


def test_a_step_that_overflowed_is_marked_as_skipped(deepspeed, tmp_path):
    engine, *_ = deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    engine.overflow = True
    train(engine, 1)
    engine.overflow = False
    train(engine, 1)
    engine.destroy()
    assert [s.mark for s in open_trace(tmp_path / "run").steps(0)] == ["skipped", None]


def test_the_wraps_on_the_engine_are_there_while_it_is_recorded(deepspeed, tmp_path):
    plain = dict(vars(deepspeed.DeepSpeedEngine))
    engine, *_ = deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    assert vars(deepspeed.DeepSpeedEngine)["step"] is not plain["step"]
    engine.destroy()
    assert dict(vars(deepspeed.DeepSpeedEngine)) == plain


@pytest.mark.parametrize("config", [{}, {"upguard": {"enabled": False}}])
def test_nothing_is_recorded_unless_somebody_says_so(deepspeed, tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    plain = dict(vars(deepspeed.DeepSpeedEngine))
    deepspeed.initialize(model=tiny(), config=config)
    assert dict(vars(deepspeed.DeepSpeedEngine)) == plain
    assert list(tmp_path.iterdir()) == []


def test_upguard_1_records_without_a_block_and_upguard_0_not_even_with_one(
    deepspeed, tmp_path, monkeypatch
):
    monkeypatch.setenv("UPGUARD", "0")
    deepspeed.initialize(model=tiny(), config=block(tmp_path / "off"))
    assert not (tmp_path / "off").exists()

    monkeypatch.setenv("UPGUARD", "1")
    monkeypatch.setenv("UPGUARD_OUTPUT_DIR", str(tmp_path / "on"))
    engine, *_ = deepspeed.initialize(model=tiny(), config={})
    engine.destroy()
    assert open_trace(tmp_path / "on").ranks == (0,)


def test_a_typo_in_the_block_stops_the_job_before_the_engine_is_made(deepspeed):
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=tiny(), config={"upguard": {"enabled": True, "levle": "op"}})
    assert str(caught.value) == (
        "unknown setting 'levle' in the DeepSpeed config, block \"upguard\"\n  nearest  level"
    )


def test_a_deepspeed_that_is_too_old_stops_the_job(deepspeed, tmp_path):
    deepspeed.__version__ = "0.14.5+abc"
    with pytest.raises(UsageError, match=r"cannot record DeepSpeed 0\.14\.5\+abc: UpGuard needs"):
        deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    deepspeed.initialize(model=tiny(), config={})  # not asked for: not our business


def test_a_place_that_has_moved_is_noted_in_the_trace(deepspeed, tmp_path, monkeypatch):
    engine_module = ModuleType("deepspeed.runtime.engine")
    engine_module.DeepSpeedEngine = SimpleNamespace(_take_model_step=1, allreduce_bucket=1)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", engine_module)
    engine, *_ = deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    train(engine, 1)
    engine.destroy()
    assert open_trace(tmp_path / "run").end(0).notes == (
        "DeepSpeed 0.19.8 has no runtime.engine.clip_grad_norm_: "
        "not recorded is the norm and the clipping of ZeRO 0",
    )


def test_an_engine_made_past_initialize_is_reported(deepspeed, tmp_path, capsys):
    deepspeed.DeepSpeedEngine(tiny(), block(tmp_path / "run"))
    assert capsys.readouterr().err == (
        "upguard: not recorded: this engine was not made by deepspeed.initialize, so its block\n"
        'upguard: "upguard" has no effect; call upguard_plugin.enable(engine.module, optimizer)\n'
    )
    deepspeed.DeepSpeedEngine(tiny(), {})
    assert capsys.readouterr().err == ""


def test_a_second_engine_is_reported_and_the_first_goes_on(deepspeed, tmp_path, capsys):
    first, *_ = deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    second, *_ = deepspeed.initialize(model=tiny(), config=block(tmp_path / "run"))
    assert "not recorded: a second DeepSpeed engine in one process" in capsys.readouterr().err
    train(second, 1)
    train(first, 1)
    first.destroy()
    assert len(open_trace(tmp_path / "run").steps(0)) == 1


def test_patching_twice_wraps_once(deepspeed):
    once = deepspeed.initialize
    patch(deepspeed)()
    assert deepspeed.initialize is once


def test_the_config_is_read_in_every_form_that_deepspeed_takes(tmp_path, monkeypatch):
    monkeypatch.delenv("UPGUARD", raising=False)
    content = {"upguard": {"level": "op"}}
    text = json.dumps(content)
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for config in (content, str(path), path, encoded):
        assert dict(read_config(config)) == content
    for arguments in (
        {"config": content},
        {"config_params": content},
        {"args": SimpleNamespace(deepspeed_config=str(path))},
    ):
        assert find_settings(arguments).level == "op"
    assert [read_config(c) for c in (None, "no such file", 5)] == [{}, {}, {}]
