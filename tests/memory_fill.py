"""What malloc hands out, filled with a byte of one's choice: two fillings show who reads it."""

from __future__ import annotations

import ctypes
import gc
import platform

IS_GLIBC = platform.libc_ver()[0] == "glibc"  # no other malloc can be told to fill memory
# As fp32 3.0 and 0.7, as bf16 likewise: nothing that overflows.
FILLS: tuple[int | None, int | None] = (0x40, 0x3F) if IS_GLIBC else (None, None)
_M_PERTURB = -6  # of glibc's mallopt


def fill_memory(byte: int | None) -> None:
    """From now on new memory is filled with this byte, freed memory with its complement.

    None: neither is.
    """
    if IS_GLIBC:
        gc.collect()  # what dies later would write into the memory of the next run
        perturbed = 0 if byte is None else byte ^ 0xFF
        assert ctypes.CDLL(None).mallopt(_M_PERTURB, perturbed) == 1
