from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.trace.sample_events import make_batch, make_keys
from upguard_plugin.records import Group, Source, Stretch
from upguard_plugin.trace.digest import hash_keys, step_digest


@pytest.fixture
def batch():
    return make_batch(0, make_keys(), num_events=50)


def changed(batch, column, row=20):
    values = getattr(batch, column).copy()
    values[row] += 1
    return replace(batch, **{column: values})


@pytest.mark.parametrize("column", ["key", "call", "h", "s"])
def test_a_change_of_what_it_covers_changes_the_digest(batch, column):
    assert step_digest(changed(batch, column)) != step_digest(batch)


@pytest.mark.parametrize("column", ["seq", "microbatch"])
def test_a_change_of_what_it_does_not_cover_leaves_the_digest(batch, column):
    assert step_digest(changed(batch, column)) == step_digest(batch)


def with_key(batch, **fields):
    keys = [replace(batch.keys[0], **fields), *batch.keys[1:]]
    return replace(batch, keys=keys)


@pytest.mark.parametrize(
    "field",
    [
        {"boundary": "other"},
        {"role": "input"},
        {"slot": "1"},
        {"moment": "after"},
        {"dtype": "float16"},
        {"shape": (16, 4)},
    ],
)
def test_a_change_of_a_covered_field_of_a_key_changes_the_digest(batch, field):
    assert step_digest(with_key(batch, **field)) != step_digest(batch)


@pytest.mark.parametrize(
    "field",
    [
        {"phase": "eval"},
        {"operator": "other"},
        {"source": Source("a.py", 1)},
        {"group": Group("dp", (0,))},
        {"op": "send"},
        {"holds": (Stretch(0, 4, "w.grad"),)},
    ],
)
def test_a_change_of_any_other_field_of_a_key_leaves_the_digest(batch, field):
    assert step_digest(with_key(batch, **field)) == step_digest(batch)


def test_order_counts(batch):
    swapped = batch.h.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert step_digest(replace(batch, h=swapped)) != step_digest(batch)


def test_how_the_keys_are_numbered_does_not_count(batch):
    last = len(batch.keys) - 1
    renumbered = replace(batch, keys=batch.keys[::-1], key=(last - batch.key).astype(np.int32))
    assert step_digest(renumbered) == step_digest(batch)
    assert step_digest(batch, hash_keys(batch.keys)) == step_digest(batch)


def test_the_digest_is_the_one_of_the_documentation(batch):
    """Written again from docs/trace-format.md, an event at a time."""
    whole = hashlib.blake2b(digest_size=16)
    for row in range(len(batch)):
        key = batch.key_of(row)
        fields = [key.boundary, key.role, key.slot, key.moment, key.dtype, list(key.shape)]
        text = json.dumps(fields, separators=(",", ":")).encode()
        whole.update(hashlib.blake2b(text, digest_size=16).digest())
        for value in (batch.call[row], batch.h[row], batch.s[row]):
            whole.update(int(value).to_bytes(8, "little"))
    assert step_digest(batch) == whole.digest()


def test_the_digest_of_a_fixed_batch_never_changes():
    keys = make_keys(4)
    batch = replace(
        make_batch(0, keys), h=np.arange(4, dtype=np.uint64), call=np.array([0, 1, -1, 2], np.int32)
    )
    assert step_digest(batch).hex() == "5a6ccbf423bc5b8a878476e1d26697c6"
