"""Alignment of event streams that another tool recorded from two real GPU runs.

The runs raced: whole groups of operators moved. That tool gave each event a status: "diff" where it
found the values to differ, "insertion" where it found no partner, else "ok".
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.compare.stream_edits import edited, stream_of
from tests.compare.stream_edits import paired as paired_edits
from tests.memory_run import hash_of
from upguard_plugin.compare.align import Stretch, align
from upguard_plugin.compare.keys import KeySpace
from upguard_plugin.compare.pairing import Pairing, pair_step
from upguard_plugin.records import EventKey, Source
from upguard_plugin.trace.batch import EventBatch

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT.parent / "shared" / "data" / "opguard_demo_events.json.gz"


@pytest.fixture(scope="module")
def streams() -> tuple[list[dict], list[dict]]:
    if not RECORDED.exists():
        pytest.skip("the recorded streams are not beside the repository")
    data = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return data["run1"], data["run2"]


def place_of(event: dict) -> tuple:
    forms = [str(tensor[:2]) for tensor in (*event["inputs"], *event["outputs"])]
    return (event["fn"], event["file"], event["line"], *forms)


def value_of(event: dict) -> int:
    signatures = [tensor[2] for tensor in (*event["inputs"], *event["outputs"])]
    return hash_of((place_of(event), signatures))


def step_of(stream: list[dict]) -> EventBatch:
    keys = [
        EventKey(
            str(place_of(event)), "forward", "output", "out", "float16", (), operator="aten.any",
            source=Source(event["file"], event["line"]),
        )
        for event in stream
    ]  # fmt: skip
    table = list(dict.fromkeys(keys))
    number = {key: i for i, key in enumerate(table)}
    calls: Counter = Counter()
    call = []
    for key in keys:
        call.append(calls[key])
        calls[key] += 1
    return EventBatch(
        step=0,
        keys=table,
        key=np.array([number[key] for key in keys], np.int32),
        seq=np.arange(len(keys)),
        microbatch=np.zeros(len(keys), np.int32),
        call=np.array(call, np.int32),
        h=np.array([value_of(event) for event in stream], np.uint64),
        s=np.zeros(len(keys), np.uint64),
    )


def paired(streams) -> Pairing:
    return pair_step(step_of(streams[0]), step_of(streams[1]), KeySpace())


def test_a_pair_is_two_calls_at_one_place(streams):
    pairing = paired(streams)

    for b, t in zip(pairing.baseline_rows.tolist(), pairing.target_rows.tolist(), strict=True):
        assert place_of(streams[0][b]) == place_of(streams[1][t])


def test_all_that_differs_has_its_partner(streams):
    """Every event that the other tool called different, or left without a partner, is paired."""
    pairing = paired(streams)
    statuses = [[event["status"] for event in stream] for stream in streams]
    alone = Counter(statuses[0][row] for row in pairing.baseline_alone.tolist())
    alone.update(statuses[1][row] for row in pairing.target_alone.tolist())

    assert alone["diff"] == alone["insertion"] == 0
    for b, t in zip(pairing.baseline_rows.tolist(), pairing.target_rows.tolist(), strict=True):
        assert statuses[0][b] == statuses[1][t]


def test_everything_is_paired_and_what_only_moved_is_equal(streams):
    """Both runs have the same multiset of places: a perfect pairing has all of them."""
    pairing = paired(streams)

    assert len(pairing.baseline_rows) == len(streams[0]) == len(streams[1])
    statuses = [streams[0][row]["status"] for row in pairing.baseline_rows.tolist()]
    ok = np.array([status == "ok" for status in statuses])
    assert not pairing.value_differs[ok].any()
    assert pairing.value_differs[~ok].sum() == 129  # of 130


def test_in_order_the_rest_is_matched_around_what_moved(streams):
    steps = [step_of(stream) for stream in streams]
    numbers: dict = {}
    stretches = [
        Stretch(np.array([numbers.setdefault(place_of(e), len(numbers)) for e in stream]), step.h)
        for stream, step in zip(streams, steps, strict=True)
    ]

    found, _ = align(*stretches)

    assert len(found) > 0.8 * len(streams[0])


@pytest.mark.parametrize("seed", range(2))
def test_an_edited_stream_finds_its_partners(streams, seed):
    """Half of its calls look like others near by: of these, not all can be told apart."""
    stream = stream_of(step_of(streams[0]))
    rng = random.Random(seed)

    answer = paired_edits(stream, edited(rng, stream, 0.1))

    assert not answer.wrong
    assert answer.num_found >= 0.97 * answer.num_right


def test_a_stream_is_paired_with_itself(streams):
    pairing = paired((streams[0], streams[0]))

    assert pairing.is_equal
