"""What each collective records: its buffers, their places, its group, numbers and order."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from memory_trace import Row, hash_of, record_collectives
from ranks import Ranks

from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.collectives.owners import ParameterOwner
from upguard_plugin.errors import UsageError
from upguard_plugin.records import FINGERPRINT_PRIME, Stretch


def _ints(rank: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-(1 << 20), 1 << 20, shape, generator=generator).to(dtype)


def call(case: str, rank: int) -> None:
    """One call of a collective; integers, so that sums of fingerprints can be checked."""
    world = dist.group.WORLD
    one, two = _ints(rank, 6), _ints(rank, 12)
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
            source = _ints(rank, sum(sent), 2)
            dist.all_to_all_single(source.new_empty(sum(received), 2), source, received, sent)
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


def _pick(rows: list[Row], role: str, moment: str) -> list[Row]:
    return [row for row in rows if (row.role, row.moment) == (role, moment)]


def _sum(rows: list[Row]) -> tuple[int, int]:
    return (
        sum(row.h for row in rows) % FINGERPRINT_PRIME,
        sum(row.s for row in rows) % (1 << 64),
    )


MOVES = [
    "all_to_all_single", "all_to_all_uneven", "all_to_all", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_functional",
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
    launched, output = _pick(rows, "input", "launch"), _pick(rows, "output", "completion")
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
    launched = _pick(first, "input", "launch") + _pick(second, "input", "launch")
    for rows in (first, second):
        assert _sum(launched) == _sum(_pick(rows, "output", "completion"))


@pytest.mark.parametrize(
    "case", ["all_reduce", "all_reduce_max", "all_reduce_coalesced", "broadcast"]
)
def test_all_members_have_the_same_output(two_ranks: Ranks, case: str) -> None:
    first, second = (_pick(rows, "output", "completion") for rows in two_ranks.run(rows_of, case))
    assert first
    assert [row.h for row in first] == [row.h for row in second]


def test_one_changed_element_breaks_the_sum(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(rows_of, "all_gather")
    launched = _pick(first, "input", "launch") + _pick(second, "input", "launch")
    launched[0] = replace(launched[0], h=launched[0].h + 1)
    assert _sum(launched) != _sum(_pick(first, "output", "completion"))


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
                    len(_pick(rows, "input", "launch")),
                    len(_pick(rows, "input", "completion")),
                    len(_pick(rows, "output", "completion")),
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
        "all_to_all": ("all_to_all", (2, 2, 2), (2, 2, 2)),
        "gather": ("gather to 0", (1, 1, 2), (1, 1, 0)),
        "scatter": ("scatter from 1", (0, 0, 1), (2, 2, 1)),
        "reduce_scatter": ("reduce_scatter sum", (2, 2, 1), (2, 2, 1)),
        "reduce_scatter_tensor": ("reduce_scatter sum", (1, 1, 1), (1, 1, 1)),
        "reduce_scatter_functional": ("reduce_scatter sum", (1, 1, 1), (1, 1, 1)),
    }


def messages(style: str) -> list[Row]:
    rank = dist.get_rank()
    other = 1 - rank
    sent, received = _ints(rank, 5), torch.empty(5, dtype=torch.int64)
    with record_collectives() as trace:
        for _ in range(2):
            match style:
                case "send":
                    if rank == 0:
                        dist.send(sent, 1, tag=7)
                        dist.recv(received, 1, tag=7)
                    else:
                        dist.recv(received, 0, tag=7)
                        dist.send(sent, 0, tag=7)
                case "isend":
                    works = [dist.irecv(received, other, tag=7), dist.isend(sent, other, tag=7)]
                    for work in works:
                        work.wait()
                case "batch":
                    ops = [
                        dist.P2POp(dist.irecv, received, other, tag=7),
                        dist.P2POp(dist.isend, sent, other, tag=7),
                    ]
                    for work in dist.batch_isend_irecv(ops):
                        work.wait()
            sent += 1
    return trace.rows


@pytest.mark.parametrize("style", ["send", "isend", "batch"])
def test_a_message_is_the_same_at_both_ends(two_ranks: Ranks, style: str) -> None:
    first, second = two_ranks.run(messages, style)
    for source, destination, rank in ((first, second, 0), (second, first, 1)):
        sent = _pick(source, "input", "launch")
        kept = _pick(source, "input", "completion")
        received = _pick(destination, "output", "completion")
        assert [row.h for row in sent] == [row.h for row in received]
        assert [row.h for row in sent] == [row.h for row in kept]
        assert [(row.peer, row.tag, row.pair_seq) for row in sent] == [
            (1 - rank, 7, 0), (1 - rank, 7, 1)
        ]  # fmt: skip
        assert [(row.peer, row.pair_seq) for row in received] == [(rank, 0), (rank, 1)]
        assert {row.group_seq for row in sent + received} == {-1}


def from_anyone() -> list[Row]:
    with record_collectives() as trace:
        for k in range(4):
            if dist.get_rank() == 0:
                dist.send(torch.full((2,), float(k)), 1)
            else:
                dist.recv(torch.empty(2), None if k % 2 else 0)
    return trace.rows


def test_a_receive_from_anyone_is_numbered_with_the_others(two_ranks: Ranks) -> None:
    sender, receiver = two_ranks.run(from_anyone)
    sent = [(row.pair_seq, row.h) for row in _pick(sender, "input", "launch")]
    assert [number for number, _ in sent] == [0, 1, 2, 3]
    assert sent == [(row.pair_seq, row.h) for row in receiver]
    assert {row.peer for row in receiver} == {0}


def functional_messages() -> tuple[list[Row], list[str]]:
    tensor = torch.full((3,), float(dist.get_rank()))
    with record_collectives() as trace:
        if dist.get_rank() == 0:
            result = functional.isend_inplace(tensor, 1)
        else:
            result = functional.irecv_inplace(tensor, 0)
        functional.wait_tensor(result)
    return trace.rows, trace.notes


@pytest.mark.skipif(not hasattr(functional, "isend_inplace"), reason="newer than this torch")
def test_a_functional_message_arrives_as_it_was_sent(two_ranks: Ranks) -> None:
    (sent, first), (received, second) = two_ranks.run(functional_messages)
    assert [row.h for row in sent] == [row.h for row in received] == [hash_of(torch.zeros(3))]
    assert first == second == []


class Unequal:
    """A pickle that no two processes have in common, as that of a tensor's storage is."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, (str(time.time_ns()),)


