"""A verdict as text: the answer first, then where, what, how we know, and what was covered.

In:  a `Verdict`.
Out: plain text, which reads the same on a terminal and in a log file.
"""

from __future__ import annotations

from collections.abc import Sequence

from upguard_plugin.report.places import when, where
from upguard_plugin.report.plain import plain
from upguard_plugin.verdict import Divergence, Reached, Tainted, Verdict
from upguard_plugin.verdict_parts import Distance, ElementDiff, EventRef, Held, TensorSide

MAX_NOTES = 12  # further ones are counted; --verbose prints them all
MAX_CONCURRENT = 5
MAX_LINKS = 3  # boundaries that the difference reached
MAX_HELD = 4  # tensors in a flat buffer
_WIDTH = 9


def verdict_text(verdict: Verdict, *, verbose: bool = False, elements: str | None = None) -> str:
    """The whole report. verbose: every note, and the first divergence of each rank.

    elements: the command that shows which elements differ, where the tensors were kept.
    """
    lines = [headline(verdict)]
    found = verdict.first_divergence
    if found is not None:
        lines += _rows(_divergence_rows(found, verdict))
        lines += _rows([] if elements is None else [("elements", elements)])
        lines += _rows(_spread_rows(verdict, verbose))
    lines += _rows(_ending_rows(verdict, verbose), indent=2)
    if verbose and len(verdict.per_rank) > 1:
        lines += _rows([(f"rank {d.ranks[0]}", _place(d)) for d in verdict.per_rank])
    return "\n".join(lines)


def headline(verdict: Verdict) -> str:
    """The verdict in one line."""
    found = verdict.first_divergence
    if found is not None:
        return f"DIVERGENT at {when(found)}"
    if verdict.verdict == "identical":
        return _identical(verdict)
    return f"INCOMPARABLE: {plain(verdict.notes[0]) if verdict.notes else 'nothing was compared'}"


def _identical(verdict: Verdict) -> str:
    """What is equal, and what is not, or was left out, although the runs are called identical."""
    apart, counts = [], [f"{verdict.certified.events} events are equal, bit by bit"]
    for number, what, of_them in (
        (0 if verdict.tainted is None else verdict.tainted.boundaries, "rounding", "not"),
        (verdict.coverage.noise, "noise", "noise"),
        (verdict.coverage.ignored, "what is ignored", "ignored"),
    ):
        if number:
            apart.append(what)
            counts.append(f"{number} {'is' if number == 1 else 'are'} {of_them}")
    but_for = f" but for {' and '.join(apart)}" if apart else ""
    return f"IDENTICAL{but_for}: {'; '.join(counts)}"


def _divergence_rows(found: Divergence, verdict: Verdict) -> list[tuple[str, str]]:
    rows = [
        ("boundary", where(found)),
        ("tensor", _tensor(found)),
        ("ranks", _ranks(found, verdict)),
        ("kind", f"{found.kind}: {found.explanation}"),
    ]
    if found.inputs_equal is not None or found.phase not in ("start", "data"):
        rows.append(("inputs", _inputs(found, verdict)))
    if found.group is not None:
        members = ", ".join(map(str, found.group.ranks))
        seq = "" if found.group.seq is None else f", collective {found.group.seq} of it"
        rows.append(("group", f"{found.group.name} (ranks {members}){seq}"))
    rows += [("baseline", _side(found.baseline)), ("target", _side(found.target))]
    if found.distance is not None:
        rows.append(("distance", _distance(found.distance)))
    if found.change is not None:
        rows.append(("reaches", _event(found.change.reached)))
    if found.elements is not None:
        rows.append(("differ", _elements(found.elements)))
    if found.producer is not None:
        rows.append(("producer", _event(found.producer)))
    if found.source is not None:
        rows.append(("source", f"{found.source.file}:{found.source.line}"))
    return rows


