"""Version 1 of the fingerprint, in numbers: what was recorded once must be found again.

A change here makes every recorded run incomparable. It needs a new FINGERPRINT_VERSION.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch

from upguard_plugin.fingerprint import FINGERPRINT_VERSION, fingerprint
from upguard_plugin.fingerprint.reference import hash_elements
from upguard_plugin.fingerprint.sketch import sketch_array

GOLDEN = [
    ("float32", (3, 5), "07471f012a0b4741", 0x0),
    ("bfloat16", (1,), "04789c7b6296c81b", 0x0),
    ("bfloat16", (4099,), "0c0935c836e97e9f", 0x0),
    ("float64", (2, 3, 4), "184341e3f8657c98", 0xE4144370A2CFFD24),
    ("int8", (7,), "0f28b988f1d1d08c", 0x0),
    ("int64", (1025,), "1836a906940d076f", 0x65F67F0D9B25B240),
    ("float8_e4m3fn", (33,), "173d95c78ba7bade", 0x0),
    ("complex128", (5,), "03edce2a001ca337", 0xCE4CCB47C846C13F),
    ("float32", (300, 17), "07196ceef88199ce", 0x0),
    ("bool", (3,), "1252ab4f85257e30", 0x0),
]


def pattern(num_bytes):
    return (np.arange(num_bytes) * 2654435761 >> 7).astype(np.uint8)


@pytest.mark.parametrize(("dtype", "shape", "h", "s"), GOLDEN)
def test_version_1_keeps_its_values(dtype, shape, h, s):
    kind = getattr(torch, dtype)
    raw = pattern(prod(shape) * kind.itemsize) & (1 if dtype == "bool" else 255)

    found = fingerprint(torch.from_numpy(raw).view(kind).reshape(shape))

    assert FINGERPRINT_VERSION == 1
    assert (found.hex, found.s, found.dtype, found.shape) == (h, s, dtype, shape)


@pytest.mark.parametrize(
    ("offset", "h"),
    [
        (1 << 31, 0x6ACC11D00C1ECCE),
        ((1 << 33) + 4, 0x83306C0CE314166),
        ((1 << 50) + 4096 + 12, 0x1FA8983E9563047A),
    ],
)
def test_version_1_keeps_its_values_far_into_a_tensor(offset, h):
    words = pattern(64).view(np.uint32)

    assert hash_elements(words, np.arange(16) + offset // 4)[0] == h


def test_the_sketch_keeps_its_values():
    assert sketch_array(np.arange(5000) % 7 - 3.0, 4).tolist() == [144.0, -27.0, -43.0, 51.0]
