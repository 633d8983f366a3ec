"""What the ranks of a job do with outputs of collectives, before and after they wait for them.

Each function runs on every rank and records to a folder. With the fault rank 0 uses an output while
rank 1 has not joined the collective yet; the line that does so ends in "# too early". The clean
twin does the same when it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import checked
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from memory_trace import store
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Meeting:
    """Rank 1 comes to a collective when rank 0 lets it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def come(self) -> None:
        if dist.get_rank() == 1:
            store().wait([self._name])

    def let_come(self) -> None:
        if dist.get_rank() == 0:
            store().set(self._name, "yes")


@contextmanager
def recorded(folder: str, level: str) -> Iterator[Meeting]:
    with checked.recording(nn.Linear(2, 2), None, folder, {}, level) as guard:
        guard.begin_step_if_needed()
        with guard.position.in_phase("grad_sync"):
            yield Meeting(folder)
        guard.step()


def at_fault(fault: bool) -> bool:
    return fault and dist.get_rank() == 0


def read(folder: str, level: str, fault: bool) -> None:
    values = torch.arange(8.0)
    with recorded(folder, level) as other:
        other.come()
        work = dist.all_reduce(values, async_op=True)
        if at_fault(fault):
            values.mul(2)  # too early
        other.let_come()
        work.wait()
        values.mul(2)


def written(folder: str, level: str, fault: bool) -> None:
    values = torch.arange(8.0)
    with recorded(folder, level) as other:
        other.come()
        work = dist.all_reduce(values, async_op=True)
        if at_fault(fault):
            values.div_(2)  # too early
        other.let_come()
        work.wait()
        values.div_(2)


def half_of_a_buffer(folder: str, level: str, fault: bool) -> None:
    """The other half is used all the time, through looks that reach over both halves too."""
    buffer = torch.zeros(8, 2)
    with recorded(folder, level) as other:
        other.come()
        work = dist.broadcast(buffer[:4], 1, async_op=True)
        buffer[4:].add_(1)
        buffer[3:][1::4].add_(1)
        torch.zeros_like(buffer), buffer.view(-1), buffer.shape
        if at_fault(fault):
            buffer[3:][::4].sum()  # too early
        other.let_come()
        work.wait()
        buffer.sum()


def received(folder: str, level: str, fault: bool) -> None:
    values = torch.zeros(4)
    with recorded(folder, level) as other:
        other.come()
        if dist.get_rank() == 0:
            work = dist.irecv(values, 1)
            if fault:
                values.neg()  # too early
            other.let_come()
            work.wait()
            values.neg()
        else:
            dist.send(values, 0)


def forgotten(folder: str, level: str, fault: bool) -> None:
    """With the fault nobody waits, and the work itself is dropped."""
    values, others = torch.arange(8.0), torch.arange(4.0)
    with recorded(folder, level) as other:
        other.come()
        work = dist.all_reduce(values, async_op=True)
        if fault:
            del work
        second = dist.all_reduce(others, async_op=True)
        if at_fault(fault):
            values.sum()  # too early
        other.let_come()
        second.wait()
        if not fault:
            work.wait()
            values.sum()


def chained(folder: str, level: str, fault: bool) -> None:
    """One collective takes what another one has under way."""
    values, gathered = torch.arange(4.0), torch.zeros(8)
    with recorded(folder, level) as other:
        other.come()
        first = dist.all_reduce(values, async_op=True)
        if not fault:
            other.let_come()
            first.wait()
        second = dist.all_gather_into_tensor(gathered, values, async_op=True)  # too early
        other.let_come()
        first.wait()
        second.wait()


