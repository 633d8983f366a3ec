"""Collectives, whoever calls them: from a c10d operator to the events of its buffers.

In:  every call of torch.distributed: from Python, DDP's C++ reducer, functional collectives.
Out: input fingerprints at launch; outputs, and inputs that must not have changed, at completion.

Every collective passes torch's dispatcher. We stand in front of its kernels at the key
`BackendSelect`, which every call meets and no kernel of c10d uses, and pass the call on without the
GIL. An event stands in program order where its collective was launched, also when it ends later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup, Work

from upguard_plugin.capture.collectives.caller import find_caller
from upguard_plugin.capture.collectives.events import CollectiveEvents, Launch, Reserved
from upguard_plugin.capture.collectives.groups import Groups, Member
from upguard_plugin.capture.collectives.holdings import HolderOf, holds_of
from upguard_plugin.capture.collectives.naming import Reducer, boundary_of, phase_of, unnamed
from upguard_plugin.capture.collectives.owners import OwnerOf
from upguard_plugin.capture.collectives.plans import OPERATORS, Plan, plan
from upguard_plugin.capture.collectives.under_way import Flight, Origin, UnderWay, Use, outputs_of
from upguard_plugin.capture.collectives.works import Pending, Works
from upguard_plugin.capture.recorder import Recorder, Wire
from upguard_plugin.capture.shield import shielded
from upguard_plugin.errors import UsageError

_KEY = torch._C.DispatchKey.BackendSelect
_CPU = torch.device("cpu")
_PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"
# Of these the backend for the CPU writes the outputs behind the back of their version counters, but
# for a division that stands behind a sum.
_UNCOUNTED = frozenset(
    ("allreduce_", "broadcast_", "reduce_", "alltoall_base_", "scatter_", "recv_")
)
# Behind these sums the backend divides as anybody would, on a thread of its own.
_DIVIDING = frozenset(("avg", "premul_sum"))
# Whether torch registers the works of plain collectives too, for compiled code to wait for.
_may_be_waited_for_by_tensor = getattr(
    torch._C._distributed_c10d, "_allow_inflight_collective_as_graph_input", bool
)


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
        self._reducers: list[Reducer] = []
        self._events = CollectiveEvents(recorder, self.groups)
        self.placers = self._events.placers
        self.under_way = UnderWay(self._events.used_early)
        self._works = Works(self.under_way)
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
            arguments = operator._schema.arguments
            types = [str(argument.type) for argument in arguments]
            names = [argument.name for argument in arguments]
            asynchronous = names.index("async_op") if "async_op" in names else len(names)
            places = (types.index(_PROCESS_GROUP), asynchronous)
            call = partial(self._call, name, operator, places)
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
        self.under_way.clear()
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
        places: tuple[int, int],
        keys: torch._C.DispatchKeySet,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """places: of the arguments that are the group and whether the caller gets the work."""
        group = ProcessGroup.unbox(args[places[0]])
        launch = self._before(name, group, args)
        result = operator.redispatch(keys.remove(_KEY), *args, **kwargs)
        if launch is not None:
            is_async = all(args[places[1] : places[1] + 1])  # left out where it is, by default
            self._after(launch, group, result, is_async)
        return result

    def _wait_tensor(self, keys: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
        operator = torch.ops._c10d_functional.wait_tensor.default
        result = operator.redispatch(keys.remove(_KEY), tensor)
        self._works.tensor_waited(tensor)
        return result

    @shielded
    def _before(self, name: str, group: ProcessGroup, args: Sequence[Any]) -> Launch | None:
        """Number the call, and record its inputs if the step is recorded."""
        if get_ident() in self.recorder.threads_aside:
            return None
        member = self.groups.member(group)
        what = plan(name, args, member)
        wire = self._number(what, member)
        if not self.recorder.active or _is_traced(what):
            return None
        caller = find_caller(with_factor=what.reduce_op == "premul_sum")
        boundary = boundary_of(what, member, caller, self.owners, self._reducers)
        fields = {
            "phase": phase_of(what, caller, boundary, self.recorder.position.phase),
            "operator": f"c10d.{name}",
            "call": self.recorder.position.next_call(boundary),
            "group": member.group,
            "op": what.describe(caller.factor),
            "wire": wire,
            "source": caller.source,
        }
        launch = Launch(name, what, member, caller, boundary, fields)
        if what.reduces and boundary == unnamed(what, member):
            launch.holds = holds_of(what, self.holders, self.recorder.storages)
        if caller.of_objects:
            self._events.launched_with_objects(launch)
            return None
        if self.under_way.outputs and _backend_of(group) == "gloo":
            self._uses(launch)
        self._events.launched(launch)
        return launch

    def _uses(self, launch: Launch) -> None:
        """Ask whether it uses what another one has under way: gloo orders no two collectives."""
        fields, what = launch.fields, launch.plan
        for buffers, writes in ((what.inputs, False), (what.outputs, True)):
            use = Use(fields["operator"], writes, fields["phase"], fields["source"])
            for buffer in buffers:
                if buffer.tensor.is_cpu:
                    self.under_way.use(buffer.tensor, use)

    @shielded
    def _after(self, launch: Launch, group: ProcessGroup, result: Any, is_async: bool) -> None:
        """Reserve the events of the completion, and see to it that they are filled."""
        what, caller = launch.plan, launch.caller
        # What a functional send returns is not what it sends: nothing says when that is free again.
        if not what.has_completion or (what.name == "send" and caller.functional):
            return
        kept = self._events.reserve(launch, "input", what.untouched_inputs())
        made = self._events.reserve(launch, "output", what.outputs)
        if not kept and not made:
            return
        handle = result[-1] if isinstance(result, tuple) else result
        finish = partial(self._events.finish, launch, [*kept, *made])
        if handle is None:  # ordered by the current stream
            finish(None, True)
            return
        tensors = [buffer.tensor for buffer in (*what.inputs, *what.outputs)]
        on_cpu = all(tensor.is_cpu for tensor in tensors)
        pending = Pending(Work.unbox(handle), tensors, finish, functional=caller.functional)
        # What torch.distributed waits for before it returns is not used earlier.
        if made and (is_async if caller.returns_work else on_cpu):
            pending.flight = _flight_of(launch, pending.work, made, on_cpu)
        self._works.add(pending, group, by_future=on_cpu or caller.from_cpp)

    def _number(self, what: Plan, member: Member) -> Wire:
        if what.tag is None:
            return Wire(group_seq=self.groups.next_collective(member.group))
        if what.peer is None:  # from any: who it was is known only afterwards
            return Wire(tag=what.tag)
        here = member.global_rank(member.index)
        ends = (here, what.peer) if what.name == "send" else (what.peer, here)
        number = self.groups.next_message(member.group, *ends, what.tag)
        return Wire(peer=what.peer, tag=what.tag, pair_seq=number)


def _flight_of(launch: Launch, work: Work, made: Sequence[Reserved], on_cpu: bool) -> Flight:
    """What is followed of a collective until its outputs may be used."""
    fields = launch.fields
    in_sight = launch.caller.returns_work and not _may_be_waited_for_by_tensor()
    origin = Origin(
        launch.boundary, fields["phase"], fields["call"], fields["group"], fields["source"]
    )
    outputs = outputs_of(
        origin,
        ((one.slot, one.memory) for one in made),
        counts=in_sight
        and on_cpu
        and launch.operator in _UNCOUNTED
        and launch.plan.reduce_op not in _DIVIDING,
    )
    return Flight(work if in_sight else None, outputs, in_sight, on_cpu)


def _backend_of(group: ProcessGroup) -> str:
    """The name of the backend that works on the CPU; "" where there is none."""
    try:
        return str(group._get_backend(_CPU).name())
    except RuntimeError:
        return ""


def _is_traced(what: Plan) -> bool:
    """Whether nothing is computed now: the tensors are those of a compiler's trace."""
    return any(b.tensor.device.type == "meta" for b in (*what.inputs, *what.outputs))
