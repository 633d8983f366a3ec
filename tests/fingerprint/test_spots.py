"""A glance at memory sees that much of it was written."""

from __future__ import annotations

import numpy as np
import pytest

from upguard_plugin.fingerprint.spots import NUM_SPOTS, SHORT_BYTES, read_spots

NUM_BYTES = [1, 2, 9, SHORT_BYTES - 1, SHORT_BYTES, 8192, 100_003, 1 << 20]


def glance(data: np.ndarray) -> int:
    return read_spots(data.ctypes.data, data.nbytes)


@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_bytes_that_nobody_wrote_look_the_same(num_bytes):
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    assert glance(data) == glance(data)


@pytest.mark.parametrize("begin", range(8))
@pytest.mark.parametrize("num_bytes", NUM_BYTES)
def test_bytes_that_were_all_written_look_different(num_bytes, begin):
    memory = np.random.default_rng(1).integers(0, 256, num_bytes + 8, np.uint8)
    data = memory[begin : begin + num_bytes]
    before = glance(data)
    data[:] ^= 1
    assert glance(data) != before


@pytest.mark.parametrize("place", [0, 7, 8, 500, SHORT_BYTES - 2])
def test_of_short_runs_every_byte_is_read(place):
    data = np.zeros(SHORT_BYTES - 1, np.uint8)
    before = glance(data)
    data[place] = 1
    assert glance(data) != before


@pytest.mark.parametrize("begin", range(8))
def test_nothing_is_read_outside_of_the_bytes(begin):
    memory = np.zeros(4096, np.uint8)
    data = memory[8 + begin : 8 + begin + 2048]
    before = glance(data)
    memory[: 8 + begin] = memory[8 + begin + 2048 :] = 255
    assert glance(data) == before


def test_what_writes_a_twentieth_is_seen_nearly_always():
    draw = np.random.default_rng(2)
    seen = 0
    for _ in range(400):
        data = draw.integers(0, 1 << 60, 4096, np.int64)
        before = glance(data)
        data[draw.random(4096) < 0.05] += 1
        seen += glance(data) != before
    expected = 1 - 0.95**NUM_SPOTS  # 0.96
    assert abs(seen / 400 - expected) < 0.03