def objects() -> tuple[list[Row], list[Any]]:
    rank = dist.get_rank()
    with record_collectives() as trace:
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, [rank, Unequal()])
        one = [{"from": rank}]
        dist.broadcast_object_list(one, src=1)
        dist.all_reduce(torch.ones(2))
    return trace.rows, [[numbers[0] for numbers in everyone], one]


def test_of_pickled_objects_the_call_is_recorded_and_not_the_bytes(two_ranks: Ranks) -> None:
    results = two_ranks.run(objects)
    for rows, got in results:
        assert got == [[0, 1], [{"from": 1}]]
        of_objects, numbers = rows[:-2], [row.group_seq for row in rows]
        assert {row.shape for row in of_objects} == {(0,)}
        assert numbers == sorted(numbers) and numbers[-1] > numbers[0]
        assert [row.shape for row in rows[-2:]] == [(2,), (2,)]
    calls = [list(dict.fromkeys((row.boundary, row.group_seq) for row in r)) for r, _ in results]
    assert calls[0] == calls[1] and len(calls[0]) == 5  # sizes and bytes of each, and the sum


def barriers() -> list[Row]:
    with record_collectives() as trace:
        dist.barrier()
        dist.monitored_barrier()
        dist.all_reduce(torch.ones(2))
    return trace.rows


def test_barriers_take_part_in_the_numbering(two_ranks: Ranks) -> None:
    for rows in two_ranks.run(barriers):
        assert [(row.boundary, row.moment, row.group_seq) for row in rows] == [
            ("barrier[world]", "launch", 0),
            ("barrier[world]", "launch", 1),
            ("all_reduce[world]", "launch", 2),
            ("all_reduce[world]", "completion", 2),
        ]


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def overwritten_input(key: str, overwrite: bool) -> list[Row]:
    """Rank 0 may write to its input while rank 1 has not joined yet."""
    source, output = torch.ones(4), torch.empty(8)
    with record_collectives() as trace:
        if dist.get_rank() == 1:
            _store().wait([key])
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        if dist.get_rank() == 0:
            if overwrite:
                source.fill_(5)
            _store().set(key, "")
        work.wait()
    return trace.rows


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_input_overwritten_under_way_differs_at_completion(
    two_ranks: Ranks, overwrite: bool
) -> None:
    results = two_ranks.run(overwritten_input, f"overwritten {overwrite}", overwrite)
    same = [
        _pick(rows, "input", "launch")[0].h == _pick(rows, "input", "completion")[0].h
        for rows in results
    ]
    assert same == [not overwrite, True]