def bucket(folder: str, level: str, fault: bool) -> None:
    """A hook of backward changes a gradient that DDP's reducer has under way."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        bucket_cap_mb=1e-5,
        gradient_as_bucket_view=True,
    )
    first, last = (model.module[k].weight for k in (0, 1))
    other = Meeting(folder)

    def scale(gradient: Tensor) -> None:
        if at_fault(fault):
            last.grad.mul_(2)  # too early
        other.let_come()

    with checked.recording(model, None, folder, {"dp": 2}, level) as guard:
        for step in range(2):  # DDP makes its own buckets after the first
            if step:
                first.register_hook(scale)
            loss = model(torch.ones(2, 4)).sum()
            if step:
                other.come()
            loss.backward()
            guard.step()


def lucky(folder: str, level: str, fault: bool) -> None:
    """Nobody waits, but the collective is over by then."""
    values = torch.arange(8.0)
    with recorded(folder, level):
        work = dist.all_reduce(values, async_op=True)
        if fault:
            while not dist.Work.is_completed.__wrapped__(work):  # unseen by the recording
                pass
            values.sum()  # too early
        work.wait()
        values.sum()


def hooked(folder: str, name: str) -> None:
    """DDP with a hook of Python's, or without one, and with gradients that are views."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2)),
        # PowerSGD waits inside of callbacks: two at a time would block both threads of gloo.
        bucket_cap_mb=25 if name == "power" else 1e-4,
        gradient_as_bucket_view=name == "views",
    )
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "allreduce":
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    elif name == "power":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, folder, {"dp": 2})


def prefetched(folder: str) -> None:
    """FSDP2 that gathers the next layers early."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for layer, following in pairwise(model):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    train(model, folder, {})


def train(model: nn.Module, folder: str, layout: dict[str, int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    with checked.recording(model, optimizer, folder, layout, "op") as guard:
        for _ in range(4):
            model(torch.randn(4, 8, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()


# Newer torch can give the work of a plain collective to `wait_tensor`.
waited_for_by_tensor = getattr(
    functional, "allow_inflight_collective_as_graph_input_ctx", nullcontext
)


def functions(folder: str, level: str) -> None:
    """Functional collectives, whose results wait by themselves, and coalesced ones."""
    world, values = dist.group.WORLD, torch.arange(8.0)
    with recorded(folder, level):
        functional.all_reduce(values, "sum", world).mul(2)
        functional.all_gather_tensor(values, 0, world).sum()
        functional.reduce_scatter_tensor(values, "sum", 0, world).add(1)
        for part in functional.all_reduce_coalesced([values, values + 1], "sum", world):
            part.neg()
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(values)
        manager.wait()
        values.sum()
        gathered = [torch.zeros(8), torch.zeros(8)]
        dist.all_gather(gathered, values)
        torch.stack(gathered)
        dist.reduce_scatter_tensor(torch.zeros(4), values)
        with waited_for_by_tensor():
            work = dist.all_reduce(values, async_op=True)
        functional.wait_tensor(values)
        values.sum()
        work.wait()
        with waited_for_by_tensor():
            work = dist.all_reduce(values, async_op=True)
        wait_as_compiled_code_may(values)
        values.sum()
        work.wait()
        # A backend writes behind the sum too: it divides.
        for size in (8, 1 << 20):
            means = torch.ones(size)
            work = dist.all_reduce(means, dist.ReduceOp.AVG, async_op=True)
            while not dist.Work.is_completed.__wrapped__(work):  # unseen by the recording
                pass
            work.wait()
            means.sum()
        work = dist.all_reduce(values, async_op=True)
        work.get_future().then(lambda done: done.value()[0].mul(2)).wait()
        values.sum()


def wait_as_compiled_code_may(values: Tensor) -> None:
    """Wait in the kernel of `wait_tensor`, as code that does not pass torch's dispatcher."""
    kernels = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    torch.ops._c10d_functional.wait_tensor.default.redispatch(kernels, values)


def reshaped(folder: str, level: str) -> None:
    """All changes of shape in place that torch has, while the memory is under way."""
    values = torch.ones(2, 3)
    with recorded(folder, level) as other:
        other.come()
        work = dist.all_reduce(values, async_op=True)
        if dist.get_rank() == 0:
            values.set_(values)  # alone: the others are taken as the counter's reason
        other.let_come()
        work.wait()
        other = Meeting(f"{folder} again")
        other.come()
        work = dist.all_reduce(values, async_op=True)
        if dist.get_rank() == 0:
            values.t_().transpose_(0, 1).swapaxes_(0, 1).swapdims_(0, 1).detach_()
            values.unsqueeze_(0).squeeze_(0).squeeze_().as_strided_((3, 2), (2, 1))
            values.resize_(6).resize_as_(torch.ones(2, 3))
        other.let_come()
        work.wait()


Case = Callable[[str, str, bool], None]
