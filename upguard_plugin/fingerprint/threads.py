"""Big CPU tensors on several threads.

The kernels release the GIL, so plain threads do. numba's own parallel loops are not used: their
default scheduler ends the process when two threads enter it, and a forked child may hang in it.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from upguard_plugin.fingerprint.cpu import hash_long_run
from upguard_plugin.fingerprint.keys import BLOCK_BYTES, FINGERPRINT_PRIME, MASK64

LONG_BYTES = 1 << 20  # from here on other Python threads may run while a kernel does
PARALLEL_BYTES = 4 << 20  # below it a hand-over to another thread costs more than it saves


def hash_run_parallel(address: int, num_bytes: int, offset: int, with_sum: int, out: int) -> None:
    """As `hash_run`, on at most `torch.get_num_threads()` threads. The result is the same."""
    num_threads = min(torch.get_num_threads(), 1 + num_bytes // PARALLEL_BYTES)
    if num_bytes < PARALLEL_BYTES or num_threads == 1:
        hash_long_run(address, num_bytes, offset, with_sum, out)
        return
    step = -(-num_bytes // num_threads // BLOCK_BYTES) * BLOCK_BYTES
    starts = range(0, num_bytes, step)
    results = np.zeros((len(starts), 2), np.uint64)
    jobs = [
        (address + at, min(step, num_bytes - at), offset + at, with_sum, results[k:].ctypes.data)
        for k, at in enumerate(starts)
    ]
    futures = [_pool(os.getpid(), num_threads - 1).submit(hash_long_run, *job) for job in jobs[1:]]
    hash_long_run(*jobs[0])
    for future in futures:
        future.result()
    target = (ctypes.c_uint64 * 2).from_address(out)
    target[0] = sum(map(int, results[:, 0])) % FINGERPRINT_PRIME
    target[1] = sum(map(int, results[:, 1])) & MASK64


@lru_cache(maxsize=4)
def _pool(process: int, num_threads: int) -> ThreadPoolExecutor:
    """Per process: the threads of a parent do not live on in a forked child."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="upguard-fingerprint")