def _spread_rows(verdict: Verdict, verbose: bool) -> list[tuple[str, str]]:
    """How it spread: on the first rank, or on all. The first link is the divergence itself."""
    rows = []
    for spread in verdict.spread if verbose else verdict.spread[:1]:
        links = [
            link
            for place, link in enumerate(spread.boundaries[1:])
            if verbose or place < MAX_LINKS or link.inputs_equal
        ]
        name = "spread" if not verbose or len(verdict.spread) == 1 else f"rank {spread.rank}"
        rows += [(name if place == 0 else "", _link(link)) for place, link in enumerate(links)]
    return rows


def _link(link: Reached) -> str:
    microbatch = "" if link.microbatch is None else f", micro-batch {link.microbatch}"
    call = f", call {link.call}" if link.call else ""
    name = f"{link.boundary} {link.role} {link.slot}{call} ({link.phase}{microbatch})"
    told = [] if link.distance is None else [_distance(link.distance)]
    told += ["its inputs are equal, it may be another origin"] if link.inputs_equal else []
    return f"{name}: {'; '.join(told)}" if told else name


_INPUTS = {
    True: "equal, so this is the origin",
    False: "not equal, but outside of what was compared",
    None: "not recorded as such; every recorded event before it is equal",
}
_ROUNDED = "every recorded event before it is equal, or other by rounding only"
_SHARED = "equal where both runs have them"


def _inputs(found: Divergence, verdict: Verdict) -> str:
    if found.inputs_equal is None and verdict.tainted is not None:
        return _ROUNDED
    is_made = found.change is not None and found.change.how != "rewired"
    return _SHARED if is_made and found.inputs_equal is None else _INPUTS[found.inputs_equal]


def _tensor(found: Divergence) -> str:
    side = found.baseline or found.target
    assert side is not None
    moment = "" if found.moment is None else f" at {found.moment}"
    return f"{found.role} {found.slot}{moment}, {side.dtype} {side.shape}"


def _side(side: TensorSide | None) -> str:
    if side is None:
        return "no such event"
    value = "" if side.value is None else f" = {side.value!r}"
    holds = "" if not side.holds else f" of {_held(side.holds)}"
    return f"{side.fingerprint}{value} {side.dtype} {side.shape}{holds}"


def _elements(diff: ElementDiff) -> str:
    text = f"{diff.differing} of {diff.total} elements: {diff.pattern}"
    return text + (f"; of {_held(diff.of)}" if diff.of else "")


def _held(holds: Sequence[Held]) -> str:
    """ "embed.weight.grad[504:512]", for the parts of a flat buffer."""
    names = [f"{h.name}[{h.offset}:{h.offset + h.stop - h.start}]" for h in holds]
    more = f" and {len(names) - MAX_HELD} more" if len(names) > MAX_HELD else ""
    return ", ".join(names[:MAX_HELD]) + more


def _ranks(found: Divergence, verdict: Verdict) -> str:
    sizes = {side.layout.get("world_size") for side in (verdict.baseline, verdict.target)}
    if sizes == {1}:
        return "0, the only one"
    later = sorted({rank for d in verdict.per_rank for rank in d.ranks} - set(found.ranks))
    text = _differ(found.ranks)
    if later:
        text += f"; {_differ(later)} later"
    others = verdict.coverage.ranks - len(found.ranks) - len(later)
    if others > 0:
        text += f"; {others} {'other is' if others == 1 else 'others are'} equal"
    return text


def _differ(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks))} {'differs' if len(ranks) == 1 else 'differ'}"


def _rank_names(found: Divergence) -> str:
    return f"{'rank' if len(found.ranks) == 1 else 'ranks'} {', '.join(map(str, found.ranks))}"


def _distance(distance: Distance) -> str:
    eps = distance.in_eps
    text = f"{distance.relative_l2:.3g} of its norm"
    if eps is not None:
        text += f", {eps:.3g} epsilons"
    if distance.factor is not None:
        text += f", {distance.factor:g} times the baseline"
    return text + (" (estimated)" if distance.estimated else "")


