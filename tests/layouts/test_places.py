"""Where events of one rank stand: behind which sums, in which chunk and stage."""

from __future__ import annotations

import numpy as np
import pytest

from upguard_plugin.compare.layouts.bounds import bound
from upguard_plugin.compare.layouts.stages import Place, RankStages
from upguard_plugin.compare.layouts.sums import RankSums
from upguard_plugin.records import Axis, EventKey, Group, Layout
from upguard_plugin.trace.batch import EventBatch

TP2 = Group("tp", (0, 1))


def key(boundary: str, role: str, phase: str = "forward", op: str | None = None) -> EventKey:
    group = None if op is None else TP2
    return EventKey(boundary, phase, role, "0", "float32", (4,), group=group, op=op)


def batch_of(keys: list[EventKey]) -> EventBatch:
    numbers, zeros = np.arange(len(keys), dtype=np.int32), np.zeros(len(keys), np.int32)
    words = np.zeros(len(keys), np.uint64)
    return EventBatch(0, keys, numbers, numbers.astype(np.int64), zeros, zeros, words, words)


def sums_of(keys: list[EventKey]) -> dict[str, tuple[int, ...]]:
    """What lies behind each event that is none of a collective."""
    found, sums = {}, RankSums(batch_of(keys), Layout())
    for row, one in enumerate(keys):
        if one.op is not None:
            sums.finish(row, one)
        else:
            found[f"{one.boundary} {one.role}"] = sums.behind(row, one)
    return found


SUM = key("all_reduce[tp]", "output", op="all_reduce sum")


def test_an_output_lies_behind_the_sums_in_its_call_and_what_follows_does_not():
    found = sums_of([
        key("mlp", "input"), key("mlp.down", "input"), SUM, key("mlp.down", "output"),
        key("mlp", "output"), key("norm", "input"), key("norm", "output"),
    ])  # fmt: skip

    assert found["mlp.down output"] == found["mlp output"] == (2,)
    assert found["norm input"] == found["norm output"] == ()


def test_an_input_lies_behind_a_sum_since_the_last_other_boundary():
    found = sums_of([key("a", "output"), SUM, key("b", "input"), key("c", "input")])

    assert (found["b input"], found["c input"]) == ((2,), ())


@pytest.mark.parametrize("op", ["all_reduce max", "all_gather", "broadcast from 0", "send"])
def test_what_does_not_add_up_is_no_sum(op):
    found = sums_of([key("a", "input"), key("x", "output", op=op), key("a", "output")])

    assert found["a output"] == ()


def test_all_gradients_lie_behind_the_sums_of_their_synchronisation():
    keys = [
        key("w", "grad", "accumulate"),
        key("all_reduce[dp]", "output", "grad_sync", op="all_reduce avg"),
        key("v", "main_grad", "grad_sync"),
        key("w", "main_grad", "grad_sync"),
    ]

    assert sums_of(keys) == {"w grad": (), "v main_grad": (2,), "w main_grad": (2,)}


def test_chunks_of_a_virtual_pipeline_stand_before_stages():
    layout = Layout((Axis("pp", 2, 1, (0, 1)), Axis("vpp", 2, 0, (0,))))
    stages = RankStages(layout)
    places = [
        stages.place(key(boundary, "input"), 0, call)
        for boundary, call in [("model0", 0), ("decoder", 0), ("model1", 0), ("decoder", 1)]
    ]

    assert places == [
        (Place(0, 1), "(root)", 0), (Place(0, 1), "decoder", 0),
        (Place(1, 1), "(root)", 0), (Place(1, 1), "decoder", 0),
    ]  # fmt: skip
    assert Place(0, 1) < Place(1, 0)


def test_without_chunks_names_and_calls_stay():
    stages = RankStages(Layout((Axis("pp", 2, 1, (0, 1)),)))

    assert stages.place(key("model1", "input"), 0, 3) == (Place(0, 1), "model1", 3)


def test_the_bound_grows_with_depth_and_updates_up_to_a_share_of_the_norm():
    eps = 2.0**-23
    assert bound(eps, 1, 0) == 256 * eps
    assert bound(eps, 16, 1) == 256 * 4 * 2 * eps
    assert bound(2.0**-7, 1, 0) == 2 * 2.0**-7
    assert bound(2.0**-7, 9, 0) == 6 * 2.0**-7
    assert bound(2.0**-7, 5, 3) == 12 * 2.0**-7
    assert bound(2.0**-7, 400, 3) == bound(eps, 10**12, 3) == 3 / 8
