from __future__ import annotations

import random

import numpy as np
import torch
from state_run import first_difference, recording
from torch import nn

from upguard_plugin.capture.rng import generator_state, numpy_state, python_state, read_generators


def draws():
    return random.random(), np.random.rand(), torch.rand(3).tolist()


def seed_all():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def test_looking_moves_no_generator():
    seed_all()
    expected = draws()

    seed_all()
    states = [list(read_generators({}, {})) for _ in range(2)]

    assert states[0] == states[1]
    assert draws() == expected


def test_every_draw_shows_even_one_that_is_kept_for_later():
    # A normal draw computes two values; the second one waits in the state, not in the words.
    for state, draw in [
        (python_state, lambda: random.gauss(0, 1)),
        (numpy_state, lambda: np.random.randn()),
        (lambda: generator_state(torch.default_generator), lambda: torch.randn(1)),
    ]:
        seed_all()
        states = [state()]
        for _ in range(2):
            draw()
            states.append(state())
        assert len(set(states)) == 3


def test_the_same_seed_gives_the_same_state():
    seed_all()
    first = dict(read_generators({}, {}))
    draws()
    seed_all()

    assert dict(read_generators({}, {})) == first
    assert set(first) >= {"rng.python", "rng.numpy", "rng.torch_cpu"}


def test_generators_of_modules_and_adapters_are_named():
    # CASES 23: each rank owns a generator "expert".
    model = nn.ModuleDict({"gate": nn.Linear(2, 2)})
    model.expert = torch.Generator().manual_seed(1)
    model["gate"].noise = torch.Generator().manual_seed(2)
    modules = {"(root)": model, "gate": model["gate"]}
    sources = {"tracker": torch.Generator().manual_seed(1), "other": lambda: b"state"}

    found = dict(read_generators(modules, sources))

    assert found["rng.expert"] == found["rng.tracker"] != found["rng.gate.noise"]
    assert found["rng.other"] == b"state"
    before = found["rng.expert"]
    torch.rand(1, generator=model.expert)
    assert dict(read_generators(modules, sources))["rng.expert"] != before


def run_dropout(between=None):
    """Two steps with dropout; `between(step)` runs between a layer and the dropout behind it."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x):
            hidden = self.layer(x)
            if between is not None:
                between(guard.position.step)
            return self.drop(hidden)

    seed_all()
    model = Drops()
    with recording(model, ()) as (guard, run):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            guard.step()
    return run


def test_a_module_that_draws_has_the_random_state_it_began_with():
    run = run_dropout()

    drawn = run.where(step=0, phase="forward", role="rng")
    assert [(e.boundary, e.slot) for e in drawn] == [("drop", "torch_cpu"), ("(root)", "torch_cpu")]
    output = run.where(step=0, boundary="drop", role="output")[0]
    assert run.index(drawn[0]) < run.index(output)
    (start,) = run.where(step=0, phase="start", boundary="rng.torch_cpu")
    assert drawn[0].h == start.h


def test_one_extra_draw_in_forward_is_found_before_the_module_that_draws_next():
    def fault(step):
        if step == 1:
            torch.rand(1)

    found = first_difference(run_dropout(), run_dropout(fault))

    assert (found.step, found.phase, found.role, found.boundary) == (1, "forward", "rng", "drop")
    assert first_difference(run_dropout(), run_dropout()) is None
