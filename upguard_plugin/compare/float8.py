"""The numbers that the 256 patterns of an 8-bit float stand for.

numpy has no such types; a table of each format is all that is needed to read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class _Format:
    mantissa_bits: int
    bias: int  # of the exponent
    # "ieee": as float16. "nan": the last of each sign is NaN. "unsigned zero": -0 is NaN.
    # "no sign": an exponent alone, whose last is NaN.
    ends: str


FLOAT8 = {
    "float8_e5m2": _Format(2, 15, "ieee"),
    "float8_e4m3fn": _Format(3, 7, "nan"),
    "float8_e5m2fnuz": _Format(2, 16, "unsigned zero"),
    "float8_e4m3fnuz": _Format(3, 8, "unsigned zero"),
    "float8_e8m0fnu": _Format(0, 127, "no sign"),
}


@cache
def values_of(dtype: str) -> npt.NDArray[np.float64]:
    """The value of each pattern, by the pattern. dtype: one of `FLOAT8`."""
    kind = FLOAT8[dtype]
    bits = np.arange(256)
    values: npt.NDArray[np.float64]
    if kind.ends == "no sign":  # a power of two
        values = np.ldexp(1.0, bits - kind.bias)
        values[255] = np.nan
        return values
    sign = np.where(bits < 128, 1.0, -1.0)
    steps = 1 << kind.mantissa_bits
    exponent, mantissa = (bits & 127) // steps, bits % steps
    whole = mantissa + np.where(exponent > 0, steps, 0)  # the lowest exponent has no hidden bit
    values = sign * np.ldexp(whole, np.maximum(exponent, 1) - kind.bias - kind.mantissa_bits)
    last = exponent == exponent.max()
    if kind.ends == "ieee":
        values[last] = np.where(mantissa[last], np.nan, sign[last] * np.inf)
    elif kind.ends == "nan":
        values[last & (mantissa == steps - 1)] = np.nan
    else:
        values[128] = np.nan
    return values
