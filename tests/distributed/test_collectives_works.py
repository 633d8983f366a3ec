"""When a collective is over: works that are waited for late, elsewhere, by futures, or never."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from memory_trace import Row, hash_of, pick, record_collectives, store
from ranks import Ranks

from upguard_plugin.capture.collectives.under_way import _is_completed as torch_is_completed


def overwritten_input(key: str, overwrite: bool) -> list[Row]:
    """Rank 0 may write to its input while rank 1 has not joined yet."""
    source, output = torch.ones(4), torch.empty(8)
    with record_collectives() as trace:
        if dist.get_rank() == 1:
            store().wait([key])
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        if dist.get_rank() == 0:
            if overwrite:
                source.fill_(5)
            store().set(key, "")
        work.wait()
    return trace.rows


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_input_overwritten_under_way_differs_at_completion(
    two_ranks: Ranks, overwrite: bool
) -> None:
    results = two_ranks.run(overwritten_input, f"overwritten {overwrite}", overwrite)
    same = [
        pick(rows, "input", "launch")[0].h == pick(rows, "input", "completion")[0].h
        for rows in results
    ]
    assert same == [not overwrite, True]


def late_work(key: str) -> tuple[list[Row], int]:
    """A work of step 0 that on rank 0 cannot end before step 1 has begun."""
    tensor, later = torch.ones(8), torch.ones(2)
    with record_collectives() as trace:
        if dist.get_rank() == 1:
            store().wait([key])
        work = dist.all_reduce(tensor, async_op=True)
        trace.step()
        if dist.get_rank() == 0:
            store().set(key, "")
        dist.all_reduce(later)
        work.wait()
    return trace.rows, hash_of(tensor)


def test_a_work_that_ends_in_a_later_step_keeps_its_place(two_ranks: Ranks) -> None:
    for rows, final in two_ranks.run(late_work, "late"):
        assert [(row.step, row.moment, row.group_seq) for row in rows] == [
            (0, "launch", 0), (0, "completion", 0), (1, "launch", 1), (1, "completion", 1)
        ]  # fmt: skip
        assert rows[1].h == final


def never_joined() -> tuple[list[Row], list[str]]:
    """Each rank waits for the other one in a collective of its own."""
    alone = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    with record_collectives() as trace:
        # A tag or shape that does not match would be an error of gloo; two operations just wait.
        works = []
        if dist.get_rank() == 0:
            works.append(dist.all_reduce(torch.ones(3), group=alone, async_op=True))
        trace.step()
        dist.all_reduce(torch.ones(2))
    for work in works:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            work.wait()
    return trace.rows, trace.notes


def test_a_work_that_never_ends_is_left_out_and_said(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(never_joined)
    assert [(row.step, row.boundary, row.moment) for row in first[0]] == [
        (0, first[0][0].boundary, "launch"),
        (1, "all_reduce[world]", "launch"),
        (1, "all_reduce[world]", "completion"),
    ]
    assert first[1] == [
        "0 works of collectives were dropped without a wait, 1 were still under way at the end: "
        "their outputs are not in the trace",
        f"step 0: 1 buffers are not in the trace, because their work was not seen to end: "
        f"{first[0][0].boundary}",
    ]
    assert second[1] == []


def python_future() -> list[bool]:
    """A future's own `wait` is another way for the program to reach the buffer."""
    outcomes = []
    for trial in range(20):
        tensor = torch.full((1 << 18,), float(trial))
        with record_collectives() as trace:
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            final = tensor.clone()
            tensor.fill_(-1)
        outcomes.append(trace.rows[-1].h == hash_of(final))
    return outcomes


def test_a_future_that_was_waited_for_is_behind_the_fingerprint(two_ranks: Ranks) -> None:
    assert two_ranks.run(python_future) == [[True] * 20] * 2


def threads() -> list[tuple[str, int]]:
    """Works waited for in another thread than they were launched in."""
    with record_collectives() as trace:
        for k in range(10):
            tensor = torch.full((1 << 16,), float(k + dist.get_rank()))
            work = dist.all_reduce(tensor, async_op=True)
            thread = threading.Thread(target=work.wait)
            thread.start()
            thread.join()
            tensor.zero_()
    return [(row.boundary, row.h) for row in trace.rows if row.role == "output"]


def test_a_wait_in_another_thread_counts(two_ranks: Ranks) -> None:
    expected = [hash_of(torch.full((1 << 16,), 2.0 * k + 1)) for k in range(10)]
    for rows in two_ranks.run(threads):
        assert [h for _, h in rows] == expected


def detached() -> tuple[int, bool]:
    """(events after detach, whether torch has its own methods back)."""
    originals = dist.Work.wait, dist.Work.get_future, dist.ProcessGroup._end_coalescing
    with record_collectives() as trace:
        dist.all_reduce(torch.ones(2))
        trace.probe.detach()
        dist.all_reduce(torch.ones(2))
    later = len(trace.rows) - 2
    return later, originals == (
        dist.Work.wait, dist.Work.get_future, dist.ProcessGroup._end_coalescing
    )  # fmt: skip


def test_detach_leaves_nothing_behind(two_ranks: Ranks) -> None:
    assert two_ranks.run(detached) == [(0, True)] * 2


def many() -> int:
    """Many collectives in a row, waited for or not, their tensors dropped at once."""
    with record_collectives() as trace:
        for i in range(600):
            tensor = torch.ones(64) * i
            work = dist.all_reduce(tensor, async_op=i % 3 > 0)
            if work is not None and i % 2:
                work.wait()
            del tensor, work
        dist.barrier()
    return len(trace.rows)


def test_hundreds_of_collectives_in_a_row_do_not_hang(two_ranks: Ranks) -> None:
    assert two_ranks.run(many) == [1201, 1201]


def averaged_and_over() -> list[tuple[str, str | None]]:
    """A backend divides for an average on a thread of its own, which counts as a write."""
    tensor = torch.ones(4)
    with record_collectives() as trace:
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
        while not torch_is_completed(work):
            pass
        work.wait()
    return [(row.role, row.moment) for row in trace.rows]


def test_an_average_that_is_over_before_the_wait_was_used_by_nobody(two_ranks: Ranks) -> None:
    assert two_ranks.run(averaged_and_over) == [[("input", "launch"), ("output", "completion")]] * 2
