"""The scoreboard of the cases: `python -m tests.cases.scoreboard docs/cases.md` writes it.

A case is solved if every field of its answer is right, its clean twin is silent and, where the
target alone must break an invariant, `upguard check` names it. With --peers the answers of other
tools are asked too, with --search FILE the result of a random search is put in; else those
sections stay as they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.cases import peers
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
- *other*: everything else that the answer has: elements, contents of a buffer, values that must be
  equal, the explanation, what differs beside it.

Of the answers in words two sizes are not asked: by how much r1's partial sum is too large in case
25 (a run of one rank has no partial sums), and that the output in case 29 is too large by one bias
(fingerprints do not subtract). Case 51 steps its schedule twice behind the update, because its
answer says that the first step is equal; cases 15 and 19 resume inside of one process.

Siblings of the cases, bugs of the same kinds in other places, lie in `tests/cases/siblings/`, the
exact model and pairs of all its layouts in `tests/tx/`.
"""
COLUMNS = (
    "step", "micro-batch", "boundary", "operator", "ranks", "kind", "other", "check", "one rank",
    "twin",
)  # fmt: skip
SEARCH = "Random search"
SEARCH_TEXT = """`tests/cases/random_search.py` plants faults whose answer is known by construction:
families of faults in all layouts of two ranks, at places, moments and ranks that are drawn, with
corruptions of one bit, several bits, a stripe or a finite change. 40 with every test run, 300 by
`make cases-long`, which writes this section; every miss is listed. "timing" are runs without a
fault in other memory: whatever is said of them is a false alarm.
"""
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


def search_section(trials: Sequence[Mapping[str, Any]]) -> str:
    """trials: what `tests/cases/test_random_search.py` writes: layout, family, exact, story."""
    counts = Counter((trial["layout"], trial["family"]) for trial in trials)
    exact = Counter((t["layout"], t["family"]) for t in trials if t["exact"])
    layouts = list(dict.fromkeys(trial["layout"] for trial in trials))
    rows = []
    for family in dict.fromkeys(trial["family"] for trial in trials):
        pairs = [(layout, family) for layout in layouts]
        cells = [f"{exact[p]} of {counts[p]}" if counts[p] else "" for p in pairs]
        rows.append(f"| {' | '.join([family, *cells])} |")
    misses = [f"- {trial['story']}" for trial in trials if not trial["exact"]]
    alarms = sum(t["family"] == "timing" and not t["exact"] for t in trials)
    said = (
        f"Of {len(trials)} trials {exact.total()} are named exactly, {alarms} are false alarms; "
        "the seeds are fixed, so that this is a statement about those."
    )
    head = [f"| {' | '.join(['family', *layouts])} |", f"|{' --- |' * (len(layouts) + 1)}"]
    return "\n".join([f"## {SEARCH}\n", SEARCH_TEXT, said, "", *head, *rows, "", *misses, ""])


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
    row = [str(case.number), case.report, *cells, solved]
    return f"| {' | '.join(row)} |"


def page(results: Mapping[int, tuple[Case, Mapping[str, bool]]]) -> str:
    """The document as far as the cases go."""
    solved = sum(all(scores.values()) for _, scores in results.values())
    silent = sum(scores["twin"] for _, scores in results.values())
    titles = ["case", "report", *COLUMNS, "solved"]
    return "\n".join(
        [
            HEAD,
            f"{solved} of {len(results)} cases solved, {silent} clean twins silent.\n",
            f"| {' | '.join(titles)} |",
            f"|{' --- |' * len(titles)}",
            *(row(*result) for result in results.values()),
            "",
        ]
    )


def kept(document: str, title: str) -> str:
    """A section of the document as it is."""
    found = [part for part in document.split("\n## ") if part.startswith(f"{title}\n")]
    return f"## {found[0].rstrip()}\n" if found else ""


def main(output: Path, search: Path | None, asks_peers: bool) -> None:
    torch.set_num_threads(1)
    old = output.read_text()
    results, answers = {}, {}
    with tempfile.TemporaryDirectory() as folder, Recordings(Path(folder)) as recordings:
        for case in all_cases():
            results[case.number] = (case, score(case, recordings))
        for case in all_cases() if asks_peers else ():
            if case.baseline_ranks is None:
                answers[case.number] = peers.answers_of(case, recordings)
    searched = (
        kept(old, SEARCH) if search is None else search_section(json.loads(search.read_text()))
    )
    asked = peers.section(answers) if asks_peers else kept(old, "What DebugMode says")
    text = "\n".join(part for part in (page(results), searched, asked) if part)
    output.write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--search", type=Path)
    parser.add_argument("--peers", action="store_true")
    given = parser.parse_args()
    main(given.output, given.search, given.peers)
