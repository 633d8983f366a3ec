# mypy: ignore-errors
"""A glance at memory: has somebody written it?

In:  the address of bytes of the host.
Out: a number made of words spread over them. Other numbers: other bytes. Equal numbers: what wrote
     a share f of the words in between went unseen with probability (1 - f) ** NUM_SPOTS.

It costs a fraction of a microsecond however many bytes there are, where a fingerprint reads all.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba import uint64 as u64

from upguard_plugin.fingerprint import keys
from upguard_plugin.fingerprint.cache import compile_kernel
from upguard_plugin.fingerprint.residues import mix, pointer

NUM_SPOTS = 64
SHORT_BYTES = 16 * NUM_SPOTS
GOLDEN = np.uint64(keys.GOLDEN)


@compile_kernel(nogil=False)
def read_spots(address: int, num_bytes: int) -> int:
    """One word of each of NUM_SPOTS equal stretches, at a place of its own, and the last word.

    Of less than SHORT_BYTES every byte.
    """
    if num_bytes < SHORT_BYTES:
        seen = u64(0)
        for byte in carray(pointer(u64(address), np.uint8), (num_bytes,)):
            seen = (seen ^ u64(byte)) * GOLDEN
        return int(seen >> u64(1))
    begin = (address + 7) & ~7
    num_words = (address + num_bytes - begin) >> 3
    words = carray(pointer(u64(begin), np.uint64), (num_words,))
    seen = words[num_words - 1]
    for k in range(NUM_SPOTS):
        first = k * num_words // NUM_SPOTS
        room = (k + 1) * num_words // NUM_SPOTS - first
        place = first + int(((mix(u64(k + 1) * GOLDEN) >> u64(32)) * u64(room)) >> u64(32))
        seen = (seen ^ words[place]) * GOLDEN
    return int(seen >> u64(1))
