"""A small model in float32, whole or split over two ranks, whose sums round; trained a few steps.

Blocks of a column-parallel and a row-parallel layer with a residual around them. What a rank does
is said by a `Job`; several jobs run in one pair of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import upguard_plugin

HIDDEN, SAMPLES, NUM_STEPS = 16, 4, 2
PLACEMENTS = {
    "blocks.*.bias": "h",
    "blocks.*.up.weight": "o[tp] i",
    "blocks.*.down.weight": "o i[tp]",
    "blocks.*.up": {"input": "b h", "output": "b o[tp]"},
    "blocks.*.down": {"input": "b i[tp]", "output": "b o +tp"},
    "blocks.*": {"input": "b h", "output": "b h"},
    "head.weight": "o i",
    "head": {"input": "b h", "output": "b o"},
    "(root)": {"input": "b h", "output": "b o"},
}


@dataclass(frozen=True)
class Job:
    """One training; faults act in the second step."""

    name: str
    fault: str = ""  # "unreduced", "bias twice", "last bit", "nan"
    sketch: bool = True
    seed: int = 0
    dtype: torch.dtype = torch.float32
    num_microbatches: int = 1
    num_steps: int = NUM_STEPS
    weights: int | None = None  # another seed for them


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Up(nn.Linear):
    """Column-parallel, without a bias."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.fault == "last bit":
            out.detach().view(torch.int32).view(-1)[0] ^= 1
        return out


class Block(nn.Module):
    fault = ""

    def __init__(self, draws: torch.Generator, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.up = Up(HIDDEN, 4 * HIDDEN // num_ranks, bias=False)
        self.down = nn.Linear(4 * HIDDEN // num_ranks, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.randn(HIDDEN, generator=draws) / 8)
        self.is_split = num_ranks > 1
        up, down = (torch.randn(4 * HIDDEN, HIDDEN, generator=draws) / 8 for _ in range(2))
        self.up.weight.data.copy_(up.chunk(num_ranks)[rank])
        self.down.weight.data.copy_(down.T.chunk(num_ranks, 1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(torch.tanh(self.up(_Copy.apply(x) if self.is_split else x)))
        if self.fault == "bias twice":
            out = out + self.bias
        if self.is_split and self.fault != "unreduced":
            out = _Reduce.apply(out)
        if self.fault == "nan":
            out = out.clone()
            out.detach()[0, 0] = torch.nan
        return x + out + self.bias


class Model(nn.Module):
    def __init__(self, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(Block(draws, rank, num_ranks) for _ in range(3))
        self.head = nn.Linear(HIDDEN, 4, bias=False)
        self.head.weight.data.copy_(torch.randn(4, HIDDEN, generator=draws))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(job: Job, folder: Path, rank: int = 0, num_ranks: int = 1) -> Path:
    weights = job.seed if job.weights is None else job.weights
    model = Model(weights, rank, num_ranks).to(job.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"output_dir": str(folder / job.name), "sketch": job.sketch, "program": job.name}
    draws = torch.Generator().manual_seed(100 + job.seed)
    enabled = upguard_plugin.enable(
        model, optimizer, settings, layout={"tp": num_ranks}, placements=PLACEMENTS
    )
    with enabled as guard:
        for step in range(job.num_steps):
            batch = torch.randn(SAMPLES, HIDDEN, generator=draws).to(job.dtype)
            place = model.blocks[0].up if job.fault == "last bit" else model.blocks[1]
            place.fault = job.fault if step == NUM_STEPS - 1 or job.fault == "last bit" else ""
            optimizer.zero_grad()
            for k, part in enumerate(batch.chunk(job.num_microbatches)):
                guard.microbatch(k)
                loss = model(part).square().mean() / job.num_microbatches
                guard.scalar("loss", loss)
                loss.backward()
            optimizer.step()
            guard.step()
    return folder / job.name


def _on_rank(rank: int, jobs: Sequence[Job], folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    for job in jobs:
        train(job, folder, rank, 2)
    dist.destroy_process_group()


def train_on_two(jobs: Sequence[Job], folder: Path) -> None:
    """Run the jobs in turn on two ranks."""
    mp.spawn(_on_rank, (jobs, folder), nprocs=2)
