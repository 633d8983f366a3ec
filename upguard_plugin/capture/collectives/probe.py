"""Collectives, whoever calls them: from a c10d operator to the events of its buffers.

In:  every call of torch.distributed: from Python, DDP's C++ reducer, functional collectives.
Out: input fingerprints at launch; outputs, and inputs that must not have changed, at completion.

Every collective passes torch's dispatcher. We stand in front of its kernels at the key
`BackendSelect`, which every call meets and no kernel of c10d uses, and pass the call on without the
GIL. An event stands in program order where its collective was launched, also when it ends later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import _disable_current_modes

from upguard_plugin.capture.collectives.caller import Caller, find_caller
from upguard_plugin.capture.collectives.groups import Groups, Member
from upguard_plugin.capture.collectives.holdings import HolderOf, Holds, holds_of
from upguard_plugin.capture.collectives.owners import OwnerOf
from upguard_plugin.capture.collectives.plans import OPERATORS, Buffer, Plan, plan
from upguard_plugin.capture.collectives.works import Pending, Works
from upguard_plugin.capture.deferred import Ticket
from upguard_plugin.capture.recorder import Recorder, Wire
from upguard_plugin.capture.shield import shielded
from upguard_plugin.errors import UsageError
from upguard_plugin.records import Placement

_KEY = torch._C.DispatchKey.BackendSelect
_PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"
_BEFORE_BACKWARD = ("start", "data", "forward", "loss")
_UP_TO_BACKWARD = (*_BEFORE_BACKWARD, "backward", "recompute", "accumulate")
_GRADIENT_ENDS = (".grad", ".main_grad")  # how a buffer's owner says that it holds gradients


class Reducer(Protocol):
    """Names the buffers that C++ launches in backward, in the order in which it launches them."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...
    def name_next(self, tensor: torch.Tensor) -> str | None: ...


@dataclass(slots=True, eq=False)
class _Launch:
    """A collective on its way to torch's kernel."""

    plan: Plan
    member: Member
    caller: Caller
    boundary: str
    fields: dict[str, Any]  # of all its events, as `Recorder.record` takes them
    holds: Holds  # by role and slot


