"""Which buffers a collective reads and writes, from the arguments of its c10d operator.

In:  the operator's name and arguments as torch's dispatcher passes them, and this process's place
     in the group.
Out: a `Plan`: plain data, nothing is read or run.

Destinations are never among the inputs: what is in them before the collective ends has no meaning.
The order of the arguments is that of torch's schemas (`torch.ops.c10d.*`); trailing ones that have
their default may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from upguard_plugin.capture.collectives.groups import Member
from upguard_plugin.capture.collectives.pieces import chunk, exchange
from upguard_plugin.records import Placement

Tensor = torch.Tensor
Args = Sequence[Any]

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that takes part in a collective, and its place in the logical buffer."""

    slot: str
    tensor: Tensor
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of a collective does, on this rank."""

    name: str  # "all_reduce"
    inputs: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    reduce_op: str = ""  # one of REDUCE_OPS
    root: int | None = None  # global rank
    peer: int | None = None  # global rank of the other end of a message; None: any, or no message
    tag: int | None = None  # None: not a message
    spoils_inputs: bool = False  # inputs are scratch space, also where they are no outputs
    has_completion: bool = True  # False: there is nothing to see when it is over

    @property
    def from_any(self) -> bool:
        """Whether it receives from whoever sends first."""
        return self.tag is not None and self.peer is None

    @property
    def reduces(self) -> bool:
        return bool(self.reduce_op)

    def describe(self, factor: float | None = None) -> str:
        """The operation in words: "all_reduce sum", "broadcast from 3"."""
        words = [self.name]
        if self.reduce_op:
            words.append(self.reduce_op)
        if factor is not None:
            words.append(f"{factor:g}")
        if self.root is not None:
            words.append(f"{'to' if self.name in ('reduce', 'gather') else 'from'} {self.root}")
        return " ".join(words)

    def untouched_inputs(self) -> tuple[Buffer, ...]:
        """Inputs that it must leave alone: those that share no memory with an output."""
        if self.spoils_inputs:
            return ()
        written = {_storage(buffer.tensor) for buffer in self.outputs}
        return tuple(b for b in self.inputs if _storage(b.tensor) not in written)


def plan(operator: str, args: Args, member: Member) -> Plan:
    """The plan of one call. operator: a name of `OPERATORS`."""
    return OPERATORS[operator](args, member)


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _slots(tensors: Sequence[Tensor]) -> tuple[Buffer, ...]:
    return tuple(Buffer(str(i), tensor) for i, tensor in enumerate(tensors))


def _row(tensors: Sequence[Tensor]) -> tuple[Buffer, ...]:
    """Tensors that together are one buffer, one after the other."""
    total = sum(tensor.numel() for tensor in tensors)
    buffers: list[Buffer] = []
    start = 0
    for i, tensor in enumerate(tensors):
        buffers.append(Buffer(str(i), tensor, chunk(start, tensor.numel(), (total,))))
        start += tensor.numel()
    return tuple(buffers)


def _part(tensor: Tensor, index: int, whole: Sequence[Tensor] | int, slot: str = "0") -> Buffer:
    """Part `index` of a buffer: of the parts in `whole`, or of that many equal ones."""
    size = tensor.numel()
    sizes = [size] * whole if isinstance(whole, int) else [t.numel() for t in whole]
    return Buffer(slot, tensor, chunk(sum(sizes[:index]), size, (sum(sizes),)))


def _shard(tensor: Tensor, index: int, whole: Tensor, slot: str = "0") -> Buffer:
    """Part `index` of the equal parts of one tensor."""
    size = tensor.numel()
    return Buffer(slot, tensor, chunk(index * size, size, tuple(whole.shape)))


def _reduce_op(op: Any) -> str:
    number = int(op.op())
    return REDUCE_OPS[number] if number < len(REDUCE_OPS) else f"reduce op {number}"


def _all_reduce(args: Args, member: Member) -> Plan:
    buffers = _slots(args[0])
    return Plan("all_reduce", buffers, buffers, _reduce_op(args[2]))


def _reduce(args: Args, member: Member) -> Plan:
    tensors, _, op, root = args[:4]
    buffers = _slots(tensors)
    return Plan(
        "reduce",
        buffers,
        buffers if member.index == root else (),
        _reduce_op(op),
        member.global_rank(root),
        spoils_inputs=True,
    )


def _broadcast(args: Args, member: Member) -> Plan:
    tensors, _, root = args[:3]
    buffers = _slots(tensors)
    inputs = buffers if member.index == root else ()
    return Plan("broadcast", inputs, buffers, root=member.global_rank(root))


def _all_gather_list(args: Args, member: Member) -> Plan:
    outputs, inputs = args[0][0], args[1]
    return Plan("all_gather", (_part(inputs[0], member.index, outputs),), _row(outputs))


def _all_gather_tensor(args: Args, member: Member) -> Plan:
    output, source = args[:2]
    return Plan("all_gather", (_shard(source, member.index, output),), _slots([output]))


def _all_gather_tensors(args: Args, member: Member) -> Plan:
    outputs, inputs = args[:2]
    pairs = enumerate(zip(inputs, outputs, strict=True))
    shards = tuple(_shard(source, member.index, out, str(i)) for i, (source, out) in pairs)
    return Plan("all_gather", shards, _slots(outputs))


def _all_gather_lists(args: Args, member: Member) -> Plan:
    by_rank, inputs = args[:2]
    parts: list[Buffer] = []
    rows: list[Buffer] = []
    for i, source in enumerate(inputs):
        outputs = [of_rank[i] for of_rank in by_rank]
        parts.append(_part(source, member.index, outputs, str(i)))
        rows.extend(Buffer(f"{i}.{b.slot}", b.tensor, b.placement) for b in _row(outputs))
    return Plan("all_gather", tuple(parts), tuple(rows))


def _reduce_scatter_list(args: Args, member: Member) -> Plan:
    outputs, inputs, _, op = args[:4]
    output = _part(outputs[0], member.index, inputs[0])
    return Plan("reduce_scatter", _row(inputs[0]), (output,), _reduce_op(op))


def _reduce_scatter_tensor(args: Args, member: Member) -> Plan:
    output, source, _, op = args[:4]
    shard = _shard(output, member.index, source)
    return Plan("reduce_scatter", _slots([source]), (shard,), _reduce_op(op))


def _reduce_scatter_tensors(args: Args, member: Member) -> Plan:
    outputs, inputs, _, op = args[:4]
    pairs = enumerate(zip(outputs, inputs, strict=True))
    shards = tuple(_shard(out, member.index, source, str(i)) for i, (out, source) in pairs)
    return Plan("reduce_scatter", _slots(inputs), shards, _reduce_op(op))


def _all_to_all_list(args: Args, member: Member) -> Plan:
    def side(tensors: Sequence[Tensor], sends: bool) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(
                str(i),
                tensor,
                exchange(((i, tensor.numel()),), member.index, member.size, sends=sends),
            )
            for i, tensor in enumerate(tensors)
        )

    return Plan("all_to_all", side(args[1], sends=True), side(args[0], sends=False))


def _all_to_all_single(args: Args, member: Member) -> Plan:
    output, source, _, output_splits, input_splits = args[:5]

    def side(tensor: Tensor, splits: Sequence[int], sends: bool) -> tuple[Buffer, ...]:
        if splits:
            width = tensor.numel() // tensor.shape[0] if tensor.numel() else 0
            sizes = [rows * width for rows in splits]
        else:
            sizes = [tensor.numel() // member.size] * member.size
        place = exchange(tuple(enumerate(sizes)), member.index, member.size, sends=sends)
        return (Buffer("0", tensor, place),)

    return Plan("all_to_all", side(source, input_splits, True), side(output, output_splits, False))


def _gather(args: Args, member: Member) -> Plan:
    outputs, inputs, _, root = args[:4]
    is_root = member.index == root
    return Plan(
        "gather",
        (_part(inputs[0], member.index, outputs[0] if is_root else member.size),),
        _row(outputs[0]) if is_root else (),
        root=member.global_rank(root),
    )


def _scatter(args: Args, member: Member) -> Plan:
    outputs, inputs, _, root = args[:4]
    is_root = member.index == root
    return Plan(
        "scatter",
        _row(inputs[0]) if is_root else (),
        (_part(outputs[0], member.index, inputs[0] if is_root else member.size),),
        root=member.global_rank(root),
    )


def _send(args: Args, member: Member) -> Plan:
    tensors, _, peer, tag = args[:4]
    return Plan("send", inputs=_slots(tensors), peer=member.global_rank(peer), tag=tag)


def _recv(args: Args, member: Member) -> Plan:
    tensors, _, peer, tag = args[:4]
    return Plan("recv", outputs=_slots(tensors), peer=member.global_rank(peer), tag=tag)


def _recv_any(args: Args, member: Member) -> Plan:
    tensors, _, tag = args[:3]
    return Plan("recv", outputs=_slots(tensors), tag=tag)


def _barrier(args: Args, member: Member) -> Plan:
    """No data: an empty tensor stands for the call."""
    return Plan("barrier", inputs=_slots([torch.empty(0)]), has_completion=False)


OPERATORS: dict[str, Callable[[Args, Member], Plan]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather_list,
    "_allgather_base_": _all_gather_tensor,
    "allgather_coalesced_": _all_gather_lists,
    "allgather_into_tensor_coalesced_": _all_gather_tensors,
    "reduce_scatter_": _reduce_scatter_list,
    "_reduce_scatter_base_": _reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensors,
    "alltoall_": _all_to_all_list,
    "alltoall_base_": _all_to_all_single,
    "gather_": _gather,
    "scatter_": _scatter,
    "send": _send,
    "recv_": _recv,
    "recv_any_source_": _recv_any,
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
}  # in the order of torch's header; the argument that is the group is found by its type
