"""What is loaded is what was saved, and what a load is given arrives.

In:  events of phase `checkpoint`, operators `save` and `load`, in program order. At the boundary
     `checkpoint` stands what a file holds, by its path in there. Behind the event that begins it
     stands state by its usual names: all that a run has at a save, all that it has after a load, or
     what `load_state_dict` was given and what it left.

Files are told apart by their paths. A rank's own save counts; where it never wrote the file, what
another rank wrote there; in a folder that all write into, what any of them wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from upguard_plugin.invariants.events import RankEvents, StepEvents, what
from upguard_plugin.invariants.findings import Findings, Invariant
from upguard_plugin.records import (
    CHECKPOINT,
    OF_FILE,
    OF_FOLDER,
    OF_RESTORE,
    OF_STATE,
    EventKey,
    Placement,
)

_HEADS = frozenset({OF_FILE, OF_FOLDER, OF_RESTORE, *OF_STATE})
_KEPT = 8  # saves that a rank remembers of each kind; a run may save any number of times
_NEVER_SAVED = "what was loaded was not saved in this run, or long ago"
_OTHERS = "another rank, which was not looked at, may have written it"
_OTHER_PART = "another part of it was loaded than was saved"

Name = tuple[str, str, str]  # role, boundary, slot


@dataclass(frozen=True, slots=True)
class _Value:
    h: int
    s: int
    dtype: str
    shape: tuple[int, ...]
    placement: Placement | None  # values of other parts say nothing of each other


@dataclass(slots=True)
class _Block:
    """What stands behind one event that begins a save or a load."""

    kind: str  # one of _HEADS
    operator: str
    file: int  # the hash of its path
    head: int  # row
    rows: dict[Name, int] = field(default_factory=dict)
    given: dict[Name, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What one save wrote."""

    rank: int
    step: int
    kind: str
    file: int
    values: dict[Name, _Value]


class SavedIsLoaded(Invariant):
    """A load brings back what was saved, and leaves what it was given."""

    name = "saved-is-loaded"
    needs_one_rank = True
    remembers = True

    def __init__(self) -> None:
        self._saved: dict[int, list[_Saved]] = {}  # by rank, oldest first

    def look(self, step: StepEvents, found: Findings) -> None:
        blocks = {events.rank: _blocks(events) for events in step}
        fresh = [
            _saved(step.ranks[rank], block)
            for rank, mine in blocks.items()
            for block in mine
            if block.operator == "save"
        ]
        before = {rank: list(known) for rank, known in self._saved.items()}
        for events in step:
            for block in blocks[events.rank]:
                if block.kind == OF_RESTORE:
                    self._judge_given(step, events, block, found)
                elif block.operator == "save":
                    self._keep(_saved(events, block))
                else:
                    mine = _of(self._saved.get(events.rank, []), block)[-1:]
                    others = _latest(before, block) + _of(fresh, block)
                    # Of what several ranks hold under one name, a folder has one rank's.
                    candidates = mine + others if block.kind == OF_FOLDER else mine or others
                    self._judge(step, events, block, candidates, found)

    def _keep(self, saved: _Saved) -> None:
        kept = self._saved.get(saved.rank, [])
        same = [one for one in kept if one.kind == saved.kind]
        gone = [one for one in same if one.file == saved.file] or same[: 1 - _KEPT]
        stays = [one for one in kept if not any(one is other for other in gone)]
        self._saved[saved.rank] = [*stays, saved]

    def _judge(
        self,
        step: StepEvents,
        events: RankEvents,
        block: _Block,
        saved: Sequence[_Saved],
        found: Findings,
    ) -> None:
        """saved: what may have been loaded; where it is not known which, any will do."""
        for name, row in block.rows.items():
            values = [one.values[name] for one in saved if name in one.values]
            loaded = _value(events, row)
            if not values:
                found.skip(events, row, _NEVER_SAVED)
            elif loaded in values:
                found.hold(events, row)
            elif all(value.placement != loaded.placement for value in values):
                found.skip(events, row, _OTHER_PART)
            elif block.kind == OF_FOLDER and loaded.placement is None and len(step.ranks) == 1:
                found.skip(events, row, _OTHERS)
            else:
                sentence = f"{_named(events.key(row))} is not what was saved."
                if values[-1].dtype != loaded.dtype:
                    sentence += f" It was saved as {values[-1].dtype} and is {loaded.dtype}."
                found.breaks(step, {events.rank: row}, sentence)
        lost = set.intersection(*(set(one.values) for one in saved)) if saved else set()
        lost -= block.rows.keys()
        if lost and block.kind in OF_STATE:
            role, boundary, slot = min(lost)
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            found.breaks(
                step,
                {events.rank: block.head},
                f"{role} {slot} of {boundary}{more} was saved and is not there after the load.",
            )

    def _judge_given(
        self, step: StepEvents, events: RankEvents, block: _Block, found: Findings
    ) -> None:
        for name, row in block.rows.items():
            given = block.given.get(name)
            if given is None:
                continue
            key, before = events.key(row), events.key(given)
            if events.content(given) == events.content(row):
                found.hold(events, row)
                continue
            sentence = f"{_named(key)} is not what the state dict gave it."
            if key.dtype != before.dtype:
                sentence += f" It was given as {before.dtype} and is kept as {key.dtype}."
            found.breaks(step, {events.rank: row}, sentence, producer=given)


def _blocks(events: RankEvents) -> list[_Block]:
    found: list[_Block] = []
    for row in events.rows(_of_checkpoint):
        key = events.key(row)
        name = (key.role, key.boundary, key.slot)
        if key.boundary == CHECKPOINT and key.slot in _HEADS:
            file = int(events.batch.h[row])
            found.append(_Block(key.slot, key.operator or "", file, row))
        elif found and key.moment == "before":
            found[-1].given[name] = row
        elif found:
            found[-1].rows[name] = row
    return found


def _of_checkpoint(key: EventKey) -> bool:
    return key.phase == "checkpoint" and key.operator in ("save", "load")


def _saved(events: RankEvents, block: _Block) -> _Saved:
    values = {name: _value(events, row) for name, row in block.rows.items()}
    return _Saved(events.rank, events.batch.step, block.kind, block.file, values)


def _value(events: RankEvents, row: int) -> _Value:
    h, s, dtype = events.content(row)
    key = events.key(row)
    return _Value(h, s, dtype, key.shape, key.placement)


def _of(saved: Sequence[_Saved], block: _Block) -> list[_Saved]:
    return [one for one in saved if (one.kind, one.file) == (block.kind, block.file)]


def _latest(saved: dict[int, list[_Saved]], block: _Block) -> list[_Saved]:
    """The last save of the file by each rank; states are each rank's own."""
    if block.kind in OF_STATE:
        return []
    return [one for mine in saved.values() for one in _of(mine, block)[-1:]]


def _named(key: EventKey) -> str:
    """ "model.fc.weight in the checkpoint", "parameter fc.weight"."""
    return f"{key.slot} in the checkpoint" if key.boundary == CHECKPOINT else what(key)
