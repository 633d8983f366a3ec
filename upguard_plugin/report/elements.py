"""Element-wise differences of whole tensors, as `upguard show --diff` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from upguard_plugin.report.plain import plain
from upguard_plugin.verdict import SeenDiff, SeenEvent
from upguard_plugin.verdict_parts import ElementDiff, Specials

_WIDTH = 9


def diff_lines(pairs: Iterable[SeenDiff], form: str, limit: int | None) -> Iterator[str]:
    """form: "text" or "json". limit: print so many pairs at most."""
    for pair in islice(pairs, limit):
        if form == "json":
            yield pair.model_dump_json()
        else:
            yield from _pair_lines(pair)


def _pair_lines(pair: SeenDiff) -> Iterator[str]:
    event, diff = pair.event, pair.elements
    yield plain(_headline(event))
    rows = [("tensor", f"{event.role} {event.slot}, {event.dtype} {event.shape}")]
    if diff is None:
        rows.append(("target", f"has another form: {pair.target_form}"))
    elif not diff.differing:
        rows.append(("elements", f"all {diff.total} are equal, bit by bit"))
    else:
        rows += _diff_rows(diff)
    for name, text in rows:
        yield f"    {name:<{_WIDTH}}  {plain(text)}"


def _headline(event: SeenEvent) -> str:
    microbatch = "" if event.microbatch is None else f", micro-batch {event.microbatch}"
    operator = "" if event.operator is None else f", operator {event.operator}"
    moment = "" if event.moment is None else f", {event.moment}"
    return (
        f"step {event.step}{microbatch}, rank {event.rank}, {event.phase}: {event.boundary}"
        f"{operator}, call {event.call}{moment}"
    )


def _diff_rows(diff: ElementDiff) -> list[tuple[str, str]]:
    places = ", ".join(str(place) for place in diff.first)
    more = ", ..." if len(diff.first) < diff.differing else ""
    rows = [
        ("elements", f"{diff.differing} of {diff.total} differ"),
        ("pattern", diff.pattern),
        ("first", places + more),
    ]
    if diff.max_abs is not None:
        rows.append(("largest", f"{diff.max_abs:.6g} absolute, {diff.max_rel:.6g} relative"))
    if diff.ulps:
        classes = ", ".join(f"{name}: {count}" for name, count in diff.ulps.items())
        rows.append(("ulps", classes))
    for name, specials in (("baseline", diff.baseline), ("target", diff.target)):
        rows.append((name, _specials(specials)))
    return rows


def _specials(specials: Specials) -> str:
    return f"{specials.nan} NaN, {specials.infinite} infinite, {specials.negative_zero} -0"
