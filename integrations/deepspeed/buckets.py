"""What DeepSpeed's communication buffers hold: whose gradients, whose weights, how much padding.

In:  calls of the engine's and the optimizer's functions that communicate.
Out: names for the buffers of the collectives inside, and the placement of ZeRO 3's.

Buffers are copies, made for one collective: they are told by the call they are made in, never by
address. ZeRO 3 pads a weight's last part with memory that nobody has written: it is no part of any
weight, and its bits differ between two equal runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch import distributed as dist

from upguard_plugin.capture.clipping import Replacement
from upguard_plugin.capture.extents import address_of
from upguard_plugin.capture.guard import Guard
from upguard_plugin.integrations.deepspeed.shards import Shards
from upguard_plugin.records import Piece, Placement

# Ranks compare their own numbers of weights and modules, which count all that a process has made:
# nothing of the training.
_CHECK = "assert_ints_same_as_other_ranks"
_ZERO = "deepspeed.runtime.zero."
_REDUCE3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


class Buffers:
    """Follows which parameters an engine communicates."""

    def __init__(self, guard: Guard, engine: Any, shards: Shards) -> None:
        self.recorder = guard.recorder
        self._guard = guard
        self._engine = engine
        self._optimizer = engine.optimizer
        self._is_stage3 = shards.is_stage3
        zero = getattr(getattr(engine, "_config", None), "zero_config", None)
        self._sums_weights = getattr(zero, "use_all_reduce_for_fetch_params", False)
        # The calls that are under way, each with what finds the parameters behind a buffer.
        self._calls: list[tuple[str, Callable[[Tensor], Sequence[Any]]]] = []
        self._single: Any = None  # the parameter whose part was the last input, on its own
        self._was_active = False
        self._replacements: list[Replacement] = []

    def attach(self) -> None:
        """Replace the functions that communicate. `detach` puts them back."""
        optimizer = self._optimizer
        self._watch(self._engine, "allreduce_bucket", "grad", self._in_bucket)
        self._watch(optimizer, "reduce_ipg_grads", "grad", lambda *_a, **_k: self._pending)
        self._watch(optimizer, _REDUCE3, "grad", lambda *_a, **_k: self._pending)
        for name, module in list(sys.modules.items()):
            if name.startswith(_ZERO) and hasattr(module, _CHECK):
                self._replacements.append(Replacement(module, _CHECK, self._hide, self._show))
        if self._is_stage3:
            for parameter in self._guard.names.parameters.values():
                for name in ("all_gather", "all_gather_coalesced"):
                    self._watch(parameter, name, "", self._gathered(parameter))

    def detach(self) -> None:
        """Leave DeepSpeed as it was."""
        while self._replacements:
            self._replacements.pop().remove()

    def _hide(self, *_args: Any, **_kwargs: Any) -> None:
        self._was_active = self.recorder.active
        self.recorder.select(False)

    def _show(self, _result: Any, *_args: Any, **_kwargs: Any) -> None:
        self.recorder.select(self._was_active)

    def name(self, tensor: Tensor) -> str | None:
        """Whose data a buffer holds, for people."""
        if not self._calls:
            return None
        what, find = self._calls[-1]
        names = [self._guard.names.of(parameter) or "?" for parameter in find(tensor)]
        if not names:
            return None
        if len(names) == 1:
            return f"{names[0]}.{what}" if what else names[0]
        kind = "bucket" if what else "weights"
        return f"{kind} of {names[0]}..{names[-1]}"

    def place(self, tensor: Tensor) -> Placement | None:
        """The parts of a buffer of ZeRO 3 that are no padding; None where there is none."""
        if not self._is_stage3 or not self._calls:
            return None
        parameters = [p for p in self._calls[-1][1](tensor) if hasattr(p, "ds_tensor")]
        if not parameters:
            return None
        group = getattr(parameters[0], "ds_process_group", None)
        world, rank = _size_and_rank(group)
        alone = [p for p in parameters if address_of(p.ds_tensor) == address_of(tensor)]
        self._single = alone[0] if alone else self._single
        for candidates in (parameters, [self._single] if self._single is not None else []):
            part = sum(p.ds_tensor.ds_numel for p in candidates)
            if all(p.ds_tensor.ds_numel * world == p.ds_numel for p in candidates):
                continue
            if tensor.numel() == part * world and self._sums_weights and not self._calls[-1][0]:
                return _one_by_one(candidates, world)
            if tensor.numel() == part * world:
                return _without_padding(candidates, range(world), 0, part * world)
            if tensor.numel() == part:
                return _without_padding(candidates, [rank], rank * part, part * world)
        return None

    def _watch(self, owner: Any, name: str, what: str, find: Callable[..., Any]) -> None:
        if not callable(getattr(owner, name, None)):
            return

        def before(*args: Any, **kwargs: Any) -> None:
            self._calls.append((what, find(*args, **kwargs)))

        def after(result: Any, *args: Any, **kwargs: Any) -> None:
            if self._calls:
                self._calls.pop()

        self._replacements.append(Replacement(owner, name, before, after))

    def _in_bucket(self, bucket: Sequence[Tensor], *_a: Any, **_k: Any) -> Callable[..., Any]:
        """Of ZeRO 0: gradients, or whole groups of them."""
        inside = [
            parameter
            for parameter in self._guard.names.parameters.values()
            if (grad := _gradient(parameter)) is not None
            and any(_is_inside(grad, one) for one in bucket)
        ]
        return lambda tensor: inside

    def _pending(self, tensor: Tensor) -> Sequence[Any]:
        """Of ZeRO 1, 2 and 3: what waits in the bucket of the buffer's dtype."""
        optimizer = self._optimizer
        buckets = getattr(optimizer, "ipg_buckets", None)
        if buckets is None:  # DeepSpeed before 0.17 has one bucket
            entries = getattr(optimizer, "params_in_ipg_bucket", None)
            entries = optimizer.params_in_ipg_buckets if entries is None else entries
        else:
            filled = [bucket for bucket in buckets.values() if bucket.params]
            bucket = buckets.get(tensor.dtype) or (filled[0] if filled else None)
            entries = [] if bucket is None else bucket.params
        return [self._parameter_in(entry) for entry in entries]

    def _parameter_in(self, entry: Any) -> Any:
        if not isinstance(entry, tuple):
            return entry
        group, second = entry[0], entry[1]
        return self._optimizer.bit16_groups[group][second] if isinstance(second, int) else second

    def _gathered(self, parameter: Any) -> Callable[..., Any]:
        def find(parameters: Any = None, *_args: Any, **kwargs: Any) -> Callable[..., Any]:
            given = kwargs.get("param_list", kwargs.get("params", parameters))
            # In the order in which DeepSpeed lays them out; it is given a set.
            wanted = [parameter] if given is None else sorted(given, key=lambda p: p.ds_id)
            self._single = None

            def of(tensor: Tensor) -> Sequence[Any]:
                return [p for p in wanted if p.ds_tensor.dtype == tensor.dtype] or wanted

            return of

        return find


