"""The verdict as it leaves the house: schema `upguard.verdict/1`, and one event as `show` gives it.

In:  what compare found, as plain values.
Out: `Verdict.model_dump_json(by_alias=True)`; `python -m upguard_plugin.verdict` prints its JSON
     schema, which is kept in docs/verdict.schema.json.

It sits beside records.py: compare fills these models, report prints them, and neither knows the
other. Loading pydantic takes 0.15 s, so nothing imports this file before a verdict is due.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from upguard_plugin.errors import EXIT_DIVERGENT, EXIT_IDENTICAL, EXIT_INCOMPARABLE
from upguard_plugin.records import Layout
from upguard_plugin.verdict_parts import (
    Change,
    Distance,
    ElementDiff,
    EventRef,
    GroupRef,
    Model,
    SourceRef,
    TensorSide,
)

Word = Literal["identical", "divergent", "incomparable"]
Kind = Literal[
    "data",
    "rng",
    "init",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "structure",
    "nondeterminism",
]

EXIT_CODES: dict[Word, int] = {
    "identical": EXIT_IDENTICAL,
    "divergent": EXIT_DIVERGENT,
    "incomparable": EXIT_INCOMPARABLE,
}


class Report(Model):
    """What a verb answers, with names that are no names in Python."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """Indented JSON, as `--format json` prints it."""
        return self.model_dump_json(by_alias=True, indent=2)


class RunSide(Model):
    """A run that a report is about."""

    path: str
    run_id: str
    layout: dict[str, int] = Field(description="sizes of the parallel axes, world_size first")

    @classmethod
    def of(cls, path: Path, run_id: str, world_size: int, layout: Layout) -> RunSide:
        """layout: of one of its ranks."""
        sizes = {"world_size": world_size} | {axis.name: axis.size for axis in layout.axes}
        if layout.zero_stage is not None:
            sizes["zero_stage"] = layout.zero_stage
        return cls(path=str(path), run_id=run_id, layout=sizes)


class Divergence(Model):
    """A boundary where the runs differ although everything before it is equal."""

    step: int
    microbatch: int | None
    phase: str
    kind: Kind
    boundary: str
    operator: str | None
    role: str
    slot: str
    call: int
    ranks: list[int] = Field(description="ranks where this boundary differs first")
    iteration: int | None
    moment: str | None
    inputs_equal: bool | None = Field(description="null: its inputs were not recorded")
    group: GroupRef | None
    baseline: TensorSide | None = Field(description="null: the baseline has no such event")
    target: TensorSide | None = Field(description="null: the target has no such event")
    distance: Distance | None
    elements: ElementDiff | None = Field(
        default=None, description="element by element, where both runs kept the tensor whole"
    )
    producer: EventRef | None = Field(description="the event that wrote this storage last")
    source: SourceRef | None
    change: Change | None = Field(
        default=None, description="operators without a partner that made it; level op only"
    )
    explanation: str = Field(description="one sentence")


class Reached(Model):
    """A boundary that the difference reached, as the baseline has it."""

    microbatch: int | None
    phase: str
    boundary: str
    operator: str | None
    role: str
    slot: str
    call: int
    distance: Distance | None = Field(description="null: no sketches were recorded")
    inputs_equal: bool = Field(
        default=False,
        description="an operator of torch's whose inputs are all equal: perhaps another origin",
    )


class Spread(Model):
    """How the difference spread on one rank, inside of its first divergent step."""

    rank: int
    step: int
    boundaries: list[Reached] = Field(
        description="the first divergence, then what differs behind it; each value once"
    )


class Tainted(Model):
    """The region in which sums were taken in another order. Set across layouts only."""

    origin: EventRef = Field(alias="from")
    boundaries: int = Field(
        description="events in it, before any divergence, that are unequal by rounding"
    )
    largest_in_eps: float = Field(
        description="of these; epsilons of the coarsest dtype that their values went through"
    )

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class LeftOutBoundary(Model):
    """A boundary of which events were not compared."""

    boundary: str
    role: str
    largest_in_eps: float | None = Field(
        description="how far apart the runs are, estimated, in epsilons of its dtype; null: no "
        "sketches that can be compared"
    )


class LeftOutEvents(Model):
    """What was not compared for one reason. Across layouts only."""

    reason: str
    events: int
    boundaries: list[LeftOutBoundary]


class Certified(Model):
    """Everything before the first divergence, all bit-equal."""

    events: int
    last: EventRef | None


class Coverage(Model):
    """What was and was not compared, in events of all ranks.

    Behind a rank's first divergent step nothing is compared.
    """

    ranks: int = Field(description="ranks that were compared")
    compared: int = Field(description="pairs of events that were compared, equal or not")
    differ: int = Field(description="pairs among them that differ: a divergence and what it led to")
    unmatched_baseline: int
    unmatched_target: int
    not_comparable: int
    tainted: int = Field(
        default=0, description="pairs before any divergence that are unequal by rounding"
    )
    filtered: int = Field(description="events that nobody asked for, or that rules ignore")
    ignored: int = Field(default=0, description="of these, events that rules ignore")
    noise: int = Field(description="events at boundaries that differ in a repeat of the baseline")
    never_fired: int = Field(
        description="probes and settings that saw no tensor on any rank, as the runs noted them"
    )


class Verdict(Report):
    """The answer to `upguard compare BASELINE TARGET`."""

    schema_: Literal["upguard.verdict/1"] = Field(default="upguard.verdict/1", alias="schema")
    verdict: Word
    baseline: RunSide
    target: RunSide
    first_divergence: Divergence | None
    concurrent: list[Divergence] = Field(description="further minimal divergences")
    tainted: Tainted | None
    per_rank: list[Divergence] = Field(description="the first divergence of each rank")
    spread: list[Spread] = Field(
        default_factory=list, description="one per rank that differs, in the order of the step"
    )
    certified: Certified
    coverage: Coverage
    left_out: list[LeftOutEvents] = Field(
        default_factory=list, description="of what is not comparable across layouts, by reason"
    )
    notes: list[str] = Field(description="of an incomparable verdict, the first is the reason")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


class SeenEvent(Model):
    """One event as `upguard show` prints it."""

    step: int
    iteration: int | None
    rank: int
    microbatch: int | None
    phase: str
    seq: int
    boundary: str
    operator: str | None
    role: str
    slot: str
    moment: str | None
    call: int
    dtype: str
    shape: list[int]
    placement: str | None
    fingerprint: str
    value: float | None
    group: GroupRef | None
    op: str | None
    source: SourceRef | None


class SeenDiff(Model):
    """One event of both runs whose tensors were kept, as `upguard show --diff` prints it."""

    event: SeenEvent  # the baseline's
    target_fingerprint: str
    target_form: str | None  # dtype and shape in the target, where they are others
    elements: ElementDiff | None  # None where the forms differ


def json_schema() -> str:
    """The JSON schema of `Verdict`, as docs/verdict.schema.json holds it."""
    schema = Verdict.model_json_schema(by_alias=True, mode="serialization")
    return json.dumps({"$id": "upguard.verdict/1", **schema}, indent=2)


if __name__ == "__main__":
    print(json_schema())
