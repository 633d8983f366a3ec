"""The report of `upguard check` as it leaves the house: schema `upguard.check/1`.

In:  what the invariants found, as plain values.
Out: `CheckReport.to_json()`; `python -m upguard_plugin.check_report` prints its JSON schema, which
     is kept in docs/check.schema.json.

It sits beside verdict.py, whose small models it shares.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from upguard_plugin.errors import EXIT_DIVERGENT, EXIT_IDENTICAL, EXIT_INCOMPARABLE
from upguard_plugin.verdict import Report, RunSide
from upguard_plugin.verdict_parts import EventRef, GroupRef, Model, SourceRef

Answer = Literal["unbroken", "broken", "undecided"]

EXIT_CODES: dict[Answer, int] = {
    "unbroken": EXIT_IDENTICAL,
    "broken": EXIT_DIVERGENT,
    "undecided": EXIT_INCOMPARABLE,
}


class RankTensor(Model):
    """A tensor as one rank saw it."""

    rank: int
    dtype: str
    shape: list[int] = Field(description="of the rank's tensor")
    fingerprint: str = Field(description="16 hexadecimal digits")


class Broken(Model):
    """The first place where an invariant does not hold, for each boundary, role and slot."""

    invariant: str
    step: int
    microbatch: int | None
    phase: str
    boundary: str
    operator: str | None
    role: str
    slot: str
    call: int
    ranks: list[int] = Field(description="ranks that are wrong; all involved where none is more so")
    iteration: int | None
    moment: str | None
    group: GroupRef | None
    tensors: list[RankTensor] = Field(description="what shows it, by rank")
    producer: EventRef | None = Field(description="the event whose value it should have")
    source: SourceRef | None
    explanation: str = Field(description="one sentence")
    later: int = Field(description="how often it broke again at this boundary, role and slot")


class Checked(Model):
    """What was looked at, of all ranks."""

    ranks: int
    steps: int
    events: int


class CheckReport(Report):
    """The answer to `upguard check RUN`."""

    schema_: Literal["upguard.check/1"] = Field(default="upguard.check/1", alias="schema")
    answer: Answer = Field(description="undecided: nothing is broken, but not all could be checked")
    run: RunSide
    broken: list[Broken] = Field(description="in the order in which they happened")
    checked: dict[str, int] = Field(description="invariant -> how often it was applied")
    never_applied: list[str] = Field(description="invariants that had nothing to check")
    why_never: dict[str, list[str]] = Field(
        description="reason -> those of `never_applied` that it holds for"
    )
    not_applied: dict[str, dict[str, int]] = Field(
        description="invariant -> why it could not be applied -> how often"
    )
    suspects: list[Broken] = Field(description="guesses, which break nothing")
    coverage: Checked
    notes: list[str] = Field(description="of an undecided report, the first is the reason")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]


def json_schema() -> str:
    """The JSON schema of `CheckReport`, as docs/check.schema.json holds it."""
    schema = CheckReport.model_json_schema(by_alias=True, mode="serialization")
    return json.dumps({"$id": "upguard.check/1", **schema}, indent=2)


if __name__ == "__main__":
    print(json_schema())