def _place(found: Divergence) -> str:
    return f"{when(found)}: {found.boundary} {found.role} {found.slot} ({found.kind})"


def _event(event: EventRef) -> str:
    microbatch = "" if event.microbatch is None else f", micro-batch {event.microbatch}"
    return (
        f"{event.boundary} {event.role} {event.slot} "
        f"(step {event.step}{microbatch}, {event.phase}, rank {event.rank})"
    )


def _ending_rows(verdict: Verdict, verbose: bool) -> list[tuple[str, str]]:
    rows = []
    others = verdict.concurrent if verbose else verdict.concurrent[:MAX_CONCURRENT]
    for place, other in enumerate(others):
        rows.append(("also" if place == 0 else "", f"{_place(other)}, {_rank_names(other)}"))
    if len(others) < len(verdict.concurrent):
        rows.append(("", f"and {len(verdict.concurrent) - len(others)} more (--verbose)"))
    if verdict.certified.last is not None and verdict.verdict != "identical":
        rows.append(("certified", _certified(verdict)))
    if verdict.tainted is not None:
        rows.append(("tainted", _tainted(verdict.tainted)))
    rows.append(("coverage", _coverage(verdict)))
    notes = verdict.notes[1:] if verdict.verdict == "incomparable" else verdict.notes
    shown = notes if verbose else notes[:MAX_NOTES]
    rows += [("note", note) for note in shown]
    if len(shown) < len(notes):
        rows.append(("note", f"and {len(notes) - len(shown)} more (--verbose)"))
    return rows + (_left_out_rows(verdict) if verbose else [])


def _left_out_rows(verdict: Verdict) -> list[tuple[str, str]]:
    rows = []
    for left_out in verdict.left_out:
        rows.append(("left out", f"{left_out.events} events, {left_out.reason}"))
        for one in left_out.boundaries:
            eps = one.largest_in_eps
            apart = "" if eps is None else f": {eps:.3g} epsilons apart (estimated)"
            rows.append(("", f"{one.boundary} ({one.role}){apart}"))
    return rows


def _tainted(tainted: Tainted) -> str:
    return (
        f"from {_event(tainted.origin)} on {tainted.boundaries} events differ by rounding, "
        f"by at most {tainted.largest_in_eps:.3g} epsilons"
    )


def _certified(verdict: Verdict) -> str:
    events, last = verdict.certified.events, verdict.certified.last
    assert last is not None
    if verdict.first_divergence is None:
        return f"{events} events are equal, bit by bit"
    return f"{events} events before it are equal, bit by bit; the last is {_event(last)}"


def _coverage(verdict: Verdict) -> str:
    coverage = verdict.coverage
    unmatched = coverage.unmatched_baseline + coverage.unmatched_target
    parts = [f"{coverage.compared} compared", f"{coverage.differ} differ", f"{unmatched} unmatched"]
    if verdict.verdict == "identical" and coverage.differ:
        parts[1] += " that are not used"
    if unmatched:
        parts[-1] += (
            f" ({coverage.unmatched_baseline} in the baseline, "
            f"{coverage.unmatched_target} in the target)"
        )
    for number, what in (
        (coverage.tainted, "unequal by rounding"),
        (coverage.not_comparable, "not comparable"),
        (coverage.filtered, "filtered out"),
        (coverage.noise, "noise"),
        (coverage.never_fired, "probes never fired"),
    ):
        if number:
            parts.append(f"{number} {what if number > 1 else what.replace('probes', 'probe')}")
    return ", ".join(parts)


def _rows(rows: Sequence[tuple[str, str]], indent: int = 4) -> list[str]:
    return [f"{' ' * indent}{name:<{_WIDTH}}  {plain(text)}".rstrip() for name, text in rows]
