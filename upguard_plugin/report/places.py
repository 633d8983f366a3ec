"""Where something was found, in the words that all reports share."""

from __future__ import annotations

from typing import Protocol


class Found(Protocol):
    """A divergence, or something that broke."""

    @property
    def step(self) -> int: ...
    @property
    def iteration(self) -> int | None: ...
    @property
    def microbatch(self) -> int | None: ...
    @property
    def phase(self) -> str: ...
    @property
    def boundary(self) -> str: ...
    @property
    def operator(self) -> str | None: ...
    @property
    def call(self) -> int: ...


def when(found: Found) -> str:
    """Step, micro-batch and phase."""
    parts = [f"step {found.step}"]
    if found.iteration is not None and found.iteration != found.step:
        parts[0] += f" (iteration {found.iteration})"
    if found.microbatch is not None:
        parts.append(f"micro-batch {found.microbatch}")
    return ", ".join([*parts, found.phase])


def where(found: Found) -> str:
    """Boundary, operator and call."""
    boundary = found.boundary
    if found.operator is not None:
        boundary += f", operator {found.operator}"
    if found.call:
        boundary += f", call {found.call}"
    return boundary
