"""Fingerprints of torch tensors, one call each or many at once; waits for the device.

The recorder uses `FingerprintQueue` instead, which never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from upguard_plugin.fingerprint.parts import dtype_name
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.records import Fingerprint, Placement

_of_thread = threading.local()


def _queue() -> FingerprintQueue:
    """A queue of this thread's, empty: to make one takes longer than to hash a small tensor."""
    if not hasattr(_of_thread, "queue"):
        _of_thread.queue = FingerprintQueue()
    queue: FingerprintQueue = _of_thread.queue
    return queue


def fingerprint(tensor: Tensor, *, placement: Placement | None = None) -> Fingerprint:
    """Fingerprint a tensor of any dtype, shape, strides and device.

    placement: which part of a logical tensor it is; fingerprints of disjoint parts add up to the
    fingerprint of the whole. None: it is the whole.
    Raises PlacementError if the placement does not fit the tensor, UnsupportedTensorError if the
    tensor has no plain bytes (quantised, meta). Waits for the tensor's device.
    """
    return fingerprint_many([tensor], [placement])[0]


def fingerprint_many(
    tensors: Sequence[Tensor], placements: Sequence[Placement | None] | None = None
) -> list[Fingerprint]:
    """Fingerprint many tensors in one kernel call and one wait per device. As `fingerprint`."""
    queue = _queue()
    queue.put_many(tensors, placements)
    hashes = queue.take()
    shapes = [
        tuple(tensor.shape)
        if placements is None or (placement := placements[i]) is None
        else placement.logical_shape
        for i, tensor in enumerate(tensors)
    ]
    return [
        Fingerprint(h, s, dtype_name(tensor.dtype), shape)
        for h, s, tensor, shape in zip(
            hashes.h.tolist(), hashes.s.tolist(), tensors, shapes, strict=True
        )
    ]
