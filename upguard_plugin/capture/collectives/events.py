"""The events of a collective: inputs at its launch, outputs and inputs that must stay at its end.

In:  a `Launch`, and later the word that its buffers are final.
Out: events. All stand in program order where the collective was launched, also when it ends later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.collectives.caller import Caller
from upguard_plugin.capture.collectives.groups import Groups, Member
from upguard_plugin.capture.collectives.holdings import Holds
from upguard_plugin.capture.collectives.plans import Buffer, Plan
from upguard_plugin.capture.collectives.under_way import Output, Use
from upguard_plugin.capture.deferred import Ticket
from upguard_plugin.capture.padding import tell_placed
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.capture.shield import shielded
from upguard_plugin.records import Placement


@dataclass(slots=True, eq=False)
class Launch:
    """A collective on its way to torch's kernel."""

    operator: str  # its name in torch's namespace c10d
    plan: Plan
    member: Member
    caller: Caller
    boundary: str
    fields: dict[str, Any]  # of all its events, as `Recorder.record` takes them
    holds: Holds = field(default_factory=dict)  # whose elements lie in its buffers


@dataclass(frozen=True, slots=True)
class Reserved:
    """A buffer that has its place in the trace, and no fingerprint yet."""

    ticket: Ticket
    slot: str
    memory: torch.Tensor


class CollectiveEvents:
    """Records what happens to the buffers of collectives."""

    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        self.recorder = recorder
        # Adapters that know of buffers with padding, or whose parts are not in rank order.
        self.placers: list[Callable[[torch.Tensor], Placement | None]] = []
        self._groups = groups

    def launched(self, launch: Launch) -> None:
        """Record the inputs."""
        with torch.no_grad():
            for buffer in launch.plan.inputs:
                self.recorder.record(
                    launch.boundary, _dense(buffer.tensor), role="input", slot=buffer.slot,
                    moment="launch", placement=self._placement_of(buffer),
                    holds=launch.holds.get(("input", buffer.slot), ()), **launch.fields,
                )  # fmt: skip
                self._tell_padding(buffer)

    def launched_with_objects(self, launch: Launch) -> None:
        """That it was called, with nothing inside: equal objects need not have equal pickles."""
        for role, moment, buffers in (
            ("input", "launch", launch.plan.inputs),
            ("output", "completion", launch.plan.outputs),
        ):
            for buffer in buffers:
                self.recorder.record(
                    launch.boundary, buffer.tensor.new_empty(0), role=role, slot=buffer.slot,
                    moment=moment, **launch.fields,
                )  # fmt: skip

    def reserve(self, launch: Launch, role: str, buffers: Sequence[Buffer]) -> list[Reserved]:
        """Keep places for what buffers hold at the end."""
        reserved = []
        for buffer in buffers:
            ticket = self.recorder.reserve(
                launch.boundary, buffer.tensor, role=role, slot=buffer.slot,
                moment="completion", placement=self._placement_of(buffer),
                holds=launch.holds.get((role, buffer.slot), ()), **launch.fields,
            )  # fmt: skip
            self._tell_padding(buffer)
            if ticket is not None:
                reserved.append(Reserved(ticket, buffer.slot, _memory_of(buffer.tensor)))
        return reserved

    @shielded
    def finish(
        self, launch: Launch, reserved: Sequence[Reserved], work: Work | None, final: bool
    ) -> None:
        """The work is over. Called from any thread; the buffers are final unless it failed."""
        if self.recorder.failure:
            return
        with torch.no_grad(), _disable_current_modes():
            for one in reserved:
                if not final:
                    self.recorder.cancel(one.ticket)
                    continue
                if work is not None and launch.plan.from_any:
                    one.ticket.peer, one.ticket.pair_seq = self._sender(launch, work)
                self.recorder.fill(one.ticket, _dense(one.memory))

    @shielded
    def used_early(self, output: Output, has_ended: bool, use: Use) -> None:
        """Record that an output was used before its work was waited for, and whether it was over.

        An event of the collective without an `op`, and without bytes: what an operator finds in
        memory that is under way is another thing each time.
        """
        if not self.recorder.active:
            return
        origin = output.origin
        with torch.no_grad(), _disable_current_modes():
            self.recorder.record(
                origin.boundary, torch.empty(0, dtype=torch.uint8), slot=output.slot,
                role="output" if use.writes else "input", phase=use.phase, operator=use.operator,
                call=origin.call, group=origin.group, source=use.source, value=float(has_ended),
            )  # fmt: skip

    def _placement_of(self, buffer: Buffer) -> Placement | None:
        return self._placed(buffer.tensor) or buffer.placement

    def _placed(self, tensor: torch.Tensor) -> Placement | None:
        placed = (placement for placer in self.placers if (placement := placer(tensor)))
        return next(placed, None)

    def _tell_padding(self, buffer: Buffer) -> None:
        """What a placer leaves out of a buffer is no value for operators either."""
        storages = self.recorder.storages
        placement = None if storages is None else self._placed(buffer.tensor)
        if storages is not None and placement is not None:
            tell_placed(storages, buffer.tensor, placement)

    def _sender(self, launch: Launch, work: Work) -> tuple[int, int]:
        """(global rank, number of the message) of the one that a receive from any has met."""
        member, what = launch.member, launch.plan
        source = member.global_rank(work._source_rank())
        here = member.global_rank(member.index)
        assert what.tag is not None
        return source, self._groups.next_message(member.group, source, here, what.tag)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as it is now, whatever its owner gives to the tensor later.

    A pipeline stage frees what it has sent by giving the tensor another `.data`. A sparse tensor
    is itself: its result lies in new memory.
    """
    if tensor.layout is not torch.strided:
        return tensor
    with torch.no_grad(), _disable_current_modes():
        return tensor.detach()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as the values it stands for: how it is stored is the backend's choice."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
