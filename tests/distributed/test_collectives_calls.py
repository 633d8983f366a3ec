"""How calls are told apart: groups, numbers, names, lines, and those without data."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from memory_trace import Row, record_collectives
from ranks import Ranks

from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.collectives.owners import ParameterOwner
from upguard_plugin.errors import UsageError
from upguard_plugin.records import Stretch


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
            ("all_reduce[tp] fc.weight.grad", "grad_sync", "test_collectives_calls.py"),
            ("broadcast[world] fc.weight", "backward", "test_collectives_calls.py"),
            ("all_reduce[dp]", "grad_sync", "test_collectives_calls.py"),
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
        assert sources == ["test_collectives_calls.py"] * 6
