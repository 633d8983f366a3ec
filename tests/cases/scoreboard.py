"""The scoreboard of the cases: `python -m tests.cases.scoreboard docs/cases.md` writes it.

A case is solved if every field of its answer is right, its clean twin is silent and, where the
target alone must break an invariant, `upguard check` names it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.cases.case import Case, all_equal, check_of, first_is, grade, grade_check, verdict_of
from tests.cases.recordings import Recordings, all_cases

HEAD = """# Cases

Public bug reports, each as a tiny training with a fault on and off. Written by `make cases`; the
recipes and the answers that are expected lie in `tests/cases/`. A case is solved if every field of
its answer is right and its clean twin (the same code, the fault off) is called identical.

- *check*: `upguard check` of the faulty run alone names the invariant that is broken, and breaks
  none in the twin.
- *one rank*: the same against a run of one rank, with the exact model (docs/exact.md); cases 11,
  25, 29 and 63 compare other layouts or micro-batches in the first place.
- *open*: what of the report's answer is not given.

Siblings of the cases, bugs of the same kinds in other places, lie in `tests/cases/siblings/`, the
exact model and pairs of all its layouts in `tests/tx/`.

Random search (`tests/cases/random_search.py`) plants faults whose answer is known by construction:
40 with every test run, 300 by `make cases-long`. Of those 300, 300 are named exactly and none is a
false alarm; the seeds are fixed, so that this is a statement about those 300.

No other tool takes part: DebugMode logs hashes and gives no verdict to grade, and msprobe is no
dependency of the tests.
"""
COLUMNS = (
    "step", "micro-batch", "boundary", "operator", "ranks", "kind", "other", "check", "one rank",
    "twin",
)  # fmt: skip
_COLUMN_OF = {"microbatch": "micro-batch", "phase": "step", "role": "boundary", "slot": "boundary"}


def score(case: Case, recordings: Recordings) -> dict[str, bool]:
    """Right or wrong for each column that the case asks for."""
    baseline, target = recordings.of(case, "baseline"), recordings.of(case, "target")
    twin = recordings.of(case, "twin")
    grades = grade(case, verdict_of(baseline, target, *case.options))
    if case.equal:
        grades["equal"] = all_equal(case, baseline, target)
    scores = _by_column(grades)
    clean = recordings.of(case, case.twin_of)
    scores["twin"] = verdict_of(clean, twin, *case.options)["verdict"] == "identical"
    if case.broken is not None or case.breaks_nothing:
        faulty, clean = (check_of(recordings.of(case, case.checked(v))) for v in ("target", "twin"))
        scores["check"] = all(grade_check(case, faulty).values()) and not clean["broken"]
    if case.whole is not None:
        whole = recordings.of(case, "whole")
        named = first_is(verdict_of(whole, target, "--exact"), case.whole)
        silent = verdict_of(whole, twin, "--exact")["verdict"] == "identical"
        scores["one rank"] = named and silent
    return scores


def _by_column(grades: Mapping[str, bool]) -> dict[str, bool]:
    scores: dict[str, bool] = {}
    for name, right in grades.items():
        column = _COLUMN_OF.get(name, name)
        column = column if column in COLUMNS else "other"
        scores[column] = scores.get(column, True) and right
    return scores


def row(case: Case, scores: Mapping[str, bool]) -> str:
    """One line of the table; a column that the case does not ask for stays empty."""
    words = {True: "right", False: "**wrong**", None: ""}
    solved = "yes" if all(scores.values()) else "**no**"
    cells = [words[scores.get(column)] for column in COLUMNS]
    row = [str(case.number), case.report, *cells, solved, case.waits]
    return f"| {' | '.join(row)} |"


def page(results: Mapping[int, tuple[Case, Mapping[str, bool]]]) -> str:
    """The whole document."""
    solved = sum(all(scores.values()) for _, scores in results.values())
    silent = sum(scores["twin"] for _, scores in results.values())
    num_open = sum(bool(case.waits) for case, _ in results.values())
    titles = ["case", "report", *COLUMNS, "solved", "open"]
    return "\n".join(
        [
            HEAD,
            f"{solved} of {len(results)} cases solved, {silent} clean twins silent; "
            f"{num_open} rows leave something open.\n",
            f"| {' | '.join(titles)} |",
            f"|{' --- |' * len(titles)}",
            *(row(*result) for result in results.values()),
            "",
        ]
    )


def main(output: str) -> None:
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder, Recordings(Path(folder)) as recordings:
        for case in all_cases():
            results[case.number] = (case, score(case, recordings))
    Path(output).write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main(sys.argv[1])
