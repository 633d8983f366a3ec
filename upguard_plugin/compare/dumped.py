"""Events whose tensors both runs kept whole, for `upguard show --diff`.

In:  two runs, a selection, and the words of `--event`: `step 1`, `call 2`, a boundary, a phase, a
     role, an operator, a slot; each narrows the choice.
Out: pairs of events with their element-wise difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from upguard_plugin.compare.browse import seen_event
from upguard_plugin.compare.elements import compare_elements
from upguard_plugin.compare.findings import Finding
from upguard_plugin.compare.keys import KeySpace
from upguard_plugin.compare.pairing import Pairing, pair_step
from upguard_plugin.compare.run import Array, Run
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import UsageError
from upguard_plugin.records import EventKey
from upguard_plugin.verdict import Divergence, SeenDiff
from upguard_plugin.verdict_parts import ElementDiff

_MAX_LISTED = 8
_NUMBERED = ("step", "call", "rank", "microbatch")


@dataclass(frozen=True, slots=True)
class EventName:
    """What `--event` says, in parts that must all be true of an event."""

    numbers: tuple[tuple[str, int], ...] = ()  # ("step", 1)
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> EventName:
        """Raises UsageError if `step`, `call`, `rank` or `microbatch` has no number behind it."""
        numbers, words, parts = [], [], iter(text.split())
        for part in parts:
            if part not in _NUMBERED:
                words.append(part)
                continue
            number = next(parts, "")
            if not number.isdecimal():
                raise UsageError(
                    f"--event {text!r} has no number behind {part!r}",
                    remedy=f"write it like this: --event '{part} 1 forward blocks.0.mlp output'",
                )
            numbers.append((part, int(number)))
        return cls(tuple(numbers), tuple(words))

    def allows(self, name: str, number: int) -> bool:
        """Whether an event with this number may be meant."""
        return all(wanted == number for what, wanted in self.numbers if what == name)

    def matches(self, key: EventKey) -> bool:
        """Whether every word is one of the event's own."""
        own = {key.boundary, key.phase, key.role, key.slot, key.operator, key.moment, key.dtype}
        return all(word in own for word in self.words)


def dumped_pairs(
    baseline: Run, target: Run, selection: Selection, event: EventName
) -> Iterator[SeenDiff]:
    """The chosen events whose tensors both runs have, in the baseline's order.

    Raises UsageError if there is none, and says what both runs have.
    """
    pairs = _chosen_pairs(baseline, target, selection, event)
    first = next(pairs, None)
    if first is None:
        raise _nothing(baseline, target)
    yield first
    yield from pairs


def _chosen_pairs(
    baseline: Run, target: Run, selection: Selection, event: EventName
) -> Iterator[SeenDiff]:
    space = KeySpace()
    for rank, step in _common_steps(baseline, target):
        if not selection.has_rank(rank) or not event.allows("rank", rank):
            continue
        if not selection.has_step(step) or not event.allows("step", step):
            continue
        kept = [_tensors(run, rank, step) for run in (baseline, target)]
        if all(kept):
            pairing = pair_step(baseline.read(rank, step), target.read(rank, step), space)
            yield from _pairs(pairing, kept, rank, selection, event)


def _common_steps(baseline: Run, target: Run) -> Iterator[tuple[int, int]]:
    """Rank and step of what both runs recorded."""
    for rank in sorted(set(baseline.ranks) & set(target.ranks)):
        steps = {e.step for e in baseline.steps(rank)} & {e.step for e in target.steps(rank)}
        yield from ((rank, step) for step in sorted(steps))


def _nothing(baseline: Run, target: Run) -> UsageError:
    """What is to be said where no chosen event has its tensor in both runs."""
    kept = {side: _kept(run) for side, run in (("baseline", baseline), ("target", target))}
    for side, run in (("baseline", baseline), ("target", target)):
        if not kept[side]:
            return UsageError(
                f"the {side} {run.path} has no whole tensors",
                remedy="record both runs with the setting dump",
            )
    both = kept["baseline"] & kept["target"]
    steps = {side: f"steps {_listed(step for _, step in found)}" for side, found in kept.items()}
    if not both:
        return UsageError(
            "the runs have whole tensors of no step in common",
            evidence=steps,
            remedy="record both with the same dump",
        )
    rank, step = min(both)
    names = _boundaries(baseline, rank, step) & _boundaries(target, rank, step)
    return UsageError(
        "no event that was chosen has its whole tensor in both runs",
        evidence={
            "steps": _listed(step for _, step in both),
            "names": f"{_listed(names)} (of step {step}, rank {rank})",
        },
        remedy=f"name one of these: --event 'step {step} {min(names, default='NAME')}'",
    )


