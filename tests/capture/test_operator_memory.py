"""Level `op` holds no more after many steps than after a few."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import upguard_plugin
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
