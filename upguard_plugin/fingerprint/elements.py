"""How the kernels that measure read an element of each torch dtype."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from upguard_plugin.fingerprint import measure

_CODES = {
    torch.float64: measure.FLOAT64,
    torch.complex128: measure.FLOAT64,  # as two real elements
    torch.float32: measure.FLOAT32,
    torch.complex64: measure.FLOAT32,
    torch.bfloat16: measure.BFLOAT16,
    torch.bool: measure.UINT8,
    torch.int8: measure.INT8,
    torch.int16: measure.INT16,
    torch.int32: measure.INT32,
    torch.int64: measure.INT64,
    torch.uint8: measure.UINT8,
    torch.uint16: measure.UINT16,
    torch.uint32: measure.UINT32,
    torch.uint64: measure.UINT64,
}
_BY_TABLE = {
    torch.float16: (measure.TABLE16, torch.float16),
    torch.complex32: (measure.TABLE16, torch.float16),
    torch.float8_e4m3fn: (measure.TABLE8, torch.float8_e4m3fn),
    torch.float8_e4m3fnuz: (measure.TABLE8, torch.float8_e4m3fnuz),
    torch.float8_e5m2: (measure.TABLE8, torch.float8_e5m2),
    torch.float8_e5m2fnuz: (measure.TABLE8, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu: (measure.TABLE8, torch.float8_e8m0fnu),
}


def reading(dtype: torch.dtype) -> tuple[int, int]:
    """The code of a dtype in `measure.py`, and the address of its table or 0.

    Packed and raw types have no numbers to measure: their code is NOT_MEASURED.
    """
    if dtype in _BY_TABLE:
        code, real = _BY_TABLE[dtype]
        return code, int(values_of(real).ctypes.data)
    return _CODES.get(dtype, measure.NOT_MEASURED), 0


@cache
def values_of(dtype: torch.dtype) -> np.ndarray:
    """The value of every bit pattern, float32."""
    patterns = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}")
    return torch.from_numpy(patterns.view(f"i{dtype.itemsize}")).view(dtype).float().numpy()


def is_numeric(dtype: torch.dtype) -> bool:
    """Whether elements of a dtype are numbers that can be measured."""
    return dtype in _CODES or dtype in _BY_TABLE
