"""Whose gradients and weights are in a buffer that is reduced or gathered.

In:  the buffers of Megatron's DistributedDataParallel, which are cut into buckets.
Out: a name for any tensor that is a bucket or a part of one, for people to read.
"""

from __future__ import annotations

from typing import Any

import torch

from upguard_plugin.capture.extents import address_of
from upguard_plugin.capture.names import ParameterNames


class BucketOwner:
    """Names a buffer of gradients or weights by the parameters in it."""

    def __init__(self, chunks: list[Any], names: ParameterNames) -> None:
        self._buckets = [
            (bucket, _names_in(bucket, names))
            for chunk in chunks
            for buffers in ("buffers", "expert_parallel_buffers")
            for buffer in getattr(chunk, buffers, ())
            for bucket in getattr(buffer, "buckets", ())
        ]

    def __call__(self, tensor: torch.Tensor) -> str | None:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return None
        for bucket, name in self._buckets:
            if _is_inside(tensor, bucket.grad_data):
                return f"{name}.main_grad"
            if bucket.param_data is not None and _is_inside(tensor, bucket.param_data):
                return name
        return None


def _names_in(bucket: Any, names: ParameterNames) -> str:
    found = [name for p in bucket.params_list if (name := names.of(p)) is not None]
    if len(found) < 2:
        return "".join(found) or "?"
    return f"{len(found)} parameters from {found[0]} to {found[-1]}"


def _is_inside(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    if tensor.dtype != buffer.dtype or tensor.device != buffer.device:
        return False
    start, size = address_of(buffer), buffer.numel() * buffer.element_size()
    return start <= address_of(tensor) < start + size
