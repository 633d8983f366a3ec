"""What of a saved object becomes an event of its own, and what only one of many."""

from __future__ import annotations

import pytest
import torch
from recorded import Recorded, guarded
from torch import nn

from upguard_plugin.capture.checkpoints import content_of
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.trace.reader import open_trace

MANY = 20_000
LARGE = {
    "a mapping": {f"sample{n}": n / 7 for n in range(MANY)},
    "pairs": [(n, "seen") for n in range(MANY)],
    "numbers as keys": {10**20 + n: [n, None] for n in range(2000)},
}


def saved_and_loaded(tmp_path, content, spoil=lambda content: None) -> Recorded:
    model = nn.Linear(2, 2)
    path = tmp_path / "checkpoint.pt"
    with guarded(tmp_path / "run", model) as guard:
        model(torch.ones(1, 2)).sum().backward()
        torch.save({"model": model.state_dict(), "content": content}, path)
        guard.step()
        torch.load(path)
        spoil(content)
        torch.save({"model": model.state_dict(), "content": content}, path)
        guard.step()
    return Recorded(tmp_path / "run")


@pytest.mark.parametrize("name", LARGE)
def test_very_many_plain_values_are_one_event(tmp_path, name):
    run = saved_and_loaded(tmp_path, LARGE[name])

    found = run.find(boundary="checkpoint", slot="content")
    assert [(e.step, e.dtype) for e in found] == [(0, "str"), (1, "str"), (1, "str")]
    assert len({e.h for e in found}) == 1
    assert check_run(open_trace(tmp_path / "run"), Selection()).broken == []


def test_one_other_value_of_very_many_is_seen(tmp_path):
    content = {f"sample{n}": n for n in range(2000)}

    run = saved_and_loaded(tmp_path, content, lambda content: content.update(sample1999=0))

    hashes = [e.h for e in run.find(boundary="checkpoint", slot="content")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_few_values_and_tensors_keep_their_names():
    few = {f"sample{n}": n for n in range(1000)}
    mixed = dict.fromkeys(map(str, range(2000)), 0) | {"weight": torch.ones(1)}
    inside: list = [0] * 2000
    inside.append(inside)

    assert [path for path, _ in content_of(few)] == list(few)
    assert [path for path, _ in content_of(mixed)] == list(mixed)
    assert len(dict(content_of({"a": few | {"one more": 1}}))) == 1
    assert len(dict(content_of(inside))) == 2000
