"""Small tensors of every dtype, and what the reference says of them."""

from __future__ import annotations

from math import prod

import torch

from upguard_plugin.fingerprint import fingerprint_array
from upguard_plugin.fingerprint.parts import dtype_name

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.complex32, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_tensor(dtype, shape, seed=0):
    """Random bits: NaN, infinities and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    numel = prod(shape)
    raw = torch.randint(0, 256, (max(1, numel) * dtype.itemsize,), generator=generator)
    raw = raw.to(torch.uint8) & (1 if dtype == torch.bool else 255)
    return raw.view(dtype)[:numel].reshape(shape)


def as_array(tensor):
    """The same bits in numpy, with the same strides."""
    if tensor.dtype == torch.complex128:
        return tensor.numpy()
    return tensor.view(BITS[tensor.itemsize]).numpy().view(f"u{tensor.itemsize}")


def reference(tensor, placement=None):
    return fingerprint_array(as_array(tensor), placement=placement, dtype=dtype_name(tensor.dtype))
