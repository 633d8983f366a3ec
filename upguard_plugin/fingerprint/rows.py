"""Tables of sweeps for the CPU kernels, and the memory that they write to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from upguard_plugin.fingerprint.cpu import SWEEP_COLUMNS, TILE_COLUMN
from upguard_plugin.fingerprint.elements import reading
from upguard_plugin.fingerprint.measure import NOT_MEASURED
from upguard_plugin.fingerprint.parts import Part
from upguard_plugin.fingerprint.sweeps import Sweep, plan_sweeps
from upguard_plugin.records import Placement

Planned = tuple[Part, Tensor, tuple[Sweep, ...]]  # a part, the memory to sweep, and how

MAX_PLANS = 4096
NO_TILE = [0, 0, 0, 0]
SCRATCH_BYTES = 1 << 26  # larger copies get memory of their own


class Plans:
    """Sweeps of placed or strided tensors, kept while the same shapes return step by step."""

    def __init__(self) -> None:
        self._kept: dict[tuple, tuple[Placement | None, tuple[Sweep, ...] | None]] = {}
        self._scratch: Tensor | None = None

    def plan_all(self, parts: Sequence[Part], *, tiles: bool = False) -> list[Planned]:
        """Plan the parts of one tensor; what is planned is to be swept before the next call."""
        return [self.plan(part, alone=len(parts) == 1, tiles=tiles) for part in parts]

    def plan(self, part: Part, *, alone: bool = False, tiles: bool = False) -> Planned:
        """Plan a part; where no sweep fits its strides, a contiguous copy of it is swept.

        alone: the copy may be made in memory that the next call uses again.
        tiles: transposed storage may be swept in tiles.
        """
        tensor, placement = part.tensor, part.placement
        on_cpu = tensor.is_cpu
        tiles = tiles and on_cpu
        key = (id(placement), tensor.shape, tensor.stride(), tensor.itemsize, on_cpu, tiles)
        found = self._kept.get(key)
        if found is None:
            sweeps = plan_sweeps(
                tensor.shape, tensor.stride(), tensor.itemsize, placement,
                any_run=not on_cpu, tiles=tiles,
            )  # fmt: skip
            if len(self._kept) >= MAX_PLANS:
                self._kept.clear()
            # The placement is kept with its plan: while the plan is here, its id stays its own.
            found = self._kept[key] = (placement, sweeps)
        if found[1] is not None:
            return part, tensor, found[1]
        contiguous = self._copied(tensor) if alone and on_cpu else tensor.contiguous()
        _, copy, sweeps = self.plan(Part(contiguous, placement=placement))
        return part, copy, sweeps

    def _copied(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in memory that is kept: fresh memory costs more than the copying."""
        num_bytes = tensor.nbytes
        if num_bytes > SCRATCH_BYTES:
            return tensor.contiguous()
        if self._scratch is None or self._scratch.nbytes < num_bytes:
            with torch.inference_mode(False):
                self._scratch = torch.empty(2 * num_bytes, dtype=torch.uint8, device="cpu")
        copy = self._scratch[:num_bytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


def sweep_table(slot: int, planned: Iterable[Planned]) -> npt.NDArray[np.int64]:
    """The rows for `hash_sweeps` and `measure_sweeps` of one slot's parts."""
    rows: list[list[int]] = []
    for part, tensor, sweeps in planned:
        code, values = reading(tensor.dtype) if part.has_values else (NOT_MEASURED, 0)
        for sweep in sweeps:
            row = [slot, tensor.data_ptr() + sweep.start, part.offset + sweep.offset]
            row += [sweep.run_bytes, int(tensor.itemsize >= 8), len(sweep.dims)]
            for dim in sweep.dims:
                row += [dim.size, dim.memory, dim.logical]
            row += [0] * (TILE_COLUMN - len(row))
            tile = sweep.tile
            row += [tile.columns, tile.memory, tile.logical, tile.itemsize] if tile else NO_TILE
            rows.append([*row, code, values])
    return np.array(rows, np.int64).reshape(-1, SWEEP_COLUMNS)


def has_numbers(parts: Sequence[Part]) -> bool:
    """Whether any part has numbers to measure."""
    return any(part.has_values and reading(part.tensor.dtype)[0] != NOT_MEASURED for part in parts)


class Rows:
    """A table that grows, row by row, at an address that kernels write to."""

    def __init__(self, columns: int, dtype: type[np.generic], fill: float) -> None:
        self._fill = fill
        self.values: npt.NDArray = np.full((1024, columns), fill, dtype)
        self.address = self.values.ctypes.data

    def reserve(self, count: int) -> None:
        """Make room for rows 0..count-1."""
        old = self.values
        if count > len(old):
            size = max(2 * len(old), count)
            self.values = np.full((size, old.shape[1]), self._fill, old.dtype)
            self.values[: len(old)] = old
            self.address = self.values.ctypes.data

    def clear(self, start: int, end: int) -> None:
        self.values[start:end] = self._fill
