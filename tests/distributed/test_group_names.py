"""Groups without a description are named by their members; one of all ranks is the world."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from memory_trace import record_collectives
from ranks import Ranks


def boundaries(num_others: int) -> list[str]:
    for _ in range(num_others):
        dist.new_group([0])
    group = dist.new_group([0, 1])  # all ranks
    with record_collectives() as trace:
        dist.all_reduce(torch.ones(2), group=group)
    return [row.boundary for row in trace.rows]


def test_another_group_in_one_run_renames_no_group(two_ranks: Ranks) -> None:
    for num_others in (0, 3):
        for rows in two_ranks.run(boundaries, num_others):
            assert set(rows) == {"all_reduce[world]"}


def test_a_group_that_torch_has_not_registered_is_recorded_without_its_members() -> None:
    store, timeout = dist.HashStore(), timedelta(seconds=30)
    group = dist.ProcessGroup(store, 0, 1)  # of a library that needs no default group
    backend = dist.ProcessGroupGloo(store, 0, 1, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    with record_collectives() as trace:
        group.allreduce([torch.ones(2)]).wait()

    assert [(row.role, row.ranks) for row in trace.rows] == [("input", ()), ("output", ())]
