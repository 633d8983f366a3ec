"""What a fingerprint promises: no change is missed, shards add up, moves conserve.

The patterns below are those that XOR, sums and norms miss.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fingerprint.tensors import DTYPES, random_tensor, reference
from upguard_plugin.fingerprint import fingerprint
from upguard_plugin.fingerprint.parts import dtype_name
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Axis, Layout

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def layout_of(**axes):
    return Layout(tuple(Axis(n, size, k, tuple(range(size))) for n, (size, k) in axes.items()))


def words_of(tensor):
    found = fingerprint(tensor)
    return found.h, found.s


@given(st.sampled_from([d for d in DTYPES if d.itemsize <= 8]), st.integers(1, 300), st.data())
@settings(max_examples=150, deadline=None)
def test_one_changed_element_always_shows(dtype, numel, data):
    tensor = random_tensor(dtype, (numel,), 1)
    changed = tensor.clone()
    bits = changed.view(BITS[dtype.itemsize])
    where = data.draw(st.integers(0, numel - 1))
    mask = 1 << data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    bits[where] ^= 1 if dtype == torch.bool else mask

    assert words_of(changed) != words_of(tensor)


def float_tensor():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(64, 48, generator=generator)


def flip_bits(tensor, positions, mask):
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[positions] ^= mask
    return changed


TOP_BIT = -(1 << 31)
CHANGES = {
    "permuted": lambda t: t.view(-1)[torch.randperm(t.numel(), generator=torch.Generator())],
    "transposed": lambda t: t.t(),
    "rows swapped": lambda t: torch.cat([t[32:], t[:32]]),
    "shards swapped": lambda t: torch.cat([t[:, 24:], t[:, :24]], 1),
    "negated": lambda t: -t,
    "one sign pair": lambda t: flip_bits(t, [5, 900], TOP_BIT),
    "top bits of a column": lambda t: flip_bits(t, range(0, 64 * 48, 48), TOP_BIT),
    "the same flip in two places": lambda t: flip_bits(t, [17, 2065], 1),
    "an ulp up, an ulp down": lambda t: _add_bits(_add_bits(t, 9, 1), 77, -1),
    "first block doubled": lambda t: torch.cat([t[:32], t[:32]]),
    "rolled by one": lambda t: t.view(-1).roll(1),
    "every second row zero": lambda t: t * (torch.arange(64) % 2)[:, None],
    "one row and column changed": lambda t: t + torch.outer(
        (torch.arange(64) == 3).float(), (torch.arange(48) == 4).float()
    ),
}  # fmt: skip


def _add_bits(tensor, position, step):
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[position] += step
    return changed


@pytest.mark.parametrize("change", CHANGES)
def test_structured_changes_show(change):
    tensor = float_tensor()

    assert words_of(CHANGES[change](tensor).contiguous()) != words_of(tensor)


def test_positive_and_negative_zero_differ():
    zeros = torch.zeros(4096)

    assert words_of(zeros) == (0, 0)
    assert words_of(-zeros) != (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=dtype_name)
def test_constant_tensors_differ_by_value_and_length(dtype):
    found = {
        words_of(torch.full((n,), v, dtype=dtype)) for n in (2, 4, 64, 4096) for v in (1, 2, 3)
    }

    assert len(found) == 12


def test_the_bits_alone_do_not_make_two_tensors_equal():
    tensor = torch.arange(12, dtype=torch.int32)

    assert words_of(tensor) == words_of(tensor.view(3, 4)) == words_of(tensor.view(torch.float32))
    assert fingerprint(tensor) != fingerprint(tensor.view(3, 4))
    assert fingerprint(tensor) != fingerprint(tensor.view(torch.float32))


def draw_cuts(data, size):
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *cuts], [*cuts, size], strict=True))


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_shards_of_a_grid_add_up(dtype, shape, data):
    whole = random_tensor(dtype, shape)
    axes = ("tp", "cp", "dp")[: len(shape)]
    cuts = [draw_cuts(data, size) for size in shape]
    spec = " ".join(
        f"d{k}[{axis}:{','.join(str(b - a) for a, b in cuts[k])}]" for k, axis in enumerate(axes)
    )
    total = None
    for corner in np.ndindex(*(len(c) for c in cuts)):
        part = whole[tuple(slice(*cuts[k][at]) for k, at in enumerate(corner))]
        layout = layout_of(**{axis: (len(cuts[k]), corner[k]) for k, axis in enumerate(axes)})
        placement = resolve_placement(spec, part.shape, layout)
        found = fingerprint(part, placement=placement)
        assert found == reference(part, placement)
        total = found if total is None else total + found

    assert total == fingerprint(whole)


def add_up(spec, parts, axis="tp", **options):
    found = [
        fingerprint(
            part,
            placement=resolve_placement(
                spec, part.shape, layout_of(**{axis: (len(parts), k)}), **options
            ),
        )
        for k, part in enumerate(parts)
    ]
    return sum(found[1:], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_layouts_of_real_models_add_up(dtype):
    whole = random_tensor(dtype, (24, 10))
    expected = fingerprint(whole)
    halves = whole.view(torch.uint8).view(2, 12, -1)
    glu = [halves[:, :6].reshape(12, -1), halves[:, 6:].reshape(12, -1)]
    chunks = whole.view(torch.uint8).chunk(4)
    zigzag = [torch.cat([chunks[0], chunks[3]]), torch.cat([chunks[1], chunks[2]])]
    flat = whole.reshape(-1)

    assert add_up("o[tp] i", [whole[:12], whole[12:]]) == expected
    assert add_up("o i[tp]", [whole[:, :5], whole[:, 5:]]) == expected
    assert add_up("(g[tp] q d) h", list(whole.chunk(3))) == expected
    assert add_up("(2 f[tp]) h", [part.view(dtype) for part in glu]) == expected
    assert add_up("s[cp:zigzag] h", [part.view(dtype) for part in zigzag], "cp") == expected
    slices = [(0, 7), (7, 101), (101, 240)]
    total = None
    for k, (a, b) in enumerate(slices):
        layout = layout_of(dp=(3, k))
        placement = resolve_placement(
            f"* | flat[dp@{a}:{b}]", (b - a,), layout, whole_shape=whole.shape
        )
        found = fingerprint(flat[a:b], placement=placement)
        total = found if total is None else total + found
    assert total == expected


def test_a_swapped_shard_does_not_add_up():
    whole = random_tensor(torch.bfloat16, (24, 10))

    assert add_up("o[tp] i", [whole[12:], whole[:12]]) != fingerprint(whole)


def test_an_all_to_all_conserves_its_data():
    ranks = [random_tensor(torch.bfloat16, (4, 3), seed) for seed in range(4)]
    received = [torch.stack([sent[k] for sent in ranks]) for k in range(4)]
    for k, result in enumerate(received):
        placed = [
            fingerprint(
                sent[k : k + 1],
                placement=resolve_placement("p[ep] h", (1, 3), layout_of(ep=(4, r))),
            )
            for r, sent in enumerate(ranks)
        ]
        assert sum(placed[1:], placed[0]) == fingerprint(result)


P_SMALL = (1 << 13) - 1


def test_a_narrow_version_collides_at_the_expected_rate():
    """The construction at 13 bits: for random keys, at most 2 / (p - 1) of fixed pairs collide."""
    rng = np.random.default_rng(0)
    trials, rows, columns = 400_000, 3, 4
    a = rng.integers(1, P_SMALL, (trials, rows, 1))
    b = rng.integers(1, P_SMALL, (trials, 1, columns))
    keys = a * b % P_SMALL
    differences = {
        "random": rng.integers(1, P_SMALL, (rows, columns)),
        "top bits of a pair": np.array([[4096, 0, 0, 4096], [0] * 4, [0] * 4]),
        "a column": np.array([[1, 0, 0, 0]] * 3),
        "constant": np.ones((rows, columns), np.int64),
        "up and down": np.array([[1, -1, 0, 0], [0] * 4, [0, 0, 1, -1]]),
        "rank one": np.outer([1, 2, 3], [1, -1, 2, -2]),
    }
    for name, difference in differences.items():
        sums = (keys * difference).sum(axis=(1, 2)) % P_SMALL
        rate = np.count_nonzero(sums == 0) / trials
        assert rate <= 3.0 / (P_SMALL - 1), name
        if name == "random":  # the test can see collisions: they do happen at this width
            assert rate >= 0.3 / (P_SMALL - 1)


def test_fingerprints_spread_evenly():
    """Bits of h over one-element changes: each is set about half of the time."""
    base = torch.zeros(4096, dtype=torch.int32)
    found = []
    for k in range(2000):
        base[k] = 1
        found.append(fingerprint(base).h)
        base[k] = 0
    ones = [sum(h >> bit & 1 for h in found) for bit in range(61)]

    assert len(set(found)) == 2000
    assert all(850 < count < 1150 for count in ones), ones
