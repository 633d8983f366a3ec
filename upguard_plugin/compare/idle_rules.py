"""Rules and globs of the command line that name nothing in the runs: most often a slip.

In:  the runs, and what --steps, --ranks, --modules, --ignore and --map say.
Out: one sentence for each that names no boundary; where one run was asked for nothing that it has,
     an error.

The key table of a rank names all that it recorded, so one step of it is read. Of large runs some
ranks are looked at, evenly spread, and the sentence says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from upguard_plugin.compare.ignoring import IgnoreRule, pattern_of
from upguard_plugin.compare.renaming import RenamedRun, RenameRule
from upguard_plugin.compare.run import Run
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import UpGuardError, UsageError
from upguard_plugin.records import EventKey

MAX_RANKS = 64  # of each run
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule, and which keys it is about."""

    text: str
    matches: Callable[[EventKey], bool]


def idle_rules(
    baseline: Run, target: Run, selection: Selection, renames: Sequence[RenameRule]
) -> list[str]:
    """Which rules name nothing. target: as it was recorded, without other names.

    Raises TraceError for damaged files, UsageError if the rules give two boundaries one name.
    """
    waiting = [_module_glob(glob) for glob in selection.modules]
    waiting += [part for rule in selection.ignore for part in _ignore_globs(rule)]
    renamed = RenamedRun(target, renames) if renames else target
    idle = _without_match(waiting, (baseline, renamed), selection)
    sentences = [f"{rule.text} names no boundary of either run" for rule in idle]
    idle = _without_match([_rename(rule) for rule in renames], (target,), selection)
    sentences += [f"{rule.text} names no boundary of the target" for rule in idle]
    looked = f" (looked at {MAX_RANKS} ranks of each)"
    is_large = max(len(run.listed_ranks) for run in (baseline, target)) > MAX_RANKS
    return [sentence + looked if is_large else sentence for sentence in sentences]


def refuse_absent(run: Run, selection: Selection, error: type[UpGuardError] = UsageError) -> None:
    """Raises an error of this kind for ranks, steps or boundaries of which the run has none."""
    steps: set[int] = set()
    if selection.steps is not None:
        steps = {entry.step for rank in run.ranks for entry in run.steps(rank)}
    for option, numbers, known in (
        ("--ranks", selection.ranks, set(run.ranks)),
        ("--steps", selection.steps, steps),
    ):
        if numbers is not None and not any(number in numbers for number in known):
            recorded = f"{min(known)} to {max(known)}" if known else "nothing"
            raise _absent(error, run, option, numbers.text, recorded)
    globs = [_module_glob(glob) for glob in selection.modules]
    if globs and len(_without_match(globs, (run,), selection)) == len(globs):
        tables = _key_tables(run, selection)
        names = sorted({key.boundary for key in next(tables, ())})
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        recorded = f"{', '.join(names[:_MAX_LISTED]) or 'nothing'}{more}"
        raise _absent(error, run, "--modules", ",".join(selection.modules), recorded)


def _absent(
    error: type[UpGuardError], run: Run, option: str, asked: str, recorded: str
) -> UpGuardError:
    return error(
        f"{run.path} has nothing of {option} {asked}",
        evidence={"recorded": recorded},
        remedy=f"name recorded ones with {option}",
    )


def _module_glob(glob: str) -> _Rule:
    pattern = pattern_of((glob,))
    return _Rule(f"--modules {glob}", lambda key: pattern.match(key.boundary) is not None)


def _ignore_globs(rule: IgnoreRule) -> Iterator[_Rule]:
    for glob in rule.boundaries:
        one = replace(rule, boundaries=(glob,))
        yield _Rule(f"--ignore: {one.text}", one.matches)


def _rename(rule: RenameRule) -> _Rule:
    return _Rule(f"--map: {rule.old}", lambda key: rule.applied(key.boundary) is not None)


def _without_match(
    rules: Sequence[_Rule], runs: Sequence[Run], selection: Selection
) -> Sequence[_Rule]:
    waiting = rules
    for run in runs:
        for keys in _key_tables(run, selection) if waiting else ():
            waiting = [rule for rule in waiting if not any(map(rule.matches, keys))]
            if not waiting:
                break
    return waiting


def _key_tables(run: Run, selection: Selection) -> Iterator[Sequence[EventKey]]:
    """What the ranks recorded; a table that several ranks share, once."""
    listed = [rank for rank in run.listed_ranks if selection.has_rank(rank)]
    known: set[int] = set()
    for rank in listed[:: -(-len(listed) // MAX_RANKS) or 1]:
        steps = run.steps(rank) if run.has_trace(rank) else ()
        if len(steps):
            keys = run.read(rank, steps[0].step).keys
            if id(keys) not in known:
                known.add(id(keys))
                yield keys
