"""Which steps, ranks, boundaries and roles a command looks at.

In:  the texts of --steps, --ranks, --modules, --roles, --phase.
Out: a `Selection` that answers for numbers and for event keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.ignoring import IgnoreRule, pattern_of
from upguard_plugin.errors import UsageError
from upguard_plugin.records import PHASES, ROLES, EventKey


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers such as `0,2-5,8-`."""

    text: str
    ranges: tuple[tuple[int, int | None], ...]  # first and last, both included; None: no end

    @classmethod
    def parse(cls, text: str, option: str) -> Numbers:
        """Raises UsageError if the text is no list of numbers and ranges."""
        ranges = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,12})\s*(?:(-)\s*(\d{1,12})?\s*)?", part)
            if match is None:
                raise _not_a_list(option, text, part)
            first, dash, last = match.groups()
            end = int(last) if last else (None if dash else int(first))
            if end is not None and end < int(first):
                raise _not_a_list(option, text, part)
            ranges.append((int(first), end))
        return cls(text, tuple(ranges))

    def __contains__(self, number: int) -> bool:
        return any(
            first <= number and (last is None or number <= last) for first, last in self.ranges
        )

    def holds(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """One answer per number."""
        found = np.zeros(len(numbers), dtype=np.bool_)
        for first, last in self.ranges:
            found |= (numbers >= first) & (True if last is None else numbers <= last)
        return found

    def without(self, found: Collection[int]) -> Iterator[int]:
        """The numbers that are certainly meant and not found, in order, each once.

        Of a range without an end its first number is meant. They may be very many.
        """
        following = 0
        for first, last in sorted(self.ranges, key=lambda pair: pair[0]):
            end = (first if last is None else last) + 1
            yield from (n for n in range(max(first, following), end) if n not in found)
            following = max(following, end)


def _not_a_list(option: str, text: str, part: str) -> UsageError:
    return UsageError(
        f"{option} {text!r} is not a list of numbers and ranges",
        evidence={"part": repr(part.strip())},
        remedy=f"write it like this: {option} 0,2-5,8-",
    )


@dataclass(frozen=True)
class Selection:
    """What a command looks at; None means everything."""

    steps: Numbers | None = None
    ranks: Numbers | None = None
    modules: tuple[str, ...] = ()  # globs; a boundary below a match matches too
    roles: frozenset[str] = frozenset()
    phases: frozenset[str] = frozenset()
    ignore: tuple[IgnoreRule, ...] = ()  # events that are left out

    @classmethod
    def parse(
        cls,
        *,
        steps: str | None = None,
        ranks: str | None = None,
        modules: str | None = None,
        roles: str | None = None,
        phase: str | None = None,
    ) -> Selection:
        """From the texts of the command line. Raises UsageError for what is no such list."""
        return cls(
            None if steps is None else Numbers.parse(steps, "--steps"),
            None if ranks is None else Numbers.parse(ranks, "--ranks"),
            tuple(glob.strip() for glob in (modules or "").split(",") if glob.strip()),
            _words(roles, ROLES, "--roles"),
            _words(phase, PHASES, "--phase"),
        )

    def has_step(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def has_steps(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """One answer per step."""
        if self.steps is None:
            return np.ones(len(steps), dtype=np.bool_)
        return self.steps.holds(steps)

    def has_rank(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    @property
    def all_events(self) -> bool:
        """Whether every event of a chosen step and rank is looked at."""
        return not (self.modules or self.roles or self.phases or self.ignore)

    def has_key(self, key: EventKey) -> bool:
        if self.roles and key.role not in self.roles:
            return False
        if self.phases and key.phase not in self.phases:
            return False
        if self._pattern is not None and self._pattern.match(key.boundary) is None:
            return False
        return self._rule_of(key) < 0

    def has_keys(self, keys: Sequence[EventKey]) -> npt.NDArray[np.bool_]:
        """One answer per key."""
        if self.all_events:
            return np.ones(len(keys), dtype=np.bool_)
        return np.fromiter((self.has_key(key) for key in keys), dtype=np.bool_, count=len(keys))

    def rules_of(self, keys: Sequence[EventKey]) -> npt.NDArray[np.int64]:
        """Per key, the place in `ignore` of the rule that leaves it out, or -1."""
        return np.fromiter(map(self._rule_of, keys), dtype=np.int64, count=len(keys))

    def _rule_of(self, key: EventKey) -> int:
        return next((place for place, rule in enumerate(self.ignore) if rule.matches(key)), -1)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self.modules:
            return None
        return pattern_of(self.modules)


def _words(text: str | None, known: tuple[str, ...], option: str) -> frozenset[str]:
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            raise UsageError(
                f"{option} does not know {word!r}",
                evidence={"known": ", ".join(known)},
                remedy=f"{option} {near[0]}" if near else "name one of these",
            )
    return frozenset(words)
