"""The kernels agree with the numpy reference, whatever the dtype, shape, strides and placement."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fingerprint.tensors import DTYPES, random_tensor, reference
from upguard_plugin.fingerprint import fingerprint, fingerprint_array, fingerprint_many
from upguard_plugin.fingerprint.parts import dtype_name
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.fingerprint.sweeps import plan_sweeps
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import FINGERPRINT_PRIME, Axis, Layout


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_kernel_equals_reference_for_every_dtype(dtype):
    shapes = [(), (0,), (1,), (7,), (3, 5), (9, 113), (5, 6, 7), (3, 4099), (4, 4096)]
    tensors = [random_tensor(dtype, shape, seed) for seed, shape in enumerate(shapes)]

    one_by_one = [fingerprint(tensor) for tensor in tensors]

    assert one_by_one == [reference(tensor) for tensor in tensors]
    assert fingerprint_many(tensors) == one_by_one


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 9), max_size=4),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_strides_do_not_matter(dtype, shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    tensor = random_tensor(dtype, shape).permute(order)
    for dim in range(tensor.ndim):
        tensor = tensor.narrow(dim, *data.draw(st.sampled_from([(0, tensor.shape[dim]), (0, 1)])))
    if tensor.ndim and data.draw(st.booleans()):
        tensor = tensor[:: data.draw(st.integers(1, 3))]
    expected = reference(tensor)

    assert fingerprint(tensor) == expected
    assert fingerprint(tensor.contiguous()) == expected


TURNED = {
    "a matrix": lambda t: t(130, 77).t(),
    "wider than a band": lambda t: t(70, 2100).t(),
    "taller than a band": lambda t: t(2100, 70).t(),
    "of whole squares": lambda t: t(64, 512).t(),
    "batches": lambda t: t(3, 2, 67, 65).transpose(-1, -2),
    "channels last": lambda t: t(2, 5, 9, 80).permute(0, 3, 1, 2),
    "batch in the middle": lambda t: t(66, 3, 70).permute(2, 1, 0),
    "a corner": lambda t: t(200, 300)[3:140, 5:].t(),
    "every second column": lambda t: t(300, 90).t()[:, ::2],
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_transposed_storage_is_hashed_in_tiles(dtype, name):
    tensor = TURNED[name](lambda *shape: random_tensor(dtype, shape))
    sweeps = plan_sweeps(tensor.shape, tensor.stride(), tensor.itemsize, None, tiles=True)

    assert all(sweep.tile for sweep in sweeps)
    assert fingerprint(tensor) == reference(tensor)


def test_transposed_shards_add_up_in_tiles():
    whole = random_tensor(torch.float32, (300, 160)).t()
    parts = []
    for rank in range(2):
        layout = Layout((Axis("tp", 2, rank, (0, 1)),))
        columns = resolve_placement("i o[tp]", (160, 150), layout)
        parts.append(fingerprint(whole[:, 150 * rank : 150 * (rank + 1)], placement=columns))

    assert sum(part.h for part in parts) % FINGERPRINT_PRIME == reference(whole).h


def test_a_slot_per_put_in_order():
    queue = FingerprintQueue()
    tensors = [random_tensor(torch.float32, (n // 9,), n) for n in range(1500)]

    assert queue.put(tensors[0]) == 0
    assert queue.put_words(7, 9) == 1
    assert queue.put_many(tensors) == range(2, 1502)
    assert queue.put_bytes(b"state") == 1502
    hashes = queue.take()

    expected = [reference(t) for t in tensors]
    assert hashes.h.tolist()[2:1502] == [f.h for f in expected]
    assert (hashes.h[0], hashes.h[1], hashes.s[1]) == (expected[0].h, 7, 9)
    assert hashes.h[1502] == fingerprint_array(np.frombuffer(b"state", np.uint8)).h
    assert len(queue.take()) == 0
    assert queue.put(tensors[50]) == 0
    assert queue.take().h.tolist() == [expected[50].h]


def test_big_tensors_on_two_threads():
    before = torch.get_num_threads()
    tensor = random_tensor(torch.int64, (1_200_001,))
    try:
        torch.set_num_threads(1)
        alone = fingerprint(tensor)
        torch.set_num_threads(2)
        assert fingerprint(tensor) == alone
    finally:
        torch.set_num_threads(before)
