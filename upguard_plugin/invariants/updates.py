"""Weights change when they are updated, and only then.

In:  the parameter events of each rank, in program order: found at the start of a step, used by
     modules, left by the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from upguard_plugin.invariants.events import Content, RankEvents, StepEvents, what
from upguard_plugin.invariants.findings import Break, Findings, Invariant, made
from upguard_plugin.records import EventKey

USES = frozenset({"forward", "loss", "recompute"})
_GATHERED = ("all_gather", "broadcast")  # operations that bring weights from other ranks
_LOW_PRECISION = frozenset({"bfloat16", "float16"})  # small updates vanish in their rounding
_MIN_UPDATES = 2  # a single step may have a learning rate of 0


def is_weight(key: EventKey) -> bool:
    return key.role == "param" and key.slot == "value"


def is_loaded(key: EventKey) -> bool:
    return is_weight(key) and key.phase == "checkpoint" and key.operator == "load"


@dataclass(frozen=True, slots=True)
class _Value:
    """A weight as it was seen last."""

    content: Content
    form: tuple[object, ...]  # shape and placement: values of other forms say nothing of it
    step: int
    row: int


def _value(events: RankEvents, row: int) -> _Value:
    key = events.key(row)
    return _Value(events.content(row), (key.shape, key.placement), events.batch.step, row)


class WeightsInUse(Invariant):
    """A module uses the weights that were found at the start of the step.

    Of each weight the first use counts: what comes after an update a program may change itself.
    """

    name = "weights-in-use"
    needs_one_rank = True

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            known: dict[str, _Value] = {}
            reason = ""
            for row in events.rows(_tells_of_weights):
                key = events.key(row)
                if key.phase == "eval":
                    reason = "an evaluation came in between, which may use other weights"
                elif key.role == "output":
                    reason = "weights were gathered from other ranks in between"
                elif key.phase == "start":
                    known[key.boundary] = _value(events, row)
                elif key.phase == "optimizer" or is_loaded(key):
                    known.pop(key.boundary, None)
                elif key.phase in USES and key.boundary in known:
                    self._judge(step, events, (known.pop(key.boundary), row), reason, found)

    def _judge(
        self,
        step: StepEvents,
        events: RankEvents,
        pair: tuple[_Value, int],
        reason: str,
        found: Findings,
    ) -> None:
        known, row = pair
        now = _value(events, row)
        if known.form != now.form or known.content[2] != now.content[2]:
            found.skip(events, row, "it is used in another form than it is kept in")
        elif known.content == now.content:
            found.hold(events, row)
        elif reason:
            found.skip(events, row, reason)
        else:
            found.breaks(
                step,
                {events.rank: row},
                f"{what(events.key(row))} is used with other bits than it had at the start of the "
                "step, although no optimizer has stepped in between.",
                producer=known.row,
            )


def _tells_of_weights(key: EventKey) -> bool:
    gathers = key.role == "output" and key.op is not None and key.op.startswith(_GATHERED)
    return is_weight(key) or gathers or key.phase == "eval"


class EvalLeavesWeights(Invariant):
    """An evaluation between an update and the next step leaves the weights as they were.

    Applied to weights that do not change between steps without one either: a program may clip,
    average or prune its weights itself.
    """

    name = "eval-leaves-weights"
    needs_one_rank = True
    remembers = True

    def __init__(self) -> None:
        self._updated: dict[tuple[int, str], _Value] = {}
        self._evaluated: dict[int, int] = {}  # rank -> step after whose update it evaluated
        self._steady: dict[tuple[int, str], bool] = {}  # whether it stays without an evaluation
        self._changed: dict[tuple[int, str], Break] = {}

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            loads = events.rows(is_loaded)
            self._forget(events, loads)
            rows = events.rows(_tells_of_eval)
            evaluations = [row for row in rows if events.key(row).phase == "eval"]
            updates = [row for row in rows if events.key(row).phase == "optimizer"]
            # What a start finds after an evaluation has begun may be there for the evaluation only.
            if not evaluations or (updates and updates[0] < evaluations[0]):
                for row in events.rows(_is_found):
                    self._judge(step, events, row, found)
            for row in updates:
                self._updated[events.rank, events.key(row).boundary] = _value(events, row)
            self._forget(events, [row for row in loads if updates and row > updates[-1]])
            if updates and evaluations and updates[0] < evaluations[-1]:
                self._evaluated[events.rank] = step.step

    def _forget(self, events: RankEvents, loads: list[int]) -> None:
        """What a load has replaced says nothing of what comes after it."""
        for row in loads:
            self._updated.pop((events.rank, events.key(row).boundary), None)

    def finish(self, found: Findings) -> None:
        for name, change in self._changed.items():
            if self._steady.get(name):
                found.add(change)

    def _judge(self, step: StepEvents, events: RankEvents, row: int, found: Findings) -> None:
        name = (events.rank, events.key(row).boundary)
        before, now = self._updated.get(name), _value(events, row)
        if before is None or before.step != step.step - 1 or before.form != now.form:
            return
        if self._evaluated.get(events.rank) != before.step:
            same = before.content == now.content
            self._steady[name] = self._steady.get(name, True) and same
        elif before.content == now.content:
            found.hold(events, row)
        elif name not in self._changed:
            sentence = f"{what(events.key(row))} was changed by the evaluation after the last step."
            self._changed[name] = made(self.name, step, {events.rank: row}, sentence)


def _tells_of_eval(key: EventKey) -> bool:
    return key.phase == "eval" or (is_weight(key) and key.phase == "optimizer")


def _is_found(key: EventKey) -> bool:
    return is_weight(key) and key.phase == "start"


class FrozenStay(Invariant):
    """A parameter that no gradient and no optimizer reaches keeps its bits.

    Nothing in a run says that a parameter is meant to be frozen (a program may average weights into
    it), so one that changes is a suspect.
    """

    name = "frozen-stay"

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], _Value] = {}

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            loaded = {events.key(row).boundary for row in events.rows(is_loaded)}
            reached = {events.key(row).boundary for row in events.rows(_reaches)} | loaded
            for row in events.rows(_is_found):
                key = events.key(row)
                name = (events.rank, key.boundary)
                before, now = self._found.pop(name, None), _value(events, row)
                if key.boundary in reached:
                    continue
                self._found[name] = now
                if before is None or before.step != step.step - 1 or before.form != now.form:
                    continue
                if before.content == now.content:
                    found.hold(events, row)
                else:
                    sentence = f"{what(key)} has no gradient and no optimizer, but it changes."
                    found.suspect(made(self.name, step, {events.rank: row}, sentence))


def _reaches(key: EventKey) -> bool:
    return key.role in ("grad", "main_grad") or (is_weight(key) and key.phase == "optimizer")


@dataclass(slots=True)
class _Updates:
    """What optimizer steps did to one parameter on one rank."""

    first: Break
    changed: int = 0
    unchanged: int = 0


def _of_update(key: EventKey) -> bool:
    if key.role in ("grad", "main_grad"):
        return key.phase in ("grad_sync", "clip") and key.operator is None
    if key.role == "scalar":
        return key.boundary.endswith(".lr") and key.phase == "optimizer"
    return is_weight(key) and key.phase in ("start", "optimizer")


class WeightsMove(Invariant):
    """Parameters that an optimizer updates with gradients that are not zero do change.

    It is broken if none of a rank ever does. A single one that never does is a suspect, and so are
    all in bfloat16 and float16: an update may be too small to show.
    """

    name = "weights-move"
    needs_one_rank = True
    remembers = True

    def __init__(self) -> None:
        self._updates: dict[tuple[int, str], _Updates] = {}

    def look(self, step: StepEvents, found: Findings) -> None:
        for events in step:
            if events.batch.mark is not None:
                continue
            before: dict[str, int] = {}
            moved_by: dict[str, int] = {}  # row of the gradient that the optimizer is to use
            rates: list[float] = []
            for row in events.rows(_of_update):
                key = events.key(row)
                if key.role == "scalar":
                    rates.append(_number(events, row))
                elif key.role != "param":
                    if key.dtype != "none" and not events.is_zero(row):
                        moved_by[key.boundary] = row
                elif key.phase == "start":
                    before[key.boundary] = row
                elif key.boundary in before and key.boundary in moved_by and _all_move(rates):
                    self._count(step, events, (before[key.boundary], row), found)

    def _count(
        self, step: StepEvents, events: RankEvents, rows: tuple[int, int], found: Findings
    ) -> None:
        before, after = rows
        key = events.key(after)
        sentence = f"{what(key)} never changes, although its gradient is not zero."
        updates = self._updates.setdefault(
            (events.rank, key.boundary),
            _Updates(made(self.name, step, {events.rank: after}, sentence)),
        )
        if events.content(before) == events.content(after):
            updates.unchanged += 1
        else:
            updates.changed += 1
            found.hold(events, after)

    def finish(self, found: Findings) -> None:
        moving = {rank for (rank, _), updates in self._updates.items() if updates.changed}
        for (rank, _), updates in self._updates.items():
            if updates.changed or updates.unchanged < _MIN_UPDATES:
                continue
            if rank in moving or updates.first.key.dtype in _LOW_PRECISION:
                found.suspect(updates.first)
            else:
                found.add(updates.first)


def _number(events: RankEvents, row: int) -> float:
    return 0.0 if events.batch.value is None else float(events.batch.value[row])


def _all_move(rates: list[float]) -> bool:
    """Whether every learning rate is known and not zero; groups cannot be told apart."""
    return bool(rates) and all(rate != 0.0 and rate == rate for rate in rates)
