"""The placement that a DTensor carries with it."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
from torch import Tensor

from upguard_plugin.errors import PlacementError
from upguard_plugin.fingerprint.sweeps import row_major_strides
from upguard_plugin.records import Piece, Placement


def placement_of(tensor: Tensor) -> Placement | None:
    """The placement of a DTensor's local part, or None for a tensor that carries none.

    Raises PlacementError for a DTensor whose local part does not fit its own placements.
    """
    spec = getattr(tensor, "_spec", None)
    local = getattr(tensor, "_local_tensor", None)
    if spec is None or not isinstance(local, Tensor):
        return None
    coordinate = spec.mesh.get_coordinate()
    return _spec_placement(spec, tuple(coordinate or ()), tuple(local.shape))


@lru_cache(maxsize=4096)
def _spec_placement(
    spec: Any, coordinate: tuple[int, ...], found_shape: tuple[int, ...]
) -> Placement:
    """The placement of one rank; the same object for the same arguments."""
    mesh = spec.mesh
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    text = "dtensor " + ",".join(f"{n}:{p}" for n, p in zip(names, spec.placements, strict=True))
    shape = tuple(spec.shape)
    held = [np.arange(size) for size in shape]
    sharded, partial = [], []
    for name, size, placement, rank in zip(
        names, mesh.shape, spec.placements, coordinate, strict=True
    ):
        if placement.is_partial():
            partial.append(name)
        elif not placement.is_replicate():
            held[placement.dim] = _shard(held[placement.dim], placement, size, rank)
            sharded.append(name)
    local_shape = tuple(len(indices) for indices in held)
    if local_shape != found_shape:
        raise PlacementError(
            f"placement {text!r} does not fit a DTensor of shape {list(shape)}: this rank should "
            f"hold {list(local_shape)}, it holds {list(found_shape)}"
        )
    return Placement(text, shape, _pieces(held, local_shape, shape), tuple(sharded), tuple(partial))


def _shard(indices: np.ndarray, placement: Any, num_ranks: int, rank: int) -> np.ndarray:
    """This rank's part, cut as torch cuts: chunks of equal size, the last ones short or empty."""
    groups = getattr(placement, "split_factor", 1)  # of a strided shard: each group is cut
    return np.concatenate(
        [_chunk(group, num_ranks, rank) for group in _chunks(indices, groups)] or [indices[:0]]
    )


def _chunks(indices: np.ndarray, count: int) -> list[np.ndarray]:
    return [_chunk(indices, count, k) for k in range(count)]


def _chunk(indices: np.ndarray, count: int, k: int) -> np.ndarray:
    step = -(-len(indices) // count)
    return indices[k * step : (k + 1) * step]


def _pieces(
    held: list[np.ndarray], local_shape: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Piece, ...]:
    """One piece for each combination of the dims' contiguous stretches."""
    stretches: list[list[tuple[int, int, int]]] = []  # start on the rank, logical start, size
    for indices in held:
        cuts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
        stretches.append([(a, int(indices[a]), b - a) for a, b in pairwise(cuts) if a < b])
    local_strides, strides = row_major_strides(local_shape), row_major_strides(shape)
    return tuple(
        Piece(
            tuple(size for _, _, size in corner),
            sum(a * step for (a, _, _), step in zip(corner, local_strides, strict=True)),
            local_strides,
            sum(g * step for (_, g, _), step in zip(corner, strides, strict=True)),
            strides,
        )
        for corner in product(*stretches)
    )
