"""The linear sketch: how far apart two unequal tensors are, from a few numbers kept of each.

A count-sketch in float64. Element i of the logical tensor, b = i >> 11, c = i & 2047:

    lane   = c mod K
    sign   = column_sign[c] * block_sign[b, lane]
    bucket = (lane + rotation[b]) mod K             without it a changed column defeats any K

Sketches of shards add up, and so do sketches of partial sums, within rounding. Non-finite values
count as 0. A sketch depends on the order of summation in its last bits: it explains, it never
decides. The definition and the estimate; numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

from upguard_plugin.errors import UsageError
from upguard_plugin.fingerprint import keys

Floats = npt.NDArray[np.float64]
Array = npt.NDArray

SKETCH_BLOCK = 2048  # elements that share block signs and a rotation
DEFAULT_SIZE = 64
SIZES = (4, 8, 16, 32, 64, 128, 256)  # powers of two that divide a block; 4 * 64 sign bits a block

# Distance between 1 and the next number, as torch.finfo says.
EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}

_SIGN_BITS = [keys.mix(keys.SEED_COLUMN_SIGN + (c + 1) * keys.GOLDEN) >> 63 for c in range(2048)]
COLUMN_SIGNS: Floats = 1.0 - 2.0 * np.array(_SIGN_BITS, np.float64)
COLUMN_SIGNS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Distance:
    """An estimate of ||a - b|| / ||a||."""

    relative_l2: float  # infinite where only b is non-zero
    standard_error: float  # of relative_l2, for differences spread over many elements


def check_size(size: int) -> int:
    """Raise UsageError unless a sketch can have this many buckets."""
    if size not in SIZES:
        raise UsageError(
            f"a sketch of {size} buckets is not possible",
            remedy="use one of " + ", ".join(map(str, SIZES)),
        )
    return size


def sketch_array(values: Array, size: int = DEFAULT_SIZE, index: Array | None = None) -> Floats:
    """The sketch of real or complex numbers, slow and obvious: float64 [size].

    index: row-major positions of the elements in the logical tensor; None: 0, 1, 2, ...
    A complex element counts as two real ones. Raises UsageError for an impossible size.
    """
    check_size(size)
    flat = np.ascontiguousarray(values).reshape(-1)
    where = np.arange(flat.size) if index is None else np.asarray(index).reshape(-1)
    if np.iscomplexobj(flat):
        flat = flat.view(flat.real.dtype)
        where = (2 * where[:, None] + np.arange(2)).reshape(-1)
    numbers = flat.astype(np.float64)
    numbers = np.where(np.isfinite(numbers), numbers, 0.0)
    out = np.zeros(size)
    for block in np.unique(where >> 11).tolist():
        mine = where >> 11 == block
        column = where[mine] & 2047
        lane = column % size
        words = [
            keys.mix(keys.SEED_BLOCK_SIGN + (4 * block + t + 1) * keys.GOLDEN) for t in range(4)
        ]
        bits = np.array([words[k >> 6] >> (k & 63) & 1 for k in lane.tolist()], np.float64)
        rotation = keys.mix(keys.SEED_BLOCK_SIGN ^ (block * keys.GOLDEN & keys.MASK64)) >> 20
        bucket = (lane + rotation % size) % size
        signs = COLUMN_SIGNS[column] * (1.0 - 2.0 * bits)
        out += np.bincount(bucket, weights=signs * numbers[mine], minlength=size)
    return out


def estimate_distance(baseline: Floats, target: Floats, *, norm: float | None = None) -> Distance:
    """Estimate ||baseline - target|| / ||baseline|| from two sketches of the same size, [K].

    norm: ||baseline|| where it is known exactly; else it is estimated from its sketch too.
    A squared norm is estimated with a relative standard error of sqrt(2 / K).
    Raises UsageError if the sizes differ or a sketch was not taken (NaN).
    """
    if baseline.shape != target.shape or baseline.ndim != 1:
        raise UsageError(
            "cannot estimate a distance from sketches of different sizes",
            evidence={"baseline": list(baseline.shape), "target": list(target.shape)},
        )
    if np.isnan(baseline).any() or np.isnan(target).any():
        raise UsageError("cannot estimate a distance: a sketch was not taken")
    difference = float(np.linalg.norm(baseline - target))
    length = float(np.linalg.norm(baseline)) if norm is None else norm
    if length == 0.0:
        return Distance(inf if difference else 0.0, 0.0)
    ratio = difference / length
    num_estimates = 1 if norm is not None else 2
    return Distance(ratio, ratio * sqrt(num_estimates / (2 * len(baseline))))
