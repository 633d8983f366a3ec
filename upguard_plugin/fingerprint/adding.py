"""Fingerprints of many tensors added up at once, in numpy. No torch, no numba.

In:  columns of `h`, residues modulo 2**61 - 1. (`s` is added modulo 2**64, as numpy does.)
Out: columns of residues.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.fingerprint.keys import FINGERPRINT_PRIME

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_PRIME = np.uint64(FINGERPRINT_PRIME)
_LOW = np.uint64((1 << 32) - 1)
_BITS = np.uint64(32)  # of a low half; the high half has 29
_LOW_29 = np.uint64((1 << 29) - 1)


def add_groups(h: Words, starts: Ints) -> Words:
    """The sum of each group of residues: of rows `starts[i]` up to the next start, at least one.

    Fewer than 2**32 rows in a group.
    """
    low = np.add.reduceat(h & _LOW, starts) if len(starts) else h[:0]
    high = np.add.reduceat(h >> _BITS, starts) if len(starts) else h[:0]
    return _joined(low, high)


def multiply(h: Words, factor: Words) -> Words:
    """The product of each residue with its factor, below 2**32."""
    return _joined((h & _LOW) * factor, (h >> _BITS) * factor)


def _joined(low: Words, high: Words) -> Words:
    """low + high * 2**32, reduced."""
    high = _reduced(high)
    # 2**61 is 1, so that the upper 32 of the 61 bits come back at the lower end.
    turned = ((high & _LOW_29) << _BITS) + (high >> np.uint64(29))
    return _reduced(_reduced(low) + _reduced(turned))


def _reduced(words: Words) -> Words:
    """Any 64 bits as a residue."""
    folded = (words & _PRIME) + (words >> np.uint64(61))
    reduced: Words = np.where(folded >= _PRIME, folded - _PRIME, folded)
    return reduced
