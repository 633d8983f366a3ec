"""Edited streams whose right pairs are known: none is wrong, and nearly all are found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.bugs.training import record
from tests.compare.stream_edits import EDITS, Seen, edited, paired, stream_of
from upguard_plugin.records import EventKey
from upguard_plugin.trace.reader import open_trace


def repetitive(rng: random.Random) -> list[Seen]:
    """40 blocks of 60 calls of 25 operators: most names occur several times in their block."""
    return [
        Seen(
            EventKey(
                f"blocks.{block}", "forward", "output", "0", "float32", (4,),
                operator=f"aten.op{rng.randrange(25)}",
            ),
            0, 0, 1000 * block + place,
        )
        for block in range(40)
        for place in range(60)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[Seen]:
    """The second step of a training, every operator recorded."""
    run: Path = record(tmp_path_factory.mktemp("runs") / "op", level="op")
    return stream_of(open_trace(run).read(0, 1))


def check(stream, rng, share: float, edits=EDITS, recall: float = 0.99) -> None:
    answer = paired(stream, edited(rng, stream, share, edits))

    assert not answer.wrong
    assert answer.num_found >= recall * answer.num_right


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("edit", EDITS)
def test_one_kind_of_edit_is_undone(edit, seed):
    """Of a call that was repeated and has another value too, nobody can tell which is which."""
    rng = random.Random(seed)
    check(repetitive(rng), rng, 0.1, (edit,), recall=0.98 if edit == "repeat" else 0.99)


@pytest.mark.parametrize("seed", range(6))
def test_all_kinds_of_edits_together_are_undone(seed):
    rng = random.Random(seed)
    check(repetitive(rng), rng, 0.1)


@pytest.mark.parametrize("edits", [EDITS, *((edit,) for edit in EDITS)])
def test_a_recorded_step_is_found_again_under_its_edits(recorded, edits):
    assert len(recorded) > 1000
    check(recorded, random.Random(repr(edits)), 0.1, edits)


def test_without_edits_all_pairs_are_found(recorded):
    for stream in (recorded, repetitive(random.Random(0))):
        answer = paired(stream, list(zip(stream, range(len(stream)), strict=True)))

        assert (answer.num_found, answer.wrong) == (len(stream), [])
