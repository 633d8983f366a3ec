"""Level `op` holds no more after many steps than after a few."""

from __future__ import annotations

import gc
import os
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upguard_plugin
from tests.bugs.gpt import GPT
from upguard_plugin.capture.operators.probe import OperatorProbe


def sizes(probe: OperatorProbe) -> dict[str, int]:
    """What the probe's tables hold, after a step."""
    return {
        "storages": len(probe.calls.storages),
        "nodes": len(probe.calls._locator._nodes),
        "sites": len(probe.calls._sites._sites),
        "counters": len(probe.calls._sites._counters),
        "calls": sum(len(c._calls) for c in probe.calls._sites._counters.values()),
        "keys": sum(len(site._keys) for site in probe.calls._sites._sites.values()),
    }


def test_the_tables_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    settings = {"level": "op", "output_dir": str(tmp_path / "run")}
    with upguard_plugin.enable(model, optimizer, settings) as guard:
        (probe,) = (p for p in guard.probes if isinstance(p, OperatorProbe))
        seen = []
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            guard.step()
            seen.append(sizes(probe))
    assert seen[-1] == seen[3]


def test_the_table_of_storages_forgets_those_that_are_gone() -> None:
    from upguard_plugin.capture.storages import Storages

    storages = Storages()
    for _ in range(20_000):
        storages.find(torch.empty(1))
    assert len(storages) <= 4096


STATM = Path("/proc/self/statm")
WARM, NUM_STEPS = 20, 100
MB = 1024**2


@dataclass
class Held:
    """Bytes that the process holds."""

    python: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        pages = int(STATM.read_text().split()[1]) if STATM.exists() else 0
        return cls(tracemalloc.get_traced_memory()[0], pages * os.sysconf("SC_PAGE_SIZE"))


def growth(output: Path, config: dict[str, Any], around: int, **model_options: int) -> Held:
    """What 100 steps of the GPT at level `op` add to what the process holds.

    Of `around` steps the least counts: the step before may still be on its way to the file.
    """
    torch.manual_seed(0)
    model = GPT(**model_options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    settings = {"level": "op", "output_dir": str(output)} | config
    seen: list[Held] = []
    tracemalloc.start()
    try:
        with upguard_plugin.enable(model, optimizer, settings) as guard:
            for step in range(WARM + NUM_STEPS + around):
                text = torch.randint(0, model.vocabulary, (4, model.length + 1))
                optimizer.zero_grad()
                model.loss(text[:, :-1], text[:, 1:]).backward()
                optimizer.step()
                guard.step()
                if step % NUM_STEPS in range(WARM, WARM + around):
                    seen.append(Held.now())
    finally:
        tracemalloc.stop()
    before, after = seen[:around], seen[-around:]
    assert len(before) + len(after) == len(seen)
    return Held(
        min(held.python for held in after) - min(held.python for held in before),
        min(held.resident for held in after) - min(held.resident for held in before),
    )


def assert_flat(grown: Held, movement: int) -> None:
    # A step has 300 events or more. Some 30 KB come in the first hundred steps: objects for
    # tensors that are hashed again now and then. Later nothing comes.
    assert grown.python < 64 * 1024
    assert grown.resident < movement


def test_100_steps_add_nothing_to_the_memory(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "width": 32, "num_heads": 2, "vocabulary": 64, "length": 16}
    grown = growth(tmp_path / "run", {}, around=5, **sizes)
    # What the allocator keeps moves by a few hundred KB, and a step's tensors are more than that.
    assert_flat(grown, 4 * MB)


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, {"roles": "output"}])
def test_100_steps_of_the_whole_gpt_add_nothing_to_the_memory(tmp_path: Path, config: Any) -> None:
    grown = growth(tmp_path / "run", config, around=20)
    # The allocator moves by 15 MB from step to step, without capture too; what a forward makes is
    # more than 40 MB.
    assert_flat(grown, 16 * MB)
