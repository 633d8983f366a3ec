from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import upguard_plugin
from upguard_plugin.errors import ConfigError
from upguard_plugin.integrations.any_loop import find_models, watch
from upguard_plugin.trace.batch import NONE
from upguard_plugin.trace.reader import open_trace


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run directory into which a loop in this process is recorded; the guard is closed by it."""
    run = tmp_path / "run"
    monkeypatch.setenv("UPGUARD_OUTPUT_DIR", str(run))
    original = nn.Module.__call__, torch.optim.Optimizer.__init__
    gc.collect()  # models of earlier tests
    end = watch()
    yield run
    end()
    close_guards()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == original


def close_guards() -> None:
    from upguard_plugin.capture.guard import Guard

    for guard in [o for o in gc.get_objects() if issubclass(type(o), Guard)]:
        guard.close()


def events(run, step: int) -> list[tuple[str, str, int]]:
    """(boundary, role, micro-batch) of the modules' outputs in a step."""
    batch = open_trace(run).read(0, step)
    keys = [batch.key_of(row) for row in range(len(batch))]
    return [
        (key.boundary, key.role, int(batch.microbatch[row]))
        for row, key in enumerate(keys)
        if key.role == "output"
    ]


def steps(run) -> int:
    return len(open_trace(run).steps(0))


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def train(model, optimizer, steps=2, microbatches=1) -> None:
    for _ in range(steps):
        for _ in range(microbatches):
            model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_that_says_nothing_is_recorded_from_its_first_forward(watched):
    model = tiny()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2)
    close_guards()

    assert steps(watched) == 2
    names = [(name, k) for name, _, k in events(watched, 0)]
    once = ["0", "1", "2"]
    assert [n for n in names if n[0] in once] == [(n, k) for k in (0, 1) for n in once]


def test_weights_are_the_same_bits_as_without(watched):
    model = tiny()
    train(model, torch.optim.AdamW(model.parameters()), microbatches=2)
    close_guards()
    recorded = [p.detach().clone() for p in model.parameters()]

    plain = tiny()
    train(plain, torch.optim.AdamW(plain.parameters()), microbatches=2)

    assert all(torch.equal(a, b) for a, b in zip(recorded, plain.parameters(), strict=True))


def test_evaluation_and_frozen_models_do_not_begin_a_step(watched):
    model, teacher = tiny(), tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    teacher(torch.ones(2, 4))
    model.eval()(torch.ones(2, 4))
    assert not watched.exists()

    train(model.train(), optimizer, steps=1)
    close_guards()

    assert steps(watched) == 1


def test_two_models_with_their_optimizers_step_together(watched):
    generator, critic = tiny(), nn.Linear(2, 1)
    first = torch.optim.SGD(generator.parameters(), lr=0.1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(3):
        critic(generator(torch.ones(2, 4))).mean().backward()
        first.step()
        second.step()
    # The last step ends at exit, or at the next forward.
    critic(generator(torch.ones(2, 4)))
    close_guards()

    assert steps(watched) == 3
    expected = ["model0.0", "model0.1", "model0.2", "model0", "model1"]
    assert [name for name, _, _ in events(watched, 1)] == expected


def test_a_script_with_its_own_guard_keeps_it(watched, tmp_path):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with upguard_plugin.enable(model, optimizer, {"output_dir": str(tmp_path / "own")}) as guard:
        for _ in range(2):
            train(model, optimizer, steps=1)
            guard.step()

    assert not watched.exists()
    assert steps(tmp_path / "own") == 2
    assert {k for _, _, k in events(tmp_path / "own", 0)} == {NONE}


def test_a_wrong_setting_stops_the_loop_before_step_0(watched, monkeypatch):
    monkeypatch.setenv("UPGUARD_LEVEL", "modul")
    model = tiny()
    with pytest.raises(ConfigError, match="cannot use level = 'modul'"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_failure_of_ours_does_not_stop_the_loop(watched, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("upguard_plugin.capture.enable.enable", broken)
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]

    train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    message = "upguard: not recorded: this training loop: RuntimeError: out of luck\n"
    assert capsys.readouterr().err == message
    assert not torch.equal(before[0], next(model.parameters()))


def test_the_model_is_the_outermost_module_around_the_call():
    model, other, unrelated = tiny(), nn.Linear(1, 1), nn.Linear(1, 1)
    holder = nn.ModuleDict({"model": model, "unused": nn.Linear(1, 1)})
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    objects = [unrelated, other, holder, *holder.modules()]

    assert find_models(model, [optimizer], objects) == [holder, other]
    assert find_models(other, [optimizer], objects) == [other, holder]


def test_no_parameter_is_in_two_models():
    model = tiny()
    wrappers = [nn.ModuleList([model]), nn.ModuleList([model, nn.Linear(1, 1)])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (found,) = find_models(model, [optimizer], [*wrappers, model])
    assert found in wrappers
