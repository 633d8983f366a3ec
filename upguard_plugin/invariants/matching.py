"""Ranks call the same collectives, and what they get from one is the same.

A group's collectives are numbered on each member. Number 7 of a group must be one operation, with
one dtype, on all of them, also where their steps end before and after it; a number that a member
never reaches is reported at the end. Those that end with one value for all must leave its bits on
all; what is received must be what was sent.
"""

from __future__ import annotations

from upguard_plugin.invariants.events import StepEvents, named_ranks, odd_ones, unequal, what
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.invariants.waiting import Waiting
from upguard_plugin.invariants.wires import Exchange, collectives, messages

_ONE_VALUE = frozenset({"all_reduce", "all_gather", "broadcast"})  # the same for every member
_ONE_SHAPE = frozenset({"all_reduce"})  # of the input; others may cut their data as they like
_NOT_RECORDED = "a member of the group was not recorded"
_NO_OTHER_END = "the other end of the message was not recorded"


class CollectivesMatch(Invariant):
    """Members call the same operation, with the same dtype, at each number of their group."""

    name = "collectives-match"

    def __init__(self) -> None:
        self._waiting = Waiting()

    def look(self, step: StepEvents, found: Findings) -> None:
        for exchange in self._waiting.joined(step, collectives(step)):
            first = exchange.first
            if not exchange.is_complete:
                found.skip(first.events, first.row, _NOT_RECORDED)
            if len(exchange.parts) < 2:
                if exchange.is_complete:
                    found.hold(first.events, first.row)
                continue
            called = {rank: part.op for rank, part in exchange.parts.items()}
            dtypes = {rank: part.key.dtype for rank, part in exchange.parts.items()}
            if len(set(called.values())) > 1:
                self._report(exchange, called, "call different operations", found)
            elif len(set(dtypes.values())) > 1:
                self._report(exchange, dtypes, "give it different dtypes", found)
            elif exchange.name in _ONE_SHAPE and len(set(_shapes(exchange).values())) > 1:
                self._report(exchange, _shapes(exchange), "give it different shapes", found)
            else:
                found.hold(first.events, first.row)

    def finish(self, found: Findings) -> None:
        for exchange, absent in self._waiting.left():
            called = {rank: part.op for rank, part in exchange.parts.items()}
            if not absent or not _shows_on_all(exchange):
                found.skip(exchange.first.events, exchange.first.row, _NOT_RECORDED)
                continue
            found.breaks(
                exchange.step,
                exchange.rows,
                f"{exchange.first.op} is number {exchange.number} of group {exchange.group.name} "
                f"on {named_ranks(called)}, but {named_ranks(absent)} never called it.",
                ranks=odd_ones(called | dict.fromkeys(absent, "")),
            )

    def _report(self, exchange: Exchange, said: dict[int, str], how: str, found: Findings) -> None:
        listed = ", ".join(f"{said[rank]} on rank {rank}" for rank in sorted(said))
        found.breaks(
            exchange.step,
            exchange.rows,
            f"ranks {how} as number {exchange.number} of group {exchange.group.name}: {listed}.",
            ranks=odd_ones(said),
        )


class OutputsAgree(Invariant):
    """An all_reduce, all_gather or broadcast leaves the same bits on all members."""

    name = "outputs-agree"

    def look(self, step: StepEvents, found: Findings) -> None:
        for exchange in collectives(step):
            if exchange.name not in _ONE_VALUE or len({p.op for p in exchange.parts.values()}) > 1:
                continue
            for slot in exchange.first.outputs:
                self._compare(step, exchange, slot, found)

    def _compare(self, step: StepEvents, exchange: Exchange, slot: str, found: Findings) -> None:
        sides = {r: p.outputs[slot] for r, p in exchange.parts.items() if slot in p.outputs}
        first, row = exchange.first.events, exchange.first.outputs[slot]
        if len(sides) < len(exchange.group.ranks):
            found.skip(first, row, _NOT_RECORDED)
        if len(sides) < 2:
            return
        contents = {rank: step.ranks[rank].content(at) for rank, at in sides.items()}
        if len(set(contents.values())) == 1:
            found.hold(first, row)
            return
        odd = odd_ones(contents)
        found.breaks(
            step,
            sides,
            f"{what(first.key(row))} must be the same on all members of group "
            f"{exchange.group.name}, but {unequal(odd, sides)}.",
            ranks=odd,
        )


class ReceivedIsSent(Invariant):
    """What a receive leaves is what its send was given."""

    name = "received-is-sent"

    def __init__(self) -> None:
        self._waiting = Waiting()

    def look(self, step: StepEvents, found: Findings) -> None:
        for message in self._waiting.joined(step, messages(step)):
            ends = {("send" if p.op == "send" else "recv"): p for p in message.parts.values()}
            if len(ends) < 2 or not ends["send"].inputs or not ends["recv"].outputs:
                found.skip(message.first.events, message.first.row, _NO_OTHER_END)
                continue
            sent, received = ends["send"], ends["recv"]
            rows = (next(iter(sent.inputs.values())), next(iter(received.outputs.values())))
            if sent.events.content(rows[0]) == received.events.content(rows[1]):
                found.hold(received.events, rows[1])
                continue
            found.breaks(
                message.step,
                {sent.events.rank: rows[0], received.events.rank: rows[1]},
                f"{what(received.events.key(rows[1]))} is not what rank {sent.events.rank} sent.",
                ranks=(received.events.rank,),
            )

    def finish(self, found: Findings) -> None:
        for message, absent in self._waiting.left():
            first = message.first
            if not absent:
                found.skip(first.events, first.row, _NO_OTHER_END)
                continue
            did, other = ("receives", "sends") if first.op != "send" else ("sends", "receives")
            found.breaks(
                message.step,
                message.rows,
                f"rank {first.events.rank} {did} message {message.number} of group "
                f"{message.group.name} that {named_ranks(absent)} never {other}.",
            )


def _shows_on_all(exchange: Exchange) -> bool:
    """Whether a member that calls it has an event of it, as far as the others' events tell.

    Roles may have been left out of the recording, and some members give or get nothing.
    """
    takes_only = exchange.name in ("broadcast", "scatter")
    parts = exchange.parts.values()
    return any(part.outputs if takes_only else part.inputs for part in parts)


def _shapes(exchange: Exchange) -> dict[int, str]:
    """Without dims of size 1: one element is one element, [] or [1]."""
    return {
        rank: str([size for size in part.key.shape if size != 1])
        for rank, part in exchange.parts.items()
    }
