"""Run by test_triton.py with TRITON_INTERPRET=1: CPU tensors through the Triton kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fingerprint.tensors import random_tensor, reference
from upguard_plugin.fingerprint.devices import is_small
from upguard_plugin.fingerprint.gpu import TritonSlots
from upguard_plugin.fingerprint.parts import dense_parts, dtype_name
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.fingerprint.rows import plan_sweeps
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Axis, Fingerprint, Layout

# The kernels see bytes: one dtype of each size is enough here, the GPU benchmark has them all.
SIZES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


def planned(part):
    tensor = part.tensor
    args = (tensor.shape, tensor.stride(), tensor.itemsize, part.placement)
    return part, tensor, plan_sweeps(*args, any_run=True)


def triton_hashes(tensors, placements=None, sketch_size=0):
    slots = TritonSlots(torch.device("cpu"), sketch_size)
    for k, tensor in enumerate(tensors):
        parts = dense_parts(tensor, placements[k] if placements else None)
        slots.put(k, [planned(part) for part in parts], sketch_size > 0, sketch_size)
    pairs = np.zeros((len(tensors), 2), np.uint64)
    measures = np.full((len(tensors), 2 + sketch_size), np.nan)
    slots.take_into(pairs, measures)
    return pairs, measures


@pytest.mark.parametrize("dtype", SIZES, ids=dtype_name)
def test_every_size_of_element(dtype):
    shapes = [(), (0,), (7,), (5, 6, 7), (3, 2100)]
    tensors = [random_tensor(dtype, shape, seed) for seed, shape in enumerate(shapes)]
    tensors += [tensors[3].permute(2, 0, 1)[::2], tensors[4][:, 3:100]]

    pairs, _ = triton_hashes(tensors)

    found = [
        Fingerprint(int(h), int(s), dtype_name(dtype), tuple(tensor.shape))
        for (h, s), tensor in zip(pairs, tensors, strict=True)
    ]
    assert found == [reference(tensor) for tensor in tensors]


@pytest.mark.parametrize("spec", ["o[tp] i", "o i[tp]", "(2 f[tp]) h", "o[tp:zigzag] i"])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int64], ids=dtype_name)
def test_placements(spec, dtype):
    tensor = random_tensor(dtype, (12, 5))
    layout = Layout((Axis("tp", 3, 1, (0, 1, 2)),))
    placement = resolve_placement(spec, tensor.shape, layout)

    pairs, _ = triton_hashes([tensor], [placement])

    expected = reference(tensor, placement)
    assert pairs.tolist() == [[expected.h, expected.s]]


@pytest.mark.parametrize("dtype", SIZES, ids=dtype_name)
def test_small_tensors_in_one_launch(dtype):
    shapes = [(4,), (0,), (5, 8), (3, 2100), (2048,), (2052,)]
    tensors = [random_tensor(dtype, shape, seed) for seed, shape in enumerate(shapes)]
    small = [k for k, tensor in enumerate(tensors) if is_small(tensor)]
    slots = TritonSlots(torch.device("cpu"), 0)

    slots.put(9, [planned(dense_parts(tensors[3])[0])], False, 0)
    slots.put_many(small, [tensors[k] for k in small])
    pairs = np.zeros((10, 2), np.uint64)
    slots.take_into(pairs, np.zeros((10, 2)))

    assert len(small) >= 4
    assert [tuple(map(int, pairs[k])) for k in small] == [
        (f.h, f.s) for f in (reference(tensors[k]) for k in small)
    ]
    assert int(pairs[9, 0]) == reference(tensors[3]).h


def with_faults(numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    tensor[7], tensor[numel // 2], tensor[-1] = torch.inf, torch.nan, -torch.inf
    return tensor


def measured_tensors():
    """Through both kernels: runs of whole blocks and a tail, elements of every size; a shard."""
    tensor = with_faults(4501)
    grid = with_faults(300).reshape(3, 100)
    tensors = [
        tensor, tensor.bfloat16(), tensor[:2100].half()[1:], tensor.double(),
        tensor.to(torch.float8_e5m2), tensor[:-1].view(torch.complex64),
        torch.arange(-900, 900), torch.arange(2001, dtype=torch.uint8),
        grid.t(), grid.double()[:, 3:50], grid.bfloat16().t(), grid.to(torch.float8_e5m2).t(),
        with_faults(5000).reshape(10, 500), grid,
    ]  # fmt: skip
    layout = Layout((Axis("tp", 3, 2, (0, 1, 2)),))
    placements = [None] * (len(tensors) - 2)
    for tensor, spec in zip(tensors[-2:], ["o[tp] i", "o i[tp]"], strict=True):
        placements.append(resolve_placement(spec, tensor.shape, layout))
    return tensors, placements


@pytest.mark.parametrize("size", [16, 256])
def test_measures_agree_with_the_cpu_kernel(size):
    tensors, placements = measured_tensors()
    queue = FingerprintQueue(magnitudes=True, sketch_size=size)
    queue.put_many(tensors, placements, sketch=True)
    expected = queue.take()

    pairs, measures = triton_hashes(tensors, placements, sketch_size=size)

    assert pairs.tolist() == np.stack([expected.h, expected.s], axis=1).tolist()
    assert measures[:, 0].tolist() == expected.nonfinite.tolist()
    assert measures[:, 1].tolist() == expected.max_abs.tolist()
    assert np.allclose(measures[:, 2:], expected.sketch, rtol=1e-9, atol=1e-9)


def test_a_slot_without_a_sketch_has_none():
    part = dense_parts(torch.tensor([1.0, -3.0, torch.nan]))[0]
    slots = TritonSlots(torch.device("cpu"), 4)
    for slot, (measured, size) in enumerate([(False, 0), (True, 0), (True, 4)]):
        slots.put(slot, [planned(part)], measured, size)
    measures = np.full((3, 6), np.nan)

    slots.take_into(np.zeros((3, 2), np.uint64), measures)

    assert np.isnan(measures[0]).all()
    assert measures[1, :2].tolist() == measures[2, :2].tolist() == [1.0, 3.0]
    assert np.isnan(measures[1, 2:]).all()
    assert abs(measures[2, 2:]).sum() == 4.0


def test_a_block_far_into_the_logical_tensor():
    part = dense_parts(random_tensor(torch.float32, (5000,)))[0]
    offset = 1 << 56
    slots = TritonSlots(torch.device("cpu"), 0)
    sweeps = plan_sweeps(part.tensor.shape, part.tensor.stride(), 4, None)
    far = type(part)(part.tensor, offset)
    slots.put(0, [(far, part.tensor, sweeps)], False, 0)
    pairs = np.zeros((1, 2), np.uint64)
    slots.take_into(pairs, np.zeros((1, 2)))

    words = part.tensor.view(torch.int32).numpy().view(np.uint32)
    from upguard_plugin.fingerprint.reference import hash_elements

    assert int(pairs[0, 0]) == hash_elements(words, np.arange(5000) + offset // 4)[0]
