"""Where an event stands in the pipeline: its chunk of layers, its stage, its call in a whole model.

In:  the events of one rank in a step, in program order.
Out: a `Place` for each: chunk before stage is the order in which one rank would have run them.

With virtual stages a rank holds several chunks, `model0`, `model1`, ...; each is entered by its own
inputs in forward and by its own gradients in backward, and what follows belongs to it. A module
that every chunk has, as the decoder, is called once for each of them: in a whole model once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from upguard_plugin.records import EventKey, Layout

_CHUNK = re.compile(r"model(\d+)")
_ROOT = "(root)"  # the name of a model that is the only one
_ENTRIES = ("input", "grad_output")
_BATCHES = ("data", "sample")
_END_OF = {"input": 0, "grad_input": 0, "output": 1, "grad_output": 1}  # first or last place


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a rank's part of the model lies in the whole."""

    chunk: int
    stage: int


class RankStages:
    """The places of one rank's events."""

    def __init__(self, layout: Layout) -> None:
        stage, chunks = layout.axis("pp"), layout.axis("vpp")
        self._stage = 0 if stage is None else stage.index
        self._is_chunked = chunks is not None and chunks.size > 1
        num_stages = 1 if stage is None else stage.size
        num_chunks = chunks.size if chunks is not None and self._is_chunked else 1
        self._ends = (Place(0, 0), Place(num_chunks - 1, num_stages - 1))
        self._here = Place(0, self._stage)  # without chunks
        self._chunk = 0
        self._first_calls: dict[tuple[str, int, int], int] = {}

    def place(self, key: EventKey, microbatch: int, call: int) -> tuple[Place, str, int]:
        """Place, boundary and call of an event, the latter two as in a whole model."""
        boundary = key.boundary
        if not self._is_chunked or microbatch < 0:
            return self._here, boundary, call
        if key.role in _BATCHES:
            return self._here, boundary, 0  # each chunk is given it
        chunk = _CHUNK.fullmatch(boundary)
        if chunk is not None:
            boundary = _ROOT
            if key.role in _ENTRIES:
                self._chunk = int(chunk[1])
        first = self._first_calls.setdefault((key.boundary, microbatch, self._chunk), call)
        return Place(self._chunk, self._stage), boundary, call - first

    def is_between(self, place: Place, boundary: str, role: str) -> bool:
        """Whether it is what one part of the model gives to the next: no end of the whole one."""
        end = _END_OF.get(role)
        return boundary == _ROOT and end is not None and place != self._ends[end]