def _gradient(parameter: Any) -> Tensor | None:
    found = getattr(parameter, "_hp_grad", None)
    return parameter.grad if found is None else found


def _is_inside(tensor: Tensor, buffer: Tensor) -> bool:
    if tensor.dtype != buffer.dtype or tensor.numel() == 0:
        return False
    start = address_of(buffer)
    return start <= address_of(tensor) < start + buffer.numel() * buffer.element_size()


def _size_and_rank(group: Any) -> tuple[int, int]:
    return dist.get_world_size(group), dist.get_rank(group)


def _one_by_one(parameters: Sequence[Any], world: int) -> Placement:
    """The placement of whole parameters in a buffer that is summed, one after the other."""
    pieces, at = [], 0
    for parameter in parameters:
        pieces.append(Piece((parameter.ds_numel,), at, (1,), at, (1,)))
        at += parameter.ds_tensor.ds_numel * world
    return Placement("*", (at,), tuple(pieces))


def _without_padding(
    parameters: Sequence[Any], ranks: Sequence[int], offset: int, total: int
) -> Placement:
    """The placement of the parts of these ranks in the buffer of all, one rank after the other."""
    pieces = []
    at = 0
    for rank in ranks:
        for parameter in parameters:
            part = parameter.ds_tensor.ds_numel
            real = max(0, min(part, parameter.ds_numel - rank * part))
            if real:
                pieces.append(Piece((real,), at, (1,), offset + at, (1,)))
            at += part
    return Placement("*", (total,), tuple(pieces))
