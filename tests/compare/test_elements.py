"""Which elements of two tensors differ, and how."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from upguard_plugin.compare.dumped import EventName
from upguard_plugin.compare.elements import compare_elements, pattern_of
from upguard_plugin.compare.float8 import FLOAT8, values_of
from upguard_plugin.errors import UsageError
from upguard_plugin.records import Stretch


def mask(shape, *places):
    differs = np.zeros(shape, bool)
    for place in places:
        differs[place] = True
    return differs


@pytest.mark.parametrize(
    ("differs", "pattern"),
    [
        (mask((4, 6)), "none"),
        (mask((4, 6), (slice(None), slice(None))), "all elements"),
        (mask((4, 6), (2, 3)), "one element"),
        (mask((4, 6), (1, slice(None))), "row 1"),
        (mask((4, 6), (slice(0, 2), slice(None))), "rows 0-1"),
        (mask((4, 6), (slice(2, None), slice(None))), "the tail, from row 2 on"),
        (mask((4, 6), (slice(None), 5)), "stripe: column 5"),
        (mask((4, 6), (slice(None), slice(0, None, 2))), "stripe: columns 0-4 in steps of 2"),
        (mask((4, 6), (slice(1, 3), slice(2, 4))), "tile [1-2, 2-3]"),
        (mask(24, slice(20, None)), "the tail, from element 20 on"),
        (mask(24, slice(3, 6)), "elements 3 to 5"),
        (mask(24, slice(1, None, 4)), "every 4th element from 1 to 21"),
        (mask(24, slice(1, None, 2)), "every 2nd element from 1 to 23"),
        (mask((2, 4, 6), (1, 2, slice(None))), "row [1, 2]"),
        (mask((2, 4, 6), (1, slice(1, 3), slice(None))), "tile [1, 1-2, 0-5]"),
        (mask((2, 4, 6), 1), "row 1"),
        (mask((4, 6), (slice(2, None), slice(2, None))), "tile [2-3, 2-5]"),
        (mask((4, 6), (0, 0), (1, 3), (3, 1)), "scattered over 24 elements"),
        (mask((4, 6), (1, slice(0, 3)), (1, slice(4, 6))), "most of row 1"),
        (mask((4, 6), (1, slice(1, 4)), (2, slice(1, 3))), "most of tile [1-2, 1-3]"),
        (mask(24, slice(3, 6), slice(7, 9)), "most of elements 3 to 8"),
    ],
)
def test_patterns_have_names(differs, pattern):
    assert pattern_of(differs) == pattern


def test_neighbouring_floats_are_one_ulp_apart_across_zero_too():
    tiny = np.float32(1e-45)
    baseline = np.array([1, -tiny, 0.0, 5, np.nan, 3], np.float32)
    target = np.array([np.nextafter(np.float32(1), np.float32(2)), tiny, -0.0, np.inf, np.nan, 3])
    found = compare_elements(baseline, target.astype(np.float32), "float32", (6,))

    assert (found.differing, found.total, found.first) == (4, 6, [[0], [1], [2]])
    assert found.ulps == {"1": 1, "2": 1}
    assert found.max_abs == pytest.approx(2**-23)
    assert (found.baseline.nan, found.target.infinite, found.target.negative_zero) == (1, 1, 1)


def test_units_between_floats_of_all_sizes_are_counted_without_overflow():
    for kind in (np.float16, np.float32, np.float64):
        largest, zero = np.array([np.finfo(kind).max], kind), np.array([0.0], kind)
        whole = compare_elements(largest, -largest, str(np.dtype(kind)), (1,))
        zeros = compare_elements(zero, -zero, str(np.dtype(kind)), (1,))
        assert (list(whole.ulps.values()), zeros.ulps) == ([1], {})
        assert whole.ulps.keys() <= {"over 65536", "257-65536"}


def test_bfloat16_is_read_from_its_bits():
    baseline = np.array([0x3F80, 0x4000], np.int16)  # 1.0, 2.0
    target = np.array([0x3F80, 0x4001], np.int16)
    found = compare_elements(baseline, target, "bfloat16", (2,))
    assert (found.max_abs, found.ulps, found.pattern) == (2**-6, {"1": 1}, "one element")


@pytest.mark.parametrize("dtype", sorted(FLOAT8))
def test_float8_is_read_as_torch_reads_it(dtype):
    patterns = torch.arange(256).to(torch.uint8).view(getattr(torch, dtype))
    read, values = patterns.double().numpy(), values_of(dtype)
    assert np.array_equal(values, read, equal_nan=True)
    assert np.array_equal(np.signbit(values[values == 0]), np.signbit(read[read == 0]))
    found = compare_elements(np.uint8([0x38]), np.uint8([0x39]), dtype, (1,))
    assert (found.differing, found.baseline.nan, found.ulps) == (1, 0, {"1": 1})


def test_integers_and_complex_numbers_are_compared():
    found = compare_elements(np.array([1, 5]), np.array([1, 9]), "int64", (2,))
    assert (found.max_abs, found.ulps) == (4, {})
    pair = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    found = compare_elements(pair, pair + np.array([[0, 1], [0, 0]], np.float32), "complex64", (2,))
    assert (found.differing, found.total, found.first) == (1, 2, [[0]])


def test_an_event_is_named_by_words_and_numbers():
    assert EventName.parse("step 1 forward blocks.0 call 2") == EventName(
        (("step", 1), ("call", 2)), ("forward", "blocks.0")
    )
    with pytest.raises(UsageError, match="no number behind 'step'"):
        EventName.parse("forward step one")


def test_the_elements_of_a_flat_buffer_have_owners():
    baseline = np.zeros(10, np.float32)
    target = baseline.copy()
    target[[2, 5, 7]] = 1
    holds = [Stretch(0, 4, "a"), Stretch(4, 9, "b", 20), Stretch(9, 10, "c")]

    found = compare_elements(baseline, target, "float32", (10,), holds)

    assert [(one.name, one.start, one.stop, one.offset) for one in found.of] == [
        ("a", 2, 3, 2),
        ("b", 5, 8, 21),
    ]
