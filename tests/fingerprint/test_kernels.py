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
