"""Collectives keep their data.

What only moves data keeps it exactly: fingerprints are sums over words at their places, so those of
the pieces that go in add up to those that come out. A sum of int64 keeps the sum of its patterns
modulo 2**64. A sum of floats keeps its sketch within rounding. Over one rank nothing may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, prod, sqrt

import numpy as np

from upguard_plugin.fingerprint.sketch import EPSILON
from upguard_plugin.invariants.events import StepEvents, named_ranks, what
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.invariants.wires import Exchange, Part, Slots, collectives, parts_of
from upguard_plugin.records import FINGERPRINT_PRIME
from upguard_plugin.trace.batch import Floats

_MOVES = frozenset({"all_gather", "broadcast", "gather", "scatter", "all_to_all"})
_TO_EACH = frozenset({"all_gather", "broadcast"})  # every member gets all of it
_SUMS = frozenset({"all_reduce", "reduce_scatter"})
_KEEP_ONE = frozenset({"sum", "avg", "product", "min", "max", "band", "bor", "bxor"})
_SLACK = 10  # times the rounding that a sum over n ranks may take: eps * log2(n)
# Around zero rounding is not relative: to the next number, or to zero where denormals are flushed.
_NEAR_ZERO = {"float16": 2.0**-24, "float64": 2.0**-1022, "complex128": 2.0**-1022}
_NEAR_ZERO_FLUSHED = 2.0**-126  # all others have the exponents of float32
_MEMBER = "a member of the group was not recorded"
_BUFFER = "a buffer of the collective was not recorded"


class DataConserved(Invariant):
    """Collectives that move data, and sums of integers, lose and add nothing."""

    name = "data-conserved"
    needs_one_rank = True  # in groups of one

    def look(self, step: StepEvents, found: Findings) -> None:
        for exchange in collectives(step):
            reason = _obstacle(exchange)
            first = exchange.first
            if exchange.name in _MOVES:
                if reason:
                    found.skip(first.events, first.row, reason)
                else:
                    self._moved(step, exchange, found)
            elif exchange.name in _SUMS and first.key.dtype in ("int64", "uint64"):
                if reason or exchange.reduce_op != "sum":
                    found.skip(first.events, first.row, reason or "the reduce op is no sum")
                else:
                    self._summed(step, exchange, found)

    def _moved(self, step: StepEvents, exchange: Exchange, found: Findings) -> None:
        given = _total(exchange.parts.values(), inputs=True)
        if exchange.name not in _TO_EACH:
            taken = _total(exchange.parts.values(), inputs=False)
            self._judge(step, exchange, () if given == taken else exchange.parts, found)
            return
        wrong = [r for r, part in exchange.parts.items() if _total([part], inputs=False) != given]
        self._judge(step, exchange, wrong, found)

    def _summed(self, step: StepEvents, exchange: Exchange, found: Findings) -> None:
        given = _total(exchange.parts.values(), inputs=True)[1]
        if exchange.name == "all_reduce":
            wrong = [r for r, p in exchange.parts.items() if _total([p], inputs=False)[1] != given]
        else:
            taken = _total(exchange.parts.values(), inputs=False)[1]
            wrong = [] if given == taken else list(exchange.parts)
        self._judge(step, exchange, wrong, found)

    def _judge(
        self, step: StepEvents, exchange: Exchange, wrong: Iterable[int], found: Findings
    ) -> None:
        ranks = tuple(sorted(wrong))
        if not ranks:
            found.hold(exchange.first.events, exchange.first.row)
            return
        parts = exchange.parts
        rows = {r: _first(parts[r].outputs or parts[r].inputs) for r in ranks}
        key = step.ranks[ranks[0]].key(rows[ranks[0]])
        lost = "moves data" if exchange.name in _MOVES else "sums integers"
        found.breaks(
            step,
            rows,
            f"{exchange.name} only {lost}, but {what(key)} on {named_ranks(ranks)} does not add "
            f"up to the inputs of {named_ranks(parts)}.",
            ranks=ranks,
        )


class AloneUnchanged(Invariant):
    """A reduction over one rank leaves its input as it is."""

    name = "alone-unchanged"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for part in parts_of(step):
            name, _, reduce_op = part.op.partition(" ")
            group = part.key.group
            if name not in _SUMS or group is None or len(group.ranks) != 1:
                continue
            events = part.events
            if reduce_op not in _KEEP_ONE or not part.inputs or not part.outputs:
                found.skip(events, part.row, "the reduction has a factor of its own, or no buffers")
            elif _total([part], inputs=True) == _total([part], inputs=False):
                found.hold(events, part.row)
            else:
                row = _first(part.outputs)
                found.breaks(
                    step,
                    {events.rank: row},
                    f"{what(events.key(row))} must be the input, as the group has one rank, but "
                    "it is not.",
                )


class SumsConserved(Invariant):
    """A sum of floats is the sum of its inputs within rounding, by their sketches."""

    name = "sums-conserved"

    def look(self, step: StepEvents, found: Findings) -> None:
        for exchange in collectives(step):
            if exchange.name not in _SUMS or len(exchange.parts) < 2:
                continue
            first = exchange.first
            if first.key.dtype not in EPSILON:
                continue
            reason = _obstacle(exchange) or _sketch_obstacle(exchange)
            if exchange.reduce_op not in ("sum", "avg"):
                reason = "the reduce op is no sum"
            if reason:
                found.skip(first.events, first.row, reason)
            else:
                self._compare(step, exchange, found)

    def _compare(self, step: StepEvents, exchange: Exchange, found: Findings) -> None:
        parts, num = exchange.parts, len(exchange.parts)
        inputs = [_sketch(part, part.inputs) for part in parts.values()]
        factor = 1 / num if exchange.reduce_op == "avg" else 1.0
        given = factor * np.sum(inputs, axis=0)
        # Rounding is relative to what was added, not to a sum that may have cancelled out.
        size = factor * sum(float(np.linalg.norm(one)) for one in inputs)
        if exchange.name == "all_reduce":
            outputs = {rank: _sketch(part, part.outputs) for rank, part in parts.items()}
        else:
            total = np.sum([_sketch(part, part.outputs) for part in parts.values()], axis=0)
            outputs = dict.fromkeys(parts, total)
        dtype = exchange.first.key.dtype
        near_zero = _NEAR_ZERO.get(dtype, _NEAR_ZERO_FLUSHED) * sqrt(_num_elements(exchange.first))
        allowed = (_SLACK * EPSILON[dtype] * size + near_zero) * log2(num)
        apart = {rank: float(np.linalg.norm(out - given)) for rank, out in outputs.items()}
        wrong = tuple(sorted(rank for rank, far in apart.items() if not far <= allowed))
        first = exchange.first
        if not wrong:
            found.hold(first.events, first.row)
            return
        rows = {rank: _first(parts[rank].outputs) for rank in wrong}
        key = step.ranks[wrong[0]].key(rows[wrong[0]])
        far = apart[wrong[0]] / size if size else float("inf")
        found.breaks(
            step,
            rows,
            f"{what(key)} on {named_ranks(wrong)} is {far:.2g} of the inputs' norms away from "
            f"their {exchange.reduce_op}, more than rounding explains.",
            ranks=wrong,
        )


def _obstacle(exchange: Exchange) -> str:
    """Why a collective cannot be added up, or nothing."""
    if not exchange.is_complete:
        return _MEMBER
    parts = list(exchange.parts.values())
    if len({part.op for part in parts}) > 1:
        return "the ranks call different operations"
    name = exchange.name
    everyone_gives = name not in ("broadcast", "scatter")
    everyone_takes = name not in ("gather",)
    gives = [bool(part.inputs) for part in parts]
    takes = [bool(part.outputs) for part in parts]
    if not (all(gives) if everyone_gives else any(gives)):
        return _BUFFER
    if not (all(takes) if everyone_takes else any(takes)):
        return _BUFFER
    return ""


def _sketch_obstacle(exchange: Exchange) -> str:
    for part in exchange.parts.values():
        batch = part.events.batch
        rows = [*part.inputs.values(), *part.outputs.values()]
        if batch.sketch is None or np.isnan(batch.sketch[rows]).any():
            return "no sketch was recorded (sketch: true)"
        if batch.nonfinite is None or (batch.nonfinite[rows] != 0).any():
            return "a buffer has non-finite elements, or they were not counted"
    return ""


def _sketch(part: Part, slots: Slots) -> Floats:
    batch = part.events.batch
    assert batch.sketch is not None  # _sketch_obstacle says so
    total: Floats = batch.sketch[list(slots.values())].sum(axis=0)
    return total


def _num_elements(part: Part) -> int:
    return sum(prod(part.events.key(row).shape) for row in part.inputs.values())


def _total(parts: Iterable[Part], *, inputs: bool) -> tuple[int, int]:
    """h and s of all buffers together."""
    sums = [part.sums(part.inputs if inputs else part.outputs) for part in parts]
    return sum(h for h, _ in sums) % FINGERPRINT_PRIME, sum(s for _, s in sums) % (1 << 64)


def _first(slots: Slots) -> int:
    return next(iter(slots.values()))
