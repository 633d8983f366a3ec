"""The fingerprint in numpy: the definition, slow and obvious. No torch, no numba.

In:  an array that holds a tensor's elements (bfloat16 and float8 as unsigned bits), any strides.
Out: its `Fingerprint`. The kernels must agree with this file bit for bit.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from upguard_plugin.errors import PlacementError, UnsupportedTensorError
from upguard_plugin.fingerprint.keys import BLOCK_WORDS, FINGERPRINT_PRIME, KEYS_B, MASK64, keys_a
from upguard_plugin.records import Fingerprint, Piece, Placement

Array = npt.NDArray


def fingerprint_array(
    array: Array, *, placement: Placement | None = None, dtype: str | None = None
) -> Fingerprint:
    """Fingerprint a numpy array of any shape and strides.

    placement: which part of a logical tensor the array is; None: the whole.
    dtype: the name to keep, where numpy has no such type ("bfloat16" for an array of uint16 bits).
    Raises PlacementError if a piece reaches outside the array, UnsupportedTensorError if the array
    has no plain bytes.
    """
    name = dtype or array.dtype.name
    bits = element_bits(array)
    if placement is None:
        h, s = hash_elements(bits, np.arange(len(bits)))
        return Fingerprint(h, s, name, tuple(array.shape))
    h = s = 0
    for piece in placement.pieces:
        local, logical = piece_indices(piece)
        if len(local) and (local.min() < 0 or local.max() >= len(bits)):
            shape = list(array.shape)
            raise PlacementError(
                f"placement {placement.spec!r} reaches outside a tensor of shape {shape}"
            )
        piece_h, piece_s = hash_elements(bits[local], logical)
        h, s = (h + piece_h) % FINGERPRINT_PRIME, (s + piece_s) & MASK64
    return Fingerprint(h, s, name, placement.logical_shape)


def element_bits(array: Array) -> Array:
    """The elements in row-major order as unsigned integers, [N]; 16-byte elements as [N, 2]."""
    if (
        array.dtype.kind not in "?biufcV"
        or array.dtype.byteorder == ">"
        or sys.byteorder != "little"
    ):
        raise UnsupportedTensorError(
            f"cannot fingerprint an array of dtype {array.dtype} and shape {list(array.shape)}",
            remedy="hash little-endian numbers",
        )
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.itemsize == 16:
        return flat.view(np.uint64).reshape(-1, 2)
    return flat.view(f"u{flat.dtype.itemsize}")


def hash_elements(bits: Array, index: Array) -> tuple[int, int]:
    """Sum up h and s of elements that lie at row-major positions `index` of the logical tensor.

    bits: unsigned integers [N] of 1, 2, 4 or 8 bytes, or [N, 2] for elements of 16 bytes.
    """
    if bits.ndim == 2:
        index = (2 * index[:, None] + np.arange(2)).reshape(-1)
        bits = bits.reshape(-1)
    size = bits.dtype.itemsize
    position = index.astype(np.uint64) * np.uint64(size)  # in bytes
    value = bits.astype(np.uint64)
    h = 0
    for start in range(0, size, 4):  # 8 bytes are two words; 1, 2 or 4 lie inside one
        word = (position + np.uint64(start)) >> np.uint64(2)
        part = (value >> np.uint64(8 * start)) & np.uint64(0xFFFFFFFF)
        part = part << ((position & np.uint64(3)) * np.uint64(8))
        key_a = keys_a(word // np.uint64(BLOCK_WORDS)).astype(object)
        key_b = KEYS_B[word % np.uint64(BLOCK_WORDS)].astype(object)
        h += int((key_a * key_b % FINGERPRINT_PRIME * part.astype(object)).sum())
    s = int(value.sum(dtype=np.uint64)) if size == 8 else 0
    return h % FINGERPRINT_PRIME, s


def piece_indices(piece: Piece) -> tuple[Array, Array]:
    """Row-major numbers of a piece's elements, in the rank's tensor and in the logical tensor."""
    local = np.array(piece.local_start, np.int64)
    logical = np.array(piece.logical_start, np.int64)
    for size, ls, gs in zip(piece.sizes, piece.local_strides, piece.logical_strides, strict=True):
        steps = np.arange(size, dtype=np.int64)
        local = local[..., None] + steps * ls
        logical = logical[..., None] + steps * gs
    return local.reshape(-1), logical.reshape(-1)
