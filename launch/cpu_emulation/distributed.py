"""Process groups: NCCL becomes gloo, and what is being sent stays in memory until it has left.

Pipeline schedules free an output's storage right after `isend`. On a GPU the stream's order makes
that safe; gloo's thread would read freed memory, and a comparison would report true corruption that
the emulation had caused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from upguard_plugin.launch.cpu_emulation.patches import Patches

_GPU_ONLY = ("device_id", "device_ids", "pg_options")


def emulate_process_groups(patches: Patches) -> None:
    """Start gloo where a client asks for NCCL, and keep sent storages alive."""
    for name in ("init_process_group", "new_group", "barrier"):
        _set_both(patches, name, _on_gloo(getattr(distributed_c10d, name)))
    _set_both(patches, "isend", _kept_until_sent(distributed_c10d.isend))


def _set_both(patches: Patches, name: str, value: object) -> None:
    patches.set(distributed_c10d, name, value)
    patches.set(dist, name, value)


def _on_gloo(real: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def on_gloo(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for name in _GPU_ONLY:
            arguments.pop(name, None)
        backend = arguments.get("backend")
        if backend is not None and "nccl" in str(backend).lower():
            arguments["backend"] = "gloo"
        return real(**arguments)

    return on_gloo


def _kept_until_sent(real: Callable[..., Any]) -> Callable[..., Any]:
    """A work is complete once somebody waited for it; a send that nobody waits for is kept."""
    pending: list[tuple[Any, torch.UntypedStorage]] = []

    @functools.wraps(real)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pending[:] = [entry for entry in pending if not entry[0].is_completed()]
        work = real(tensor, *args, **kwargs)
        if work is not None:
            pending.append((work, tensor.untyped_storage()))
        return work

    return isend
