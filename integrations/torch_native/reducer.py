"""Which parameters' gradients are in a bucket that DDP's reducer sends.

In:  a DistributedDataParallel, after each of its forwards.
Out: the names for the n-th collective that its reducer launches in the backward that follows.

The reducer tells the contents of its buckets only together with zeros as large as all gradients;
it is asked when they can have changed (once at first, once after the first step), and not at all
where that would take more than `MAX_BYTES`. Not while it launches: it holds its lock then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

MAX_BYTES = 1 << 30
_NUM_NAMED = 3  # parameters that are named of a bucket


@dataclass(frozen=True, slots=True)
class _Bucket:
    numel: int
    names: str


class ReducerBuckets:
    """The buckets of one DistributedDataParallel, in the order in which they are launched."""

    def __init__(
        self, model: DistributedDataParallel, name_of: Callable[[torch.Tensor], str | None]
    ) -> None:
        self._model = model
        self._name_of = name_of
        self._buckets: list[_Bucket] = []
        self._rebuilt: bool | None = None  # the model's word when the buckets were read
        self._next = 0
        self._handle: Any = None

    def attach(self) -> None:
        """Look at the buckets after each forward."""
        self._handle = self._model.register_forward_hook(self._on_forward)

    def detach(self) -> None:
        """Leave the model as it was."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def name_next(self, tensor: torch.Tensor) -> str | None:
        """What is in the tensor that the reducer launches now; None if it is no bucket of ours."""
        if self._next >= len(self._buckets) or tensor.numel() != self._buckets[self._next].numel:
            return None
        name = f"bucket {self._next} ({self._buckets[self._next].names})"
        self._next += 1
        return name

    def _on_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._next = 0
        rebuilt = bool(self._model._has_rebuilt_buckets)
        if not torch.is_grad_enabled() or rebuilt == self._rebuilt:
            return
        self._rebuilt = rebuilt
        total = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        if total > MAX_BYTES:
            self._buckets = []
            return
        with _disable_current_modes(), torch.no_grad():
            buckets = self._model.reducer._get_zeros_like_grad_buckets()
            self._buckets = [
                _Bucket(bucket.buffer().numel(), self._names(bucket.parameters()))
                for bucket in sorted(buckets, key=lambda bucket: bucket.index())
            ]

    def _names(self, parameters: list[torch.Tensor]) -> str:
        names = [self._name_of(parameter) or "?" for parameter in parameters]
        more = [f"{len(names) - _NUM_NAMED} more"] if len(names) > _NUM_NAMED else []
        return ", ".join(names[:_NUM_NAMED] + more)
