"""Messages from rank to rank: both ends, their numbers, those that nobody waits for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from memory_trace import Row, hash_of, ints, pick, record_collectives, store
from ranks import Ranks


def messages(style: str) -> list[Row]:
    rank = dist.get_rank()
    other = 1 - rank
    sent, received = ints(rank, 5), torch.empty(5, dtype=torch.int64)
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
        sent = pick(source, "input", "launch")
        kept = pick(source, "input", "completion")
        received = pick(destination, "output", "completion")
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
    sent = [(row.pair_seq, row.h) for row in pick(sender, "input", "launch")]
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


def dropped_send(key: str) -> tuple[list[Row], list[str]]:
    """Nobody waits for the first work; gloo would lose the message if it were dropped at once."""
    with record_collectives() as trace:
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(3), 1)
            store().wait([key])
            del work
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.empty(3), 0)
            store().set(key, "")
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