def late_work(key: str) -> tuple[list[Row], int]:
    """A work of step 0 that on rank 0 cannot end before step 1 has begun."""
    tensor, later = torch.ones(8), torch.ones(2)
    with record_collectives() as trace:
        if dist.get_rank() == 1:
            _store().wait([key])
        work = dist.all_reduce(tensor, async_op=True)
        trace.step()
        if dist.get_rank() == 0:
            _store().set(key, "")
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


def dropped_send(key: str) -> tuple[list[Row], list[str]]:
    """Nobody waits for the first work; gloo would lose the message if it were dropped at once."""
    with record_collectives() as trace:
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(3), 1)
            _store().wait([key])
            del work
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.empty(3), 0)
            _store().set(key, "")
            dist.recv(torch.empty(3), 0)
    return trace.rows, trace.notes


def test_a_work_that_is_dropped_without_a_wait_is_said(two_ranks: Ranks) -> None:
    (first, notes), (second, clean) = two_ranks.run(dropped_send, "received")
    assert [(row.pair_seq, row.moment) for row in first] == [
        (0, "launch"), (1, "launch"), (1, "completion")
    ]  # fmt: skip
    assert len(second) == 2
    assert any("1 works of collectives were dropped without a wait" in note for note in notes)
    assert clean == []


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


def attached_twice() -> str:
    with record_collectives() as trace:
        try:
            CollectiveProbe(trace.recorder).attach()
        except UsageError as error:
            return str(error)
    return "no error"


def test_two_probes_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(attached_twice)[0] == (
        "cannot record collectives twice: another guard is open in this run"
    )


def names() -> list[tuple[str, str, str | None]]:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.ones(3, 2)
    mesh_dim = dist.new_group([0, 1], group_desc="mesh_tp")
    with record_collectives(owners=[ParameterOwner({"fc.weight": weight})]) as trace:
        trace.recorder.position.phase = "backward"
        dist.all_reduce(weight.grad, group=mesh_dim)
        dist.broadcast(weight.data, 0)
        trace.probe.groups.name([0, 1], "dp")
        dist.all_reduce(torch.ones(3, 2))
    return [(row.boundary, row.phase, row.source) for row in trace.rows if row.role == "output"]


def test_a_boundary_names_its_group_and_what_is_in_the_buffer(two_ranks: Ranks) -> None:
    for rows in two_ranks.run(names):
        assert rows == [
            ("all_reduce[tp] fc.weight.grad", "grad_sync", "test_collectives.py"),
            ("broadcast[world] fc.weight", "backward", "test_collectives.py"),
            ("all_reduce[dp]", "grad_sync", "test_collectives.py"),
        ]


def holdings() -> list[tuple[str, str, tuple[Stretch, ...]]]:
    flat = torch.arange(6.0)
    weight, bias = (torch.nn.Parameter(torch.zeros(n)) for n in (4, 2))
    weight.grad, bias.grad = flat[:4], flat[4:]
    owner = ParameterOwner({"weight": weight, "bias": bias})
    with record_collectives(owners=[owner]) as trace:
        trace.probe.holders.append(owner.stretches_in)
        out = torch.empty(3)
        dist.all_reduce(flat)
        dist.reduce_scatter_tensor(out, flat)
        dist.all_reduce(weight.grad)  # has a name
        dist.all_reduce(torch.ones(6))  # is nobody's
        dist.broadcast(flat, 0)  # nothing is summed
    return [(row.boundary, row.role, row.holds) for row in trace.rows]


def test_a_flat_buffer_of_gradients_holds_their_names(two_ranks: Ranks) -> None:
    whole = (Stretch(0, 4, "weight.grad"), Stretch(4, 6, "bias.grad"))
    halves = (
        (Stretch(0, 3, "weight.grad"),),
        (Stretch(0, 1, "weight.grad", 3), Stretch(1, 3, "bias.grad")),
    )
    for rank, rows in enumerate(two_ranks.run(holdings)):
        held = {(boundary, role): holds for boundary, role, holds in rows if holds}
        assert held == {
            ("all_reduce[world]", "input"): whole,
            ("all_reduce[world]", "output"): whole,
            ("reduce_scatter[world]", "input"): whole,
            ("reduce_scatter[world]", "output"): halves[rank],
        }


def deprecated() -> list[str | None]:
    """torch 2.13 wraps these two in `@deprecated`; older versions do not."""
    one, two = torch.ones(2), torch.ones(4)
    with record_collectives() as trace:
        dist.all_gather_into_tensor(two, one)
        dist.reduce_scatter_tensor(one, two)
    return [row.source for row in trace.rows]


def test_the_line_that_called_is_the_users_also_through_a_wrapper(two_ranks: Ranks) -> None:
    for sources in two_ranks.run(deprecated):
        assert sources == ["test_collectives.py"] * 6


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
