"""Places in the program where one operator is called again and again.

What does not change from call to call (the event keys) is worked out once for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from upguard_plugin.capture.operators.arguments import Argument
from upguard_plugin.records import Source

if TYPE_CHECKING:
    from upguard_plugin.capture.recorder import Recorder

_NEVER_REPEATED = {"backward", "accumulate", "optimizer"}  # phases without a recompute


class Counter:
    """How often one operator was called for one boundary in one phase, in this step."""

    __slots__ = ("_calls", "_step")

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}  # by micro-batch
        self._step = 0

    def next(self, microbatch: int, step: int) -> int:
        """The number of the next call, from 0."""
        if self._step != step:
            self._calls.clear()
            self._step = step
        call = self._calls.get(microbatch, 0)
        self._calls[microbatch] = call + 1
        return call


class Site:
    """One operator called from one line for one boundary, in one phase."""

    __slots__ = ("_keys", "boundary", "calls", "operator", "phase", "source")

    def __init__(
        self, boundary: str, operator: str, phase: str, source: Source | None, calls: Counter
    ) -> None:
        self.boundary, self.operator = boundary, operator
        self.phase, self.source = phase, source
        self.calls = calls  # shared with the sites on other lines
        self._keys: dict[tuple[str, str, str | None], tuple[torch.dtype, torch.Size, int]] = {}

    def key(self, recorder: Recorder, argument: Argument, role: str, moment: str | None) -> int:
        """The recorder's key for the event of a tensor here; NONE for a role left out."""
        tensor, kind = argument.tensor, (argument.slot, role, moment)
        dtype, shape = tensor.dtype, tensor.shape
        last = self._keys.get(kind)  # mostly the same tensor again, or another one like it
        if last is not None and last[0] is dtype and last[1] == shape:
            return last[2]
        key = recorder.key_of(
            self.boundary, tensor, role=role, slot=argument.slot, phase=self.phase,
            operator=self.operator, placement=None, source=self.source, moment=moment,
        )  # fmt: skip
        self._keys[kind] = (dtype, shape, key)
        return key


class Sites:
    """All sites of a run, and how often each operator was called in this step."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, str, str, int], Site] = {}
        self._counters: dict[tuple[str, str, str], Counter] = {}
        self._step = 0
        self._firsts: dict[tuple[str, str, int, int], int] = {}
        self._repeated: dict[tuple[str, str, int, int], int] = {}

    def of(self, boundary: str, operator: str, phase: str, source: Source | None) -> Site:
        """The site of these, made once. Sources are interned by whoever found them."""
        name = (boundary, operator, phase, id(source))
        site = self._sites.get(name)
        if site is None:
            counter = self._counters.setdefault(name[:3], Counter())
            site = self._sites[name] = Site(boundary, operator, phase, source, counter)
        return site

    def next_call(self, site: Site, microbatch: int, module_call: int) -> int:
        """Number this call of the operator in its boundary, phase and micro-batch, from 0.

        In recompute: the number that the forward gave it, in that call of the module.
        """
        phase = site.phase
        if phase in _NEVER_REPEATED:
            return site.calls.next(microbatch, self._step)
        inside = (site.boundary, site.operator, microbatch, module_call)
        if phase == "recompute":
            repeated = self._repeated.get(inside, 0)
            self._repeated[inside] = repeated + 1
            return self._firsts.get(inside, 0) + repeated
        call = site.calls.next(microbatch, self._step)
        self._firsts.setdefault(inside, call)
        return call

    def begin_step(self) -> None:
        """Count from 0 again."""
        self._step += 1
        self._firsts.clear()
        self._repeated.clear()
