# mypy: ignore-errors
"""The CPU kernel for short runs that follow one another in the logical tensor.

In:  a loop of runs, equally far apart in memory (attention heads, column shards).
Out: (h, s). The runs are brought together in the first-level cache and hashed as one: to begin and
     to end a run costs as much as to hash a kilobyte.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba import uint64 as u64
from numba.core import cgutils
from numba.extending import intrinsic

from upguard_plugin.fingerprint import keys
from upguard_plugin.fingerprint.residues import add
from upguard_plugin.fingerprint.stretches import hash_stretch

Word = Any  # uint64 in a register

GATHERED_BYTES = keys.BLOCK_BYTES  # hashed at once
MAX_RUN_BYTES = 256  # longer runs are read faster where they are
SCRATCH_BYTES = GATHERED_BYTES + MAX_RUN_BYTES


@intrinsic
def _copy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.none(types.uint64, types.uint64, types.uint64), generate


@njit
def hash_gathered(
    address: int, step: int, num_runs: int, run_bytes: int, offset: int, with_sum: int, scratch: int
) -> tuple[Word, Word]:
    """Runs of at most MAX_RUN_BYTES that lie `step` bytes apart and are neighbours logically.

    offset: of the first run in the logical tensor. scratch: address of SCRATCH_BYTES bytes.
    """
    h = s = u64(0)
    run = 0
    while run < num_runs:
        at = offset + run * run_bytes
        # As far as the end of a block, so that the next ones are whole.
        room = keys.BLOCK_BYTES - at % keys.BLOCK_BYTES
        together = min(-(-room // run_bytes), num_runs - run)
        for k in range(together):
            _copy(u64(scratch + k * run_bytes), u64(address + (run + k) * step), u64(run_bytes))
        part_h, part_s = hash_stretch(scratch, together * run_bytes, at, with_sum)
        h, s = add(h, part_h), s + part_s
        run += together
    return h, s