class CollectiveProbe:
    """Watches all collectives of this process. One at a time can be attached."""

    _attached: ClassVar[CollectiveProbe | None] = None

    def __init__(
        self,
        recorder: Recorder,
        *,
        owners: Sequence[OwnerOf] = (),
    ) -> None:
        """owners: who can name a buffer."""
        self.recorder = recorder
        self.groups = Groups()
        self.owners = list(owners)
        self.holders: list[HolderOf] = []  # who knows what lies in a buffer without a name
        # Adapters that know of buffers with padding, or whose parts are not in rank order.
        self.placers: list[Callable[[torch.Tensor], Placement | None]] = []
        self._reducers: list[Reducer] = []
        self._works = Works()
        self._library: torch.library.Library | None = None
        self._functional: torch.library.Library | None = None

    @classmethod
    def in_use(cls) -> bool:
        """Whether a probe of this process is attached."""
        return cls._attached is not None

    def add_reducer(self, reducer: Reducer) -> None:
        """Have the buckets of a model's reducer named, as long as this probe is attached."""
        self._reducers.append(reducer)
        if CollectiveProbe._attached is self:
            reducer.attach()

    def attach(self) -> None:
        """Begin to watch. Raises UsageError if another probe of this process is attached."""
        if CollectiveProbe._attached is not None:
            raise UsageError("cannot record collectives twice: another guard is open in this run")
        CollectiveProbe._attached = self
        self._works.attach()
        for reducer in self._reducers:
            reducer.attach()
        self._library = torch.library.Library("c10d", "IMPL")
        for name in OPERATORS:
            operator = getattr(torch.ops.c10d, name).default
            types = [str(argument.type) for argument in operator._schema.arguments]
            call = partial(self._call, name, operator, types.index(_PROCESS_GROUP))
            self._library.impl(name, call, "BackendSelect", with_keyset=True)
        self._functional = torch.library.Library("_c10d_functional", "IMPL")
        self._functional.impl("wait_tensor", self._wait_tensor, "BackendSelect", with_keyset=True)

    def detach(self) -> None:
        """Give torch its own path back; works that are under way stay out of the trace."""
        if CollectiveProbe._attached is not self:
            return
        for library in (self._library, self._functional):
            if library is not None:
                library._destroy()
        for reducer in self._reducers:
            reducer.detach()
        self._works.detach()
        self._works.catch_up()
        CollectiveProbe._attached = None
        left = self._works.abandon()
        for pending in left:
            pending.finish(pending.work, False)
        if self._works.num_dropped or left:
            self.recorder.note(
                f"{self._works.num_dropped} works of collectives were dropped without a wait, "
                f"{len(left)} were still under way at the end: their outputs are not in the trace"
            )

    def _call(
        self,
        name: str,
        operator: torch._ops.OpOverload,
        group_index: int,
        keys: torch._C.DispatchKeySet,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        group = ProcessGroup.unbox(args[group_index])
        launch = self._before(name, group, args)
        result = operator.redispatch(keys.remove(_KEY), *args, **kwargs)
        if launch is not None:
            self._after(launch, group, result)
        return result

    def _wait_tensor(self, keys: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
        operator = torch.ops._c10d_functional.wait_tensor.default
        result = operator.redispatch(keys.remove(_KEY), tensor)
        self._works.tensor_waited(tensor)
        return result

    @shielded
    def _before(self, name: str, group: ProcessGroup, args: Sequence[Any]) -> _Launch | None:
        """Number the call, and record its inputs if the step is recorded."""
        member = self.groups.member(group)
        what = plan(name, args, member)
        wire = self._number(what, member)
        if not self.recorder.active or _is_traced(what):
            return None
        caller = find_caller(with_factor=what.reduce_op == "premul_sum")
        boundary = self._boundary(what, member, caller)
        launch = _Launch(
            what,
            member,
            caller,
            boundary,
            {
                "phase": self._phase(what, caller, boundary),
                "operator": f"c10d.{name}",
                "call": self.recorder.position.next_call(boundary),
                "group": member.group,
                "op": what.describe(caller.factor),
                "wire": wire,
                "source": caller.source,
            },
            self._holds(what, member, boundary),
        )
        if caller.of_objects:
            self._record_call_of_objects(launch)
            return None
        with torch.no_grad():
            for buffer in what.inputs:
                self.recorder.record(
                    boundary, _dense(buffer.tensor), role="input", slot=buffer.slot,
                    moment="launch", placement=self._placement_of(buffer),
                    holds=launch.holds.get(("input", buffer.slot), ()), **launch.fields,
                )  # fmt: skip
        return launch

    def _record_call_of_objects(self, launch: _Launch) -> None:
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

    @shielded
    def _after(self, launch: _Launch, group: ProcessGroup, result: Any) -> None:
        """Reserve the events of the completion, and see to it that they are filled."""
        what = launch.plan
        # What a functional send returns is not what it sends: nothing says when that is free again.
        if not what.has_completion or (what.name == "send" and launch.caller.functional):
            return
        tickets = [
            (ticket, _memory_of(buffer.tensor))
            for role, buffers in (("input", what.untouched_inputs()), ("output", what.outputs))
            for buffer in buffers
            if (ticket := self._reserve(launch, role, buffer)) is not None
        ]
        if not tickets:
            return
        handle = result[-1] if isinstance(result, tuple) else result
        finish = partial(self._finish, launch, tickets)
        if handle is None:  # ordered by the current stream
            finish(None, True)
            return
        tensors = [buffer.tensor for buffer in (*what.inputs, *what.outputs)]
        on_cpu = all(tensor.is_cpu for tensor in tensors)
        caller = launch.caller
        pending = Pending(Work.unbox(handle), tensors, finish, functional=caller.functional)
        self._works.add(pending, group, by_future=on_cpu or caller.from_cpp)

    def _reserve(self, launch: _Launch, role: str, buffer: Buffer) -> Ticket | None:
        return self.recorder.reserve(
            launch.boundary, buffer.tensor, role=role, slot=buffer.slot,
            moment="completion", placement=self._placement_of(buffer),
            holds=launch.holds.get((role, buffer.slot), ()), **launch.fields,
        )  # fmt: skip

    @shielded
    def _finish(
        self,
        launch: _Launch,
        tickets: Sequence[tuple[Ticket, torch.Tensor]],
        work: Work | None,
        final: bool,
    ) -> None:
        """The work is over. Called from any thread; the buffers are final unless it failed."""
        if self.recorder.failure:
            return
        with torch.no_grad(), _disable_current_modes():
            for ticket, tensor in tickets:
                if not final:
                    self.recorder.cancel(ticket)
                    continue
                if work is not None and launch.plan.from_any:
                    ticket.peer, ticket.pair_seq = self._sender(launch, work)
                self.recorder.fill(ticket, _dense(tensor))

    def _sender(self, launch: _Launch, work: Work) -> tuple[int, int]:
        """(global rank, number of the message) of the one that a receive from any has met."""
        member, what = launch.member, launch.plan
        source = member.global_rank(work._source_rank())
        here = member.global_rank(member.index)
        assert what.tag is not None
        return source, self.groups.next_message(member.group, source, here, what.tag)

    def _number(self, what: Plan, member: Member) -> Wire:
        if what.tag is None:
            return Wire(group_seq=self.groups.next_collective(member.group))
        if what.peer is None:  # from any: who it was is known only afterwards
            return Wire(tag=what.tag)
        here = member.global_rank(member.index)
        ends = (here, what.peer) if what.name == "send" else (what.peer, here)
        number = self.groups.next_message(member.group, *ends, what.tag)
        return Wire(peer=what.peer, tag=what.tag, pair_seq=number)

    def _boundary(self, what: Plan, member: Member, caller: Caller) -> str:
        """What people read: the operation, its group, and whose data it is, where known."""
        boundary = _unnamed(what, member)
        buffers = what.outputs or what.inputs
        by_reducer = caller.from_cpp and caller.in_backward
        owner_of = self._bucket_of if by_reducer else self._owner_of
        names = [name for buffer in buffers if (name := owner_of(buffer.tensor))]
        if not names:
            return boundary
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{boundary} {names[0]}{more}"

    def _holds(self, what: Plan, member: Member, boundary: str) -> Holds:
        """What the buffers are made of, where they have no name."""
        if not what.reduces or boundary != _unnamed(what, member):
            return {}
        return holds_of(what, self.holders, self.recorder.storages)

    def _placement_of(self, buffer: Buffer) -> Placement | None:
        placed = (placement for placer in self.placers if (placement := placer(buffer.tensor)))
        return next(placed, buffer.placement)

    def _owner_of(self, tensor: torch.Tensor) -> str | None:
        return next((name for owner in self.owners if (name := owner(tensor))), None)

    def _bucket_of(self, tensor: torch.Tensor) -> str | None:
        return next((name for one in self._reducers if (name := one.name_next(tensor))), None)

    def _phase(self, what: Plan, caller: Caller, boundary: str) -> str:
        """The loop's phase, which may not know yet that backward has begun.

        Collectives for gradients belong to `grad_sync`, also while backward still runs.
        """
        phase = self.recorder.position.phase
        if phase not in _UP_TO_BACKWARD:
            return phase
        by_reducer = caller.from_cpp and caller.in_backward
        by_gradient_code = caller.in_gradient_code and caller.in_backward
        # What a loop reduces itself between backward and optimizer are its gradients.
        by_loop = phase == "backward" and not caller.in_backward
        of_gradient = boundary.endswith(_GRADIENT_ENDS) or by_loop
        if by_reducer or (what.reduces and (by_gradient_code or of_gradient)):
            return "grad_sync"
        return "backward" if caller.in_backward and phase in _BEFORE_BACKWARD else phase


def _unnamed(what: Plan, member: Member) -> str:
    """The boundary of a collective on buffers that nobody knows."""
    return f"{what.name}[{member.group.name}]"


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as it is now, whatever its owner gives to the tensor later.

    A pipeline stage frees what it has sent by giving the tensor another `.data`. A sparse tensor
    is itself: its result lies in new memory.
    """
    if tensor.layout is not torch.strided:
        return tensor
    with torch.no_grad(), _disable_current_modes():
        return tensor.detach()


def _is_traced(what: Plan) -> bool:
    """Whether nothing is computed now: the tensors are those of a compiler's trace."""
    return any(b.tensor.device.type == "meta" for b in (*what.inputs, *what.outputs))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as the values it stands for: how it is stored is the backend's choice."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
