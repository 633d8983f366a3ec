"""Ranks that must differ, and ranks that must agree: batches and random streams."""

from __future__ import annotations

from tests.invariants.memory_checks import check, first

BATCH = "    data      0  data    tokens/0     t  int64\n"


def test_data_parallel_ranks_with_one_batch_are_broken():
    other = BATCH.replace(" t ", " t2 ")

    assert first(check(BATCH, BATCH)) == ("batches-differ", 0, "data", "tokens", "data", [0, 1])
    assert check(BATCH, other).checked["batches-differ"] == 2


def test_tensor_parallel_ranks_with_two_batches_are_broken():
    other = BATCH.replace(" t ", " t2 ")
    floats = (BATCH.replace("int64", "float32"), other.replace("int64", "float32"))

    report = check(BATCH, other, axes=("tp",))
    assert first(report) == ("batches-agree", 0, "data", "tokens", "data", [0, 1])
    assert check(BATCH, BATCH, axes=("tp",)).checked["batches-agree"] == 1
    assert check(*floats, axes=("tp",)).broken == []


STREAM = "    start     -  rng     rng.moe.expert/state   s  uint8\n"


def test_random_streams_of_experts_that_are_equal_are_broken():
    report = check(STREAM, STREAM, axes=("ep",))

    assert first(report) == ("streams-differ", 0, "start", "rng.moe.expert", "rng", [0, 1])
    assert check(STREAM, STREAM.replace(" s ", " s2 "), axes=("ep",)).broken == []
