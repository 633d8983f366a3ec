"""The parts that verdicts are made of: events, tensors, lines, and how two tensors differ."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from upguard_plugin.records import Stretch


class Model(BaseModel):
    """What all parts of a report have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Held(Model):
    """Elements of a flat buffer that are elements of a named tensor, in order."""

    start: int = Field(description="in the buffer")
    stop: int
    name: str
    offset: int = Field(description="element of that tensor which lies at `start`")

    @classmethod
    def of(cls, stretch: Stretch) -> Held:
        return cls(start=stretch.start, stop=stretch.stop, name=stretch.name, offset=stretch.offset)


class TensorSide(Model):
    """A tensor as one run saw it."""

    dtype: str
    shape: list[int] = Field(description="of the rank's tensor")
    fingerprint: str = Field(description="16 hexadecimal digits")
    value: float | None = Field(default=None, description="of a scalar, where it was kept")
    holds: list[Held] = Field(
        default_factory=list, description="of a collective's flat buffer, as far as is known"
    )


class EventRef(Model):
    """Names one event, by which it is found in the trace."""

    step: int
    rank: int
    microbatch: int | None
    phase: str
    boundary: str
    operator: str | None
    role: str
    slot: str
    call: int


class GroupRef(Model):
    """The process group of a collective. Its identity is its rank list."""

    name: str
    ranks: list[int]
    seq: int | None = Field(description="n-th collective of the group")


class Distance(Model):
    """How far apart the two tensors are, from their sketches."""

    relative_l2: float
    in_eps: float | None = Field(description="relative_l2 in epsilons of the dtype")
    estimated: bool
    factor: float | None = Field(
        default=None, description="the target is so many times the baseline, and nothing else"
    )


class SourceRef(Model):
    """A line of the user's code."""

    file: str
    line: int


class Change(Model):
    """What the runs compute in other ways between equal values and the first one that differs."""

    how: Literal["extra", "missing", "replaced", "reordered", "rewired"] = Field(
        description="of the target's operators; rewired: the same ones, another of whose results "
        "is taken"
    )
    baseline: list[EventRef] = Field(description="results of operators, in program order")
    target: list[EventRef]
    reached: EventRef = Field(description="the first event of both runs that differs")


class Specials(Model):
    """How many elements of a tensor are no ordinary number."""

    nan: int
    infinite: int
    negative_zero: int


class ElementDiff(Model):
    """How two tensors of one dtype and shape differ, element by element."""

    differing: int
    total: int
    pattern: str  # "one element", "row 3", "every 4th element from 1 to 61", ...
    first: list[list[int]]  # the first places that differ
    max_abs: float | None  # largest difference; None where no pair of finite numbers differs
    max_rel: float | None  # the same by the larger magnitude of the two
    ulps: dict[str, int]  # units of the last place ("1", "2", "3-4", ...) and how many
    baseline: Specials
    target: Specials
    of: list[Held] = Field(
        default_factory=list,
        description="of a flat buffer: whose elements differ, each from the first to the last",
    )
