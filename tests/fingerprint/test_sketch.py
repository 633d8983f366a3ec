"""The sketch estimates distances as well as it says, and adds up over shards and partial sums."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
import pytest
import torch

from tests.fingerprint.tensors import DTYPES, random_tensor
from upguard_plugin.errors import UsageError
from upguard_plugin.fingerprint import FingerprintQueue, estimate_distance
from upguard_plugin.fingerprint.parts import dtype_name
from upguard_plugin.fingerprint.sketch import sketch_array
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Axis, Layout

SHAPE = (100, 60)


def sketch_of(tensor, size, placement=None):
    queue = FingerprintQueue(sketch_size=size)
    queue.put(tensor, placement, sketch=True)
    return queue.take().sketch[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_kernel_agrees_with_the_definition(dtype):
    tensor = random_tensor(dtype, (3, 1500))
    tensor = tensor if dtype.itemsize < 8 or not dtype.is_floating_point else tensor * 0 + 1.5
    queue = FingerprintQueue(magnitudes=True, sketch_size=64)
    queue.put(tensor, sketch=True)
    hashes = queue.take()
    if tensor.is_complex():
        values = torch.view_as_real(tensor).double().numpy()
    else:
        values = tensor.double().numpy()
    finite = values[np.isfinite(values)]

    assert hashes.nonfinite[0] == values.size - finite.size
    assert hashes.max_abs[0] == np.abs(finite).max()
    expected = sketch_array(values, 64)
    assert np.allclose(hashes.sketch[0], expected, rtol=1e-9, atol=1e-9 * np.abs(finite).max())


def differences(rng):
    dense = rng.normal(size=SHAPE)
    sparse = np.zeros(SHAPE)
    sparse.flat[rng.choice(sparse.size, 20, replace=False)] = rng.normal(size=20)
    column = np.zeros(SHAPE)
    column[:, 7] = rng.normal(size=SHAPE[0])
    rank_one = np.outer(rng.normal(size=SHAPE[0]), rng.normal(size=SHAPE[1]))
    return {"dense": dense, "sparse": sparse, "column": column, "rank one": rank_one}


@pytest.mark.parametrize(("size", "median"), [(16, 0.17), (64, 0.09), (256, 0.045)])
def test_the_error_is_what_the_number_of_buckets_promises(size, median):
    rng = np.random.default_rng(0)
    errors = {}
    for _ in range(60):
        baseline = rng.normal(size=SHAPE)
        for name, difference in differences(rng).items():
            target = baseline + 0.01 * difference
            true = np.linalg.norm(target - baseline) / np.linalg.norm(baseline)
            sketches = [sketch_of(torch.from_numpy(x), size) for x in (baseline, target)]
            found = estimate_distance(*sketches, norm=float(np.linalg.norm(baseline)))
            assert found.standard_error == pytest.approx(found.relative_l2 / sqrt(2 * size))
            errors.setdefault(name, []).append(abs(found.relative_l2 / true - 1))
    for name, found in errors.items():
        assert np.median(found) < 1.5 * median, name
    # 0.6745 standard errors are the median of a normal error.
    assert np.median(errors["dense"]) > 0.5 * 0.6745 / sqrt(2 * size)


def test_sketches_of_shards_and_of_partial_sums_add_up():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    whole = torch.stack(parts).sum(0)
    layouts = [Layout((Axis("tp", 4, k, (0, 1, 2, 3)),)) for k in range(4)]
    shards = [
        sketch_of(shard, 64, resolve_placement("o[tp] i", shard.shape, layout))
        for shard, layout in zip(whole.chunk(4), layouts, strict=True)
    ]
    expected = sketch_of(whole, 64)

    assert np.allclose(sum(shards), expected, rtol=1e-12, atol=1e-9)
    partial = sum(sketch_of(part, 64) for part in parts)
    error = np.linalg.norm(partial - expected) / np.linalg.norm(expected)
    assert error < 10 * torch.finfo(torch.float32).eps * 2
    left_out = sum(sketch_of(part, 64) for part in parts[1:])
    assert np.linalg.norm(left_out - expected) / np.linalg.norm(expected) > 0.1


def test_equal_tensors_are_at_distance_zero_and_zero_has_no_scale():
    sketch, zero = sketch_of(torch.ones(50), 8), np.zeros(8)

    assert estimate_distance(sketch, sketch).relative_l2 == 0.0
    assert estimate_distance(zero, sketch).relative_l2 == inf
    assert estimate_distance(zero, zero).relative_l2 == 0.0


def test_non_finite_elements_are_counted_and_left_out():
    tensor = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, -3.0])
    queue = FingerprintQueue(magnitudes=True, sketch_size=8)
    queue.put(tensor, sketch=True)
    queue.put(torch.zeros(0), sketch=False)
    queue.put_bytes(b"x")
    hashes = queue.take()

    assert hashes.nonfinite.tolist() == [3, 0, -1]
    assert hashes.max_abs[:2].tolist() == [3.0, 0.0]
    assert np.isnan(hashes.max_abs[2])
    assert np.isnan(hashes.sketch[1:]).all()
    assert np.array_equal(hashes.sketch[0], sketch_of(tensor.nan_to_num(0, 0, 0), 8))


def test_wrong_use_is_refused():
    sketch = sketch_of(torch.ones(5), 8)
    with pytest.raises(UsageError, match="a sketch of 5 buckets is not possible"):
        FingerprintQueue(sketch_size=5)
    with pytest.raises(UsageError, match="different sizes"):
        estimate_distance(sketch, sketch[:4])
    with pytest.raises(UsageError, match="was not taken"):
        estimate_distance(sketch, sketch * np.nan)
