"""Events as `upguard show` prints them: a table, or one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from upguard_plugin.report.plain import plain
from upguard_plugin.verdict import SeenEvent

# Wide enough for most models; longer names push the rest of their line to the right.
_ROW = "{:>5} {:>4} {:>3} {:<10} {:<15} {:<40} {:<12} {:>4}  {:<10} {:<16} {:<16} {}"


def event_lines(events: Iterable[SeenEvent], form: str, *, verbose: bool = False) -> Iterator[str]:
    """form: "text" or "json". verbose: with operator, placement and source line."""
    if form == "json":
        for event in events:
            yield event.model_dump_json()
        return
    yield _ROW.format(
        "step", "rank", "mb", "phase", "role", "boundary", "slot", "call", "dtype", "shape",
        "fingerprint", "value",
    ).rstrip()  # fmt: skip
    for event in events:
        yield plain(_row(event, verbose))


def _row(event: SeenEvent, verbose: bool) -> str:
    more = [] if event.value is None else [repr(event.value)]
    if event.op is not None:
        group = "" if event.group is None else f" over {event.group.ranks}"
        more.append(f"{event.op}{group}")
    if event.moment is not None:
        more.append(f"at {event.moment}")
    if verbose:
        source = None if event.source is None else f"{event.source.file}:{event.source.line}"
        more += [text for text in (event.operator, event.placement, source) if text is not None]
    return _ROW.format(
        event.step,
        event.rank,
        "-" if event.microbatch is None else event.microbatch,
        event.phase,
        event.role,
        event.boundary,
        event.slot,
        event.call,
        event.dtype,
        str(event.shape),
        event.fingerprint,
        ", ".join(more),
    ).rstrip()
