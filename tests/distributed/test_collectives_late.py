"""One rank is late; the output that the trace holds must be the final buffer all the same."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from memory_trace import hash_of, record_collectives
from ranks import Ranks

NUMEL = 1 << 20  # 4 MiB of float32
TRIALS = 6  # of each of the 18 cases below, so 108 in all
LATE_S = 0.01

Case = Callable[[torch.Tensor, torch.Tensor, bool], "tuple[torch.Tensor, dist.Work | None]"]


def _all_reduce(small: torch.Tensor, big: torch.Tensor, late: bool):
    return big, dist.all_reduce(big, async_op=late)


def _all_gather(small: torch.Tensor, big: torch.Tensor, late: bool):
    return big, dist.all_gather_into_tensor(big, small, async_op=late)


def _reduce_scatter(small: torch.Tensor, big: torch.Tensor, late: bool):
    return small, dist.reduce_scatter_tensor(small, big, async_op=late)


def _broadcast(small: torch.Tensor, big: torch.Tensor, late: bool):
    return big, dist.broadcast(big, 1, async_op=late)


def _all_to_all(small: torch.Tensor, big: torch.Tensor, late: bool):
    output = torch.empty_like(big)
    return output, dist.all_to_all_single(output, big, async_op=late)


def _reduce(small: torch.Tensor, big: torch.Tensor, late: bool):
    work = dist.reduce(big, 0, async_op=late)
    return (big if dist.get_rank() == 0 else None), work


def _functional(name: str, small: torch.Tensor, big: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    if name == "_all_reduce":
        result = functional.all_reduce(big, "sum", world)
    elif name == "_all_gather":
        result = functional.all_gather_tensor(small, 0, world)
    elif name == "_reduce_scatter":
        result = functional.reduce_scatter_tensor(big, "sum", 0, world)
    elif name == "_broadcast":
        result = functional.broadcast(big, 1, world)
    else:
        result = functional.all_to_all_single(big, None, None, world)
    return result.wait() if hasattr(result, "wait") else result


CASES = [_all_reduce, _all_gather, _reduce_scatter, _broadcast, _all_to_all, _reduce]


def trials(case: Case, mode: str) -> list[tuple[int, int]]:
    """(logged, final) fingerprints of the output, one pair for each trial."""
    rank = dist.get_rank()
    finals: list[torch.Tensor] = []
    with record_collectives() as trace:
        for trial in range(TRIALS):
            torch.manual_seed(10 * trial + rank)
            small, big = torch.randn(NUMEL // 2), torch.randn(NUMEL)
            if rank == 1:
                time.sleep(LATE_S)
            if mode == "functional":
                output = _functional(case.__name__, small, big)
            else:
                output, work = case(small, big, mode == "async")
                if work is not None:
                    work.wait()
            if output is not None:
                finals.append(output.clone())
            for tensor in (small, big, output):
                if tensor is not None:
                    tensor.zero_()
    logged = [row for row in trace.rows if row.role == "output"]
    return [
        (row.h, hash_of(final, row.placement)) for row, final in zip(logged, finals, strict=True)
    ]


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (case, mode)
        for case in CASES
        for mode in ("sync", "async", "functional")
        if (case, mode) != (_reduce, "functional")  # which torch does not have
    ],
)
def test_the_logged_output_of_a_late_collective_is_the_final_buffer(
    two_ranks: Ranks, case: Case, mode: str
) -> None:
    for pairs in two_ranks.run(trials, case, mode):
        assert [logged == final for logged, final in pairs] == [True] * len(pairs)
