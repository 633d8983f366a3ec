"""Boundaries of the target under the names that the baseline gives them.

    rename:
      - from: model.layers.*.self_attn
        to: decoder.layers.*.self_attention

In:  rules, and the run to be renamed.
Out: a `Run` that reads the same events under other names.

A rule renames the boundary and all that lie below it. A `*` stands for any text between two dots;
the n-th one of `to` is what the n-th one of `from` stood for. The first rule that fits is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from upguard_plugin.compare.rule_files import read_rules
from upguard_plugin.compare.run import Run, RunView
from upguard_plugin.errors import UsageError
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import EventBatch
from upguard_plugin.trace.step_table import StepTable

_OPTION = "--map"


@dataclass(frozen=True)
class RenameRule:
    """One line of a map."""

    old: str
    new: str

    def applied(self, boundary: str) -> str | None:
        """The new name, or None where the rule does not fit."""
        match = self._pattern.fullmatch(boundary)
        if match is None:
            return None
        *parts, below = match.groups(default="")
        pieces = self.new.split("*")
        text = "".join(piece + part for piece, part in zip(pieces, [*parts, ""], strict=False))
        return text + below

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        named = r"([^.]*)".join(re.escape(piece) for piece in self.old.split("*"))
        return re.compile(rf"{named}(\..*)?", re.DOTALL)


def read_rename_rules(path: Path) -> tuple[RenameRule, ...]:
    """Raises UsageError if the file does not hold such rules."""
    rules = []
    listed = read_rules(path, _OPTION, "rename", {"from": True, "to": True})
    for number, rule in enumerate(listed, 1):
        if len(rule["from"]) != 1 or len(rule["to"]) != 1:
            raise UsageError(f"cannot use {path} for {_OPTION}: rule {number} has several names")
        old, new = rule["from"][0], rule["to"][0]
        if new.count("*") != old.count("*"):
            raise UsageError(
                f"cannot use {path} for {_OPTION}: from and to of rule {number} do not have the "
                "same number of `*`"
            )
        rules.append(RenameRule(old, new))
    return tuple(rules)


class RenamedRun(RunView):
    """A run whose boundaries have other names."""

    def __init__(self, run: Run, rules: Sequence[RenameRule]) -> None:
        super().__init__(run)
        self._rules = tuple(rules)
        text = repr([(rule.old, rule.new) for rule in rules])
        self._salt = np.frombuffer(blake2b(text.encode(), digest_size=16).digest(), "<u8")
        # By identity: the reader gives all batches of a rank one table.
        self._tables: dict[int, tuple[Sequence[EventKey], tuple[EventKey, ...]]] = {}

    def steps(self, rank: int) -> StepTable:
        """Digests cover names: those of a renamed run equal no other's, and its steps are read."""
        table = StepTable.of(self._run.steps(rank))
        return replace(table, digest=table.digest ^ self._salt)

    def read(self, rank: int, step: int, *, verify: bool = False) -> EventBatch:
        """Raises UsageError if the rules give two boundaries one name."""
        batch = self._run.read(rank, step, verify=verify)
        return replace(batch, keys=self._renamed(batch.keys))

    def _renamed(self, keys: Sequence[EventKey]) -> tuple[EventKey, ...]:
        known = self._tables.get(id(keys))
        if known is not None and known[0] is keys and len(known[1]) == len(keys):
            return known[1]
        names = self._names(dict.fromkeys(key.boundary for key in keys))
        made = tuple(
            key if names[key.boundary] == key.boundary else replace(key, boundary=new)
            for key, new in ((key, names[key.boundary]) for key in keys)
        )
        self._tables[id(keys)] = (keys, made)
        return made

    def _names(self, boundaries: dict[str, None]) -> dict[str, str]:
        names: dict[str, str] = {}
        taken: dict[str, str] = {}
        for old in boundaries:
            found = (rule.applied(old) for rule in self._rules)
            new = next((name for name in found if name is not None), old)
            if taken.setdefault(new, old) != old:
                raise UsageError(
                    f"the rules of {_OPTION} give {taken[new]} and {old} one name, {new}"
                )
            names[old] = new
        return names
