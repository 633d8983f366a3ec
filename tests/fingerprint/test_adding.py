"""Residues added up in numpy are what Python's integers give."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from upguard_plugin.fingerprint.adding import add_groups, multiply
from upguard_plugin.records import FINGERPRINT_PRIME

RESIDUES = st.integers(0, FINGERPRINT_PRIME - 1) | st.sampled_from(
    [0, 1, FINGERPRINT_PRIME - 1, FINGERPRINT_PRIME - 2, (1 << 32) - 1, 1 << 32]
)


@given(st.lists(st.lists(RESIDUES, min_size=1, max_size=40), max_size=8))
def test_groups_add_up_modulo_the_prime(groups):
    starts = np.cumsum([0, *(len(group) for group in groups)], dtype=np.int64)[:-1]
    h = np.array([one for group in groups for one in group], np.uint64)

    found = add_groups(h, starts)

    assert found.tolist() == [sum(group) % FINGERPRINT_PRIME for group in groups]


@given(st.lists(st.tuples(RESIDUES, st.integers(0, (1 << 32) - 1)), max_size=40))
def test_products_are_reduced(pairs):
    h = np.array([h for h, _ in pairs], np.uint64)
    factor = np.array([factor for _, factor in pairs], np.uint64)

    assert multiply(h, factor).tolist() == [a * b % FINGERPRINT_PRIME for a, b in pairs]