def _kept(run: Run) -> set[tuple[int, int]]:
    """Rank and step of the tensors that a run has."""
    return {
        (rank, entry.step)
        for rank in run.ranks
        for entry in run.steps(rank)
        if run.has_tensors(rank, f"step{entry.step}")
    }


def _boundaries(run: Run, rank: int, step: int) -> set[str]:
    """Of the tensors that a run has of a step."""
    batch, kept = run.read(rank, step), _tensors(run, rank, step)
    return {
        batch.key_of(row).boundary for row, seq in enumerate(batch.seq) if str(int(seq)) in kept
    }


def _listed(items: Iterable[Any]) -> str:
    ordered = sorted(set(items))
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return f"{', '.join(map(str, ordered[:_MAX_LISTED])) or 'none'}{more}"


def show_command(baseline: Run, target: Run, found: Divergence | None) -> str | None:
    """The command that shows the elements of a divergence, if both runs kept them."""
    if found is None:
        return None
    # An operator that only one run has is no pair: the first pair that differs is shown.
    seen = found if found.change is None else found.change.reached
    words = [f"step {seen.step}", seen.phase, seen.boundary, seen.operator, f"call {seen.call}"]
    words += [seen.role, seen.slot, found.moment if seen is found else None]
    text = " ".join(word for word in words if word is not None)
    rank = found.ranks[0] if found.ranks else 0
    pairs = _chosen_pairs(baseline, target, Selection(), EventName.parse(f"rank {rank} {text}"))
    if next(pairs, None) is None:
        return None
    return f'upguard show --diff {baseline.path} {target.path} --event "{text}"'


def elements_of(
    runs: tuple[Run, Run], rank: int, pairing: Pairing, finding: Finding
) -> ElementDiff | None:
    """How the two tensors of a finding differ, if both runs kept them whole."""
    if finding.what != "value" or finding.baseline_row is None or finding.target_row is None:
        return None
    kept = []
    sides = (pairing.baseline.batch, pairing.target.batch)
    for run, batch, row in zip(
        runs, sides, (finding.baseline_row, finding.target_row), strict=True
    ):
        kept.append(_tensors(run, rank, batch.step).get(str(int(batch.seq[row]))))
    if kept[0] is None or kept[1] is None:
        return None
    key = finding.key(pairing)
    return compare_elements(kept[0], kept[1], key.dtype, key.shape, key.holds)


def _tensors(run: Run, rank: int, step: int) -> dict[str, Array]:
    name = f"step{step}"
    return run.read_tensors(rank, name) if run.has_tensors(rank, name) else {}


def _pairs(
    pairing: Pairing,
    kept: list[dict[str, Array]],
    rank: int,
    selection: Selection,
    event: EventName,
) -> Iterator[SeenDiff]:
    baseline, target = pairing.baseline.batch, pairing.target.batch
    for row_b, row_t in zip(
        pairing.baseline_rows.tolist(), pairing.target_rows.tolist(), strict=True
    ):
        key, other = baseline.key_of(row_b), target.key_of(row_t)
        numbers = {"call": int(baseline.call[row_b]), "microbatch": int(baseline.microbatch[row_b])}
        chosen = selection.has_key(key) and event.matches(key)
        if not chosen or not all(event.allows(*number) for number in numbers.items()):
            continue
        ours = kept[0].get(str(int(baseline.seq[row_b])))
        theirs = kept[1].get(str(int(target.seq[row_t])))
        if ours is None or theirs is None:
            continue
        same_form = (key.dtype, key.shape) == (other.dtype, other.shape)
        yield SeenDiff(
            event=seen_event(baseline, row_b, rank),
            target_fingerprint=f"{int(target.h[row_t]):016x}",
            target_form=None if same_form else f"{other.dtype} {list(other.shape)}",
            elements=compare_elements(ours, theirs, key.dtype, key.shape, key.holds)
            if same_form
            else None,
        )
