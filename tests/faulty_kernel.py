"""A backend with a fault, below UpGuard's probe, as that of a library would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# c10d has the same kernels for CUDA, and gloo is the backend of both devices: this is how the
# dispatcher finds the kernel whose place ours has taken, and calls it without the GIL. The other
# way, `torch.library.get_kernel(...).call_boxed`, holds the GIL while it waits for gloo's queue,
# and a thread of gloo holds that queue while it waits for the GIL to free a tensor: some 250 calls
# in a row are enough to hang for ever.
_ORIGINAL = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@contextmanager
def faulty_kernel(operator: str, call: Callable[..., Any], on: bool = True) -> Iterator[None]:
    """Put another kernel in the place of that of a c10d operator on the CPU.

    call: gets the original kernel and the operator's arguments, and returns the result.
    """
    if not on:
        yield
        return
    overload = getattr(torch.ops.c10d, operator).default
    library = torch.library.Library("c10d", "IMPL")

    def original(*args: Any) -> Any:
        return overload.redispatch(_ORIGINAL, *args)

    def kernel(*args: Any) -> Any:
        return call(original, *args)

    library.impl(operator, kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
