"""Collectives, and public bugs of distributed programs, for the tests of `upguard check`.

Each function runs on every rank and records to a folder; with the fault something goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from checked import flip_a_bit, recording
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

from tests.faulty_kernel import faulty_kernel


@contextmanager
def tampered(
    operator: str,
    on: bool,
    *,
    reads: Callable[[Any], Any] | None = None,
    leaves: Callable[[Any], Any] | None = None,
) -> Iterator[None]:
    """A backend with a fault, below UpGuard's probe.

    reads: the operator's arguments -> those that the kernel gets instead. leaves: called with the
    arguments when the work is done, to spoil a result.
    """

    def call(kernel: Callable[..., Any], *args: Any) -> Any:
        result = kernel(*(args if reads is None else reads(args)))
        if leaves is not None:
            handle = result[-1] if isinstance(result, tuple) else result
            dist.Work.unbox(handle).wait()
            leaves(args)
        return result

    with faulty_kernel(operator, call, on):
        yield


def without_tail(args: Any) -> Any:
    """The arguments of a reduce_scatter whose input has zeros for its last 8 elements."""
    output, source, *rest = args
    return output, torch.cat([source[:-8], torch.zeros_like(source[-8:])]), *rest


def flipped(args: Any) -> Any:
    """The arguments of a send of a tensor with one bit flipped."""
    spoiled = args[0][0].clone()
    flip_a_bit(spoiled)
    return [spoiled], *args[1:]


def collective(kind: str, folder: str, fault: bool) -> None:
    """One step with one collective; with the fault, rank 1 gets a wrong result."""
    rank, is_faulty = dist.get_rank(), fault and dist.get_rank() == 1
    model = nn.Linear(2, 2)
    with recording(model, None, folder, {}) as guard:
        guard.begin_step_if_needed()
        values = torch.arange(8, dtype=torch.float32) + 10 * rank
        if kind == "other op":
            op = dist.ReduceOp.MAX if is_faulty else dist.ReduceOp.SUM
            dist.all_reduce(values, op)
        elif kind == "all_reduce":
            with tampered("allreduce_", is_faulty, leaves=lambda args: flip_a_bit(args[0][0])):
                dist.all_reduce(values)
        elif kind == "all_gather":
            with tampered("_allgather_base_", is_faulty, leaves=lambda args: args[0][-2:].zero_()):
                dist.all_gather_into_tensor(torch.empty(16), values)
        elif kind == "scatter":
            lists = [values, values + 1] if rank == 0 else None
            with tampered("scatter_", is_faulty, leaves=lambda args: flip_a_bit(args[0][0])):
                dist.scatter(torch.empty(8), lists)
        elif kind == "all_to_all":
            with tampered("alltoall_base_", is_faulty, leaves=lambda args: flip_a_bit(args[0])):
                dist.all_to_all_single(torch.empty(8), values)
        elif kind == "integer sum":
            counts = values.long() - 12
            with tampered("allreduce_", is_faulty, leaves=lambda args: args[0][0][:1].add_(1)):
                dist.all_reduce(counts)
        elif kind == "message" and rank == 0:
            with tampered("send", fault, reads=flipped):
                dist.send(values, 1)
        elif kind == "message":
            dist.recv(torch.empty(8), 0)
        guard.step()


def message(folder: str, level: str) -> None:
    """A send that is waited for, and its receive."""
    with recording(nn.Linear(2, 2), None, folder, {}, level) as guard:
        guard.begin_step_if_needed()
        if dist.get_rank() == 0:
            dist.isend(torch.ones(4), 1).wait()
        else:
            dist.recv(torch.empty(4), 0)
        guard.step()


def left_alone(folder: str, fault: bool) -> None:
    """Rank 0 calls a collective at the end of a step that rank 1 never calls while it records."""
    with recording(nn.Linear(2, 2), None, folder, {}) as guard:
        guard.begin_step_if_needed()
        dist.all_reduce(torch.ones(3))
        work = None
        if dist.get_rank() == 0 or not fault:
            work = dist.all_reduce(torch.ones(4), async_op=True)
        if not fault:
            work.wait()
        guard.step()
    if fault:  # the ranks go on together
        (work or dist.all_reduce(torch.ones(4), async_op=True)).wait()


def lost_in_the_sum(dtype: torch.dtype, folder: str, fault: bool) -> None:
    """An averaging all_reduce and a reduce_scatter in which rank 1's part counts for nothing."""
    values = torch.randn(999 * 2, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        dtype
    )
    is_faulty = fault and dist.get_rank() == 1
    with recording(nn.Linear(2, 2), None, folder, {}, sketch=True) as guard:
        guard.begin_step_if_needed()
        with tampered("allreduce_", is_faulty, reads=with_zeros):
            dist.all_reduce(values.clone(), dist.ReduceOp.AVG)
        with tampered("_reduce_scatter_base_", is_faulty, reads=from_zeros):
            dist.reduce_scatter_tensor(torch.empty(999, dtype=dtype), values)
        guard.step()


