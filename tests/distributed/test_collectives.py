"""What each collective records: its buffers and their places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from memory_trace import Row, hash_of, ints, pick, record_collectives
from ranks import Ranks

from upguard_plugin.records import FINGERPRINT_PRIME


def call(case: str, rank: int) -> None:
    """One call of a collective; integers, so that sums of fingerprints can be checked."""
    world = dist.group.WORLD
    one, two = ints(rank, 6), ints(rank, 12)
    size = dist.get_world_size()
    match case:
        case "all_reduce":
            dist.all_reduce(one)
        case "all_reduce_max":
            dist.all_reduce(one, op=dist.ReduceOp.MAX)
        case "all_reduce_coalesced":
            with dist._coalescing_manager():
                dist.all_reduce(one)
                dist.all_reduce(two)
        case "reduce":
            dist.reduce(one, 1)
        case "broadcast":
            dist.broadcast(one, 1)
        case "all_gather":
            dist.all_gather([torch.empty_like(one) for _ in range(size)], one)
        case "all_gather_into_tensor":
            dist.all_gather_into_tensor(two, one)
        case "all_gather_in_place":
            dist.all_gather_into_tensor(two, two[6 * rank : 6 * rank + 6])
        case "all_gather_coalesced":
            functional.all_gather_into_tensor_coalesced([one, two], world)[1].wait()
        case "all_gather_functional":
            functional.all_gather_tensor(one, 0, world).wait()
        case "reduce_scatter":
            dist.reduce_scatter(one, list(two.chunk(2)))
        case "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(one, two)
        case "reduce_scatter_functional":
            functional.reduce_scatter_tensor(two, "sum", 0, world).wait()
        case "all_to_all_single":
            dist.all_to_all_single(torch.empty_like(two), two)
        case "all_to_all_uneven":
            sent, received = ([1, 2], [1, 3]) if rank == 0 else ([3, 4], [2, 4])
            source = ints(rank, sum(sent), 2)
            dist.all_to_all_single(source.new_empty(sum(received), 2), source, received, sent)
        case "all_to_all_sizes_of_one_side":
            dist.all_to_all_single(torch.empty_like(two), two, [6, 6], None)
        case "all_to_all_sizes_on_one_rank":
            sizes = [6, 6] if rank == 0 else None
            dist.all_to_all_single(torch.empty_like(two), two, sizes, sizes)
        case "all_to_all":
            dist.all_to_all([torch.empty_like(one) for _ in range(size)], list(two.chunk(2)))
        case "gather":
            parts = [torch.empty_like(one) for _ in range(size)] if rank == 0 else None
            dist.gather(one, parts, 0)
        case "scatter":
            dist.scatter(one, list(two.chunk(2)) if rank == 1 else None, 1)
        case _:
            raise AssertionError(case)


def rows_of(case: str) -> list[Row]:
    with record_collectives() as trace:
        call(case, dist.get_rank())
    return trace.rows


def _sum(rows: list[Row]) -> tuple[int, int]:
    return (
        sum(row.h for row in rows) % FINGERPRINT_PRIME,
        sum(row.s for row in rows) % (1 << 64),
    )


MOVES = [
    "all_to_all_single", "all_to_all_uneven", "all_to_all_sizes_of_one_side",
    "all_to_all_sizes_on_one_rank", "all_to_all", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_functional",
]  # fmt: skip
GATHERS = [
    "all_gather", "all_gather_into_tensor", "all_gather_in_place", "all_gather_coalesced",
    "all_gather_functional",
]  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_the_inputs_of_all_ranks_add_up_to_the_outputs_of_all_ranks(
    two_ranks: Ranks, case: str
) -> None:
    rows = [row for rank in two_ranks.run(rows_of, case) for row in rank]
    launched, output = pick(rows, "input", "launch"), pick(rows, "output", "completion")
    assert launched
    assert output
    # int64 sums carry over between words, so only s (whole elements) adds up where values are added
    assert _sum(launched)[1] == _sum(output)[1]
    if "reduce" not in case:
        assert _sum(launched)[0] == _sum(output)[0]


@pytest.mark.parametrize("case", GATHERS)
def test_the_inputs_of_all_ranks_add_up_to_the_output_of_each_rank(
    two_ranks: Ranks, case: str
) -> None:
    first, second = two_ranks.run(rows_of, case)
    launched = pick(first, "input", "launch") + pick(second, "input", "launch")
    for rows in (first, second):
        assert _sum(launched) == _sum(pick(rows, "output", "completion"))


@pytest.mark.parametrize(
    "case", ["all_reduce", "all_reduce_max", "all_reduce_coalesced", "broadcast"]
)
def test_all_members_have_the_same_output(two_ranks: Ranks, case: str) -> None:
    first, second = (pick(rows, "output", "completion") for rows in two_ranks.run(rows_of, case))
    assert first
    assert [row.h for row in first] == [row.h for row in second]


def test_one_changed_element_breaks_the_sum(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(rows_of, "all_gather")
    launched = pick(first, "input", "launch") + pick(second, "input", "launch")
    launched[0] = replace(launched[0], h=launched[0].h + 1)
    assert _sum(launched) != _sum(pick(first, "output", "completion"))


def test_what_is_recorded_of_each_collective(two_ranks: Ranks) -> None:
    """(op on rank 1, inputs at launch, inputs again at completion, outputs), rank 0 then rank 1."""
    found = {}
    for case in ["all_reduce", "all_reduce_max", "reduce", "broadcast", *GATHERS, *MOVES]:
        counts = []
        for rows in two_ranks.run(rows_of, case):
            assert {row.boundary.partition("[")[2] for row in rows} == {"world]"}
            assert {row.ranks for row in rows} == {(0, 1)}
            counts.append(
                (
                    len(pick(rows, "input", "launch")),
                    len(pick(rows, "input", "completion")),
                    len(pick(rows, "output", "completion")),
                )
            )
        found[case] = (rows[0].op, *counts)
    assert found == {
        "all_reduce": ("all_reduce sum", (1, 0, 1), (1, 0, 1)),
        "all_reduce_max": ("all_reduce max", (1, 0, 1), (1, 0, 1)),
        "reduce": ("reduce sum to 1", (1, 0, 0), (1, 0, 1)),
        "broadcast": ("broadcast from 1", (0, 0, 1), (1, 0, 1)),
        "all_gather": ("all_gather", (1, 1, 2), (1, 1, 2)),
        "all_gather_into_tensor": ("all_gather", (1, 1, 1), (1, 1, 1)),
        "all_gather_in_place": ("all_gather", (1, 0, 1), (1, 0, 1)),
        "all_gather_coalesced": ("all_gather", (2, 2, 2), (2, 2, 2)),
        "all_gather_functional": ("all_gather", (1, 1, 1), (1, 1, 1)),
        "all_to_all_single": ("all_to_all", (1, 1, 1), (1, 1, 1)),
        "all_to_all_uneven": ("all_to_all", (1, 1, 1), (1, 1, 1)),
        "all_to_all_sizes_of_one_side": ("all_to_all", (1, 1, 1), (1, 1, 1)),
        "all_to_all_sizes_on_one_rank": ("all_to_all", (1, 1, 1), (1, 1, 1)),
        "all_to_all": ("all_to_all", (2, 2, 2), (2, 2, 2)),
        "gather": ("gather to 0", (1, 1, 2), (1, 1, 0)),
        "scatter": ("scatter from 1", (0, 0, 1), (2, 2, 1)),
        "reduce_scatter": ("reduce_scatter sum", (2, 2, 1), (2, 2, 1)),
        "reduce_scatter_tensor": ("reduce_scatter sum", (1, 1, 1), (1, 1, 1)),
        "reduce_scatter_functional": ("reduce_scatter sum", (1, 1, 1), (1, 1, 1)),
    }


def sparse() -> list[int]:
    indices = torch.tensor([[0, 2, 2]]) if dist.get_rank() == 0 else torch.tensor([[1]])
    values = torch.ones(indices.shape[1], 2)
    tensor = torch.sparse_coo_tensor(indices, values, (4, 2))
    with record_collectives() as trace:
        dist.all_reduce(tensor)
    expected = torch.tensor([[1.0, 1], [1, 1], [2, 2], [0, 0]])
    return [trace.rows[-1].h, hash_of(expected)]


def test_a_sparse_tensor_is_recorded_as_the_values_it_stands_for(two_ranks: Ranks) -> None:
    for logged, expected in two_ranks.run(sparse):
        assert logged == expected
