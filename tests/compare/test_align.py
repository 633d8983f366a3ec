from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upguard_plugin.compare.align import Stretch, align


def stretch(identities, hints=None) -> Stretch:
    hints = range(100, 100 + len(identities)) if hints is None else hints
    return Stretch(np.array(identities, np.int64), np.array(list(hints), np.uint64))


def pairs(baseline, target, hints_b=None, hints_t=None) -> list[tuple[int, int]]:
    found = align(stretch(baseline, hints_b), stretch(target, hints_t))
    return list(zip(*(places.tolist() for places in found), strict=True))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("baseline", "target", "expected"),
    [
        ("abc", "abc", [(0, 0), (1, 1), (2, 2)]),
        ("", "abc", []),
        ("abc", "xyz", []),
        ("abcd", "abxcd", [(0, 0), (1, 1), (2, 3), (3, 4)]),  # inserted
        ("abxcd", "abcd", [(0, 0), (1, 1), (3, 2), (4, 3)]),  # deleted
        ("abcd", "abyd", [(0, 0), (1, 1), (3, 3)]),  # replaced
        ("amam", "am", []),  # which of the two?
        ("mambm", "mambmm", [(0, 0), (1, 1), (2, 2), (3, 3)]),  # which of the last two?
        ("ab", "ba", []),  # one of them moved: which?
        ("abcx", "cabx", [(0, 1), (1, 2), (3, 3)]),
    ],
)
def test_sequences_without_hints(baseline, target, expected):
    no_hints = {"hints_b": range(len(baseline)), "hints_t": range(1000, 1000 + len(target))}

    assert pairs(letters(baseline), letters(target), **no_hints) == expected


def test_equal_values_tell_which_of_two_is_the_extra_one():
    assert pairs(letters("ma"), letters("mma"), [1, 2], [9, 1, 2]) == [(0, 1), (1, 2)]
    assert pairs(letters("mma"), letters("ma"), [9, 1, 2], [1, 2]) == [(1, 0), (2, 1)]


def test_equal_sequences_pair_by_position_whatever_the_values():
    assert pairs(letters("mm"), letters("mm"), [1, 2], [2, 1]) == [(0, 0), (1, 1)]


def test_a_window_too_large_to_match_stays_unmatched():
    many = [1, 2] * 3000
    found = pairs([7, *many, 8], [7, *many[:-1], 8], range(6002), range(10**6, 10**6 + 6001))

    assert found == [(0, 0), (6001, 6000)]


def test_a_large_window_of_equal_names_keeps_its_order_but_for_what_is_disputed():
    many = [1, 2] * 3000
    hints_b, hints_t = list(range(6003)), list(range(10**6, 10**6 + 6002))
    hints_t[105] = hints_b[104]  # an event of the same name with the value of another pair

    found = pairs([9, 7, *many, 8], [7, *many, 8], hints_b, hints_t)

    assert set(zip(range(1, 6003), range(6002), strict=True)) - set(found) == {
        (104, 103),
        (106, 105),
    }


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=12),
    st.lists(st.integers(0, 4), max_size=12),
    st.integers(0, 1),
)
def test_pairs_are_in_order_and_of_one_identity(baseline, target, hinted):
    found = pairs(baseline, target, [hinted] * len(baseline), [hinted] * len(target))

    assert all(baseline[b] == target[t] for b, t in found)
    assert all(b1 < b2 and t1 < t2 for (b1, t1), (b2, t2) in pairwise(found))
    # Swapping the sides swaps the pairs.
    swapped = pairs(target, baseline, [hinted] * len(target), [hinted] * len(baseline))
    assert [(b, t) for t, b in swapped] == found


def edited(rng: random.Random, sequence: list[int], share: float):
    """A sequence with deletions, repeated and new events, and the right pairs."""
    result, right = [], []
    for place, identity in enumerate(sequence):
        dice = rng.random()
        if dice < share / 3:
            continue
        if dice < 2 * share / 3:
            result.append((rng.choice([identity, 10_000 + place]), None))
        right.append((place, len(result)))
        result.append((identity, place))
    return result, right


@pytest.mark.parametrize("seed", range(5))
def test_precision_is_full_and_recall_high_at_ten_per_cent_edits(seed):
    """Operators of a model with many equal names; a tenth of all values differ on top."""
    rng = random.Random(seed)
    sequence = [block * 40 + rng.randrange(25) for block in range(40) for _ in range(60)]
    result, right = edited(rng, sequence, 0.1)
    hints_b = list(range(len(sequence)))
    hints_t = [
        10**6 + i if place is None or rng.random() < 0.1 else place
        for i, (_, place) in enumerate(result)
    ]

    found = pairs(sequence, [identity for identity, _ in result], hints_b, hints_t)

    # An event deleted where one of its name was inserted looks like one with another value.
    partners_b, partners_t = dict(right), {t: b for b, t in right}
    wrong = [(b, t) for b, t in set(found) - set(right) if b in partners_b or t in partners_t]
    assert not wrong
    assert len(set(found) & set(right)) >= 0.99 * len(right)