def with_zeros(args: Any) -> Any:
    """The arguments of an all_reduce to which this rank adds nothing."""
    args[0][0].zero_()
    return args


def from_zeros(args: Any) -> Any:
    """The arguments of a reduce_scatter to which this rank adds nothing."""
    output, source, *rest = args
    return output, torch.zeros_like(source), *rest


def averaged_alone(folder: str, fault: bool) -> None:
    """Case 45: a reduce_scatter(AVG) over one rank leaves the last elements at zero on rank 1."""
    rank = dist.get_rank()
    alone = [dist.new_group([r], group_desc=f"dp{r}") for r in range(2)][rank]
    gradients = torch.randn(24, generator=torch.Generator().manual_seed(rank)).bfloat16()
    with recording(nn.Linear(2, 2), None, folder, {}) as guard:
        guard.begin_step_if_needed()
        broken = tampered("_reduce_scatter_base_", fault and rank == 1, reads=without_tail)
        with broken, guard.position.in_phase("grad_sync"):
            dist.reduce_scatter_tensor(
                torch.empty_like(gradients), gradients, dist.ReduceOp.AVG, group=alone
            )
        guard.step()


def overwritten_bucket(folder: str, fault: bool) -> None:
    """Case 5: the next gradients are copied into a bucket whose reduction is under way."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    buckets = [torch.full((8,), float(rank + 1)), torch.zeros(8)]
    copied = f"{folder}: the next gradients are in their bucket"
    with recording(nn.Linear(2, 2), None, folder, {}) as guard:
        guard.begin_step_if_needed()
        with guard.position.in_phase("grad_sync"):
            if rank == 1:  # it comes late, so that rank 0 meanwhile goes on
                store.wait([copied])
            work = dist.all_gather_into_tensor(torch.empty(16), buckets[0], async_op=True)
            if rank == 0:
                buckets[0 if fault else 1].copy_(torch.arange(8.0))
                store.set(copied, "yes")
            work.wait()
        guard.step()


class Branches(nn.Module):
    """Two branches, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: Tensor, name: str) -> Tensor:
        return self.branch[name](x)


def early_branch(folder: str, fault: bool) -> None:
    """Case 9: parameters that only an early micro-batch uses are never reduced."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    with recording(model, optimizer, folder, {"dp": 2}) as guard:
        for k, name in enumerate("ab"):
            guard.microbatch(k)
            model(torch.randn(3, 4, generator=data), name).square().mean().backward()
        for name, parameter in model.named_parameters():
            if not fault or name.startswith("branch.b"):
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        guard.step()


class Gate(nn.Module):
    """A router whose weight every rank holds whole, as a DTensor; each rank scores its own part."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        self.grad_placements = None if forgets else [Partial()]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to_local(grad_placements=self.grad_placements)


def forgotten_partial(folder: str, fault: bool) -> None:
    """Case 27: a partial gradient of a DTensor is declared replicated and never reduced."""
    model = nn.ModuleDict({"gate": Gate(fault)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, folder, {"tp": 2}) as guard:
        (model["gate"](torch.ones(4)) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        guard.step()


def stale_weights(folder: str, fault: bool) -> None:
    """Case 35: a layer runs before the other rank's half of its weight has arrived."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    rank = dist.get_rank()
    with recording(model, None, folder, {"dp": 2}) as guard:
        for step in range(2):
            if step:
                gather(model[0].weight)
                if not fault:
                    gather(model[1].weight)
            model(torch.ones(2, 4) + rank).sum().backward()
            if step and fault:
                gather(model[1].weight)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                mine = parameter.detach().chunk(2)[rank]
                mine.sub_(0.1 * parameter.grad.chunk(2)[rank])
                parameter.grad = None
            guard.step()


def gather(weight: Tensor) -> None:
    """Bring the half that each rank has updated to the other."""
    mine = weight.detach().chunk(2)[dist.get_rank()].clone()
    with torch.no_grad():
        dist.all_gather_into_tensor(weight.detach(), mine)


def unreduced_amax(folder: str, fault: bool) -> None:
    """Case 41: the largest magnitude is not reduced over the ranks that share the sequence."""
    model = nn.ModuleDict({"qkv": nn.Linear(4, 4)})
    with recording(model, None, folder, {"tp": 2}) as guard:
        x = torch.full((2, 4), float(dist.get_rank() + 1))
        model["qkv"](x).sum().backward()
        amax = x.abs().amax()
        if not fault:
            dist.all_reduce(amax, dist.ReduceOp.MAX)
        guard.observe("qkv.input_amax", amax, role="buffer", placement="")
        guard.step()
