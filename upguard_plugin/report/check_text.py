"""The report of `upguard check` as text: the answer first, then what broke, then what was checked.

In:  a `CheckReport`.
Out: plain text, which reads the same on a terminal and in a log file.
"""

from __future__ import annotations

from collections.abc import Sequence

from upguard_plugin.check_report import Broken, CheckReport
from upguard_plugin.report.places import when, where
from upguard_plugin.report.plain import plain

MAX_LISTED = 5  # breaks, suspects and notes; --verbose prints them all
MAX_NAMED = 3  # invariants that were never applied for one reason
_WIDTH = 9


def check_text(report: CheckReport, *, verbose: bool = False) -> str:
    """The whole report. verbose: everything that broke, every suspect, every note and reason."""
    lines = [headline(report)]
    if report.broken:
        lines += _rows(_broken_rows(report.broken[0]), indent=4)
    lines += _rows(_ending_rows(report, verbose), indent=2)
    return "\n".join(lines)


def headline(report: CheckReport) -> str:
    """The answer in one line."""
    if report.broken:
        first = report.broken[0]
        return f"BROKEN at {when(first)}: {first.invariant}"
    if report.answer == "undecided":
        return f"UNDECIDED: {report.notes[0]}"
    return f"UNBROKEN: {sum(report.checked.values())} checks of {_counted(report)}"


def _counted(report: CheckReport) -> str:
    coverage = report.coverage
    steps = "1 step" if coverage.steps == 1 else f"{coverage.steps} steps"
    ranks = "1 rank" if coverage.ranks == 1 else f"{coverage.ranks} ranks"
    return f"{coverage.events} events, {steps} of {ranks}"


def _broken_rows(found: Broken) -> list[tuple[str, str]]:
    moment = "" if found.moment is None else f" at {found.moment}"
    rows = [
        ("boundary", where(found)),
        ("tensor", f"{found.role} {found.slot}{moment}"),
        ("ranks", ", ".join(map(str, found.ranks))),
        ("why", found.explanation),
    ]
    if found.group is not None:
        members = ", ".join(map(str, found.group.ranks))
        number = "" if found.group.seq is None else f", collective {found.group.seq} of it"
        rows.append(("group", f"{found.group.name} (ranks {members}){number}"))
    rows += [
        (f"rank {tensor.rank}", f"{tensor.fingerprint} {tensor.dtype} {tensor.shape}")
        for tensor in found.tensors
    ]
    if found.producer is not None:
        producer = found.producer
        rows.append(("producer", f"{producer.boundary} {producer.role} {producer.slot}"))
    if found.source is not None:
        rows.append(("source", f"{found.source.file}:{found.source.line}"))
    return rows


def _ending_rows(report: CheckReport, verbose: bool) -> list[tuple[str, str]]:
    rows = _listed("also", [_line(found) for found in report.broken[1:]], verbose)
    rows += _listed("suspect", [found.explanation for found in report.suspects], verbose)
    checked = ", ".join(f"{count} {name}" for name, count in report.checked.items())
    rows.append(("checked", checked or "nothing"))
    rows += _never_rows(report, verbose)
    reasons = [
        f"{name}: {reason} ({count} times)"
        for name, counts in report.not_applied.items()
        for reason, count in counts.items()
    ]
    if verbose:
        rows += [("skipped", reason) for reason in reasons]
    elif reasons:
        count = sum(sum(counts.values()) for counts in report.not_applied.values())
        rows.append(("skipped", f"{count} checks that could not be made (--verbose: why)"))
    notes = report.notes[1:] if report.answer == "undecided" else report.notes
    return rows + _listed("note", notes, verbose)


def _never_rows(report: CheckReport, verbose: bool) -> list[tuple[str, str]]:
    """A line for each reason; a few names are told, many are counted."""
    rows: list[tuple[str, str]] = []
    for reason, names in report.why_never.items():
        listed = ", ".join(names)
        if len(names) > MAX_NAMED and not verbose:
            listed = f"{len(names)} invariants (--verbose: which)"
        rows.append(("" if rows else "never", f"{listed}: {reason}"))
    return rows


def _line(found: Broken) -> str:
    ranks = ", ".join(map(str, found.ranks))
    return (
        f"{when(found)}: {found.boundary} {found.role} {found.slot} "
        f"({found.invariant}, {'rank' if len(found.ranks) == 1 else 'ranks'} {ranks})"
    )


def _listed(name: str, texts: Sequence[str], verbose: bool) -> list[tuple[str, str]]:
    shown = texts if verbose else texts[:MAX_LISTED]
    rows = [(name if place == 0 else "", text) for place, text in enumerate(shown)]
    if len(shown) < len(texts):
        rows.append(("", f"and {len(texts) - len(shown)} more (--verbose)"))
    return rows


def _rows(rows: Sequence[tuple[str, str]], indent: int) -> list[str]:
    return [f"{' ' * indent}{name:<{_WIDTH}}  {plain(text)}".rstrip() for name, text in rows]
