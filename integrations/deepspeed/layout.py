"""The parallel axes of a DeepSpeed job, seen from one rank.

In:  an engine. Out: a `Layout`.

What newcomers get wrong: ZeRO partitions over data and sequence ranks together. Where there are
both, the axis is split in two, dp outer and cp inner, as DeepSpeed orders the ranks.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

from upguard_plugin.records import Axis, Layout


def find_layout(engine: Any) -> Layout:
    """The layout of this rank: dp, and pp, tp, cp, ep where the job has them."""
    axes = [*_data_axes(engine), *_tensor_axis(engine), *_expert_axes(engine)]
    return Layout(tuple(axes), zero_stage=int(engine.zero_optimization_stage()))


def _axis(name: str, group: Any, mesh: str = "dense") -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), ranks.index(dist.get_rank()), ranks, mesh)


def _data_axes(engine: Any) -> list[Axis]:
    grid = getattr(engine, "grid", None)
    if grid is not None:  # of a pipeline
        pipe, data = grid.get_pipe_parallel_group(), grid.get_data_parallel_group()
        return [_axis("dp", data), _axis("pp", pipe)]
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        data, sequence = engine.data_parallel_group, engine.mpu.get_sequence_parallel_group()
        return [_axis("dp", data), _axis("cp", sequence)]
    both = getattr(engine, "seq_data_parallel_group", None)
    return [] if both is None else [_axis("dp", both)]


def _tensor_axis(engine: Any) -> list[Axis]:
    grid = getattr(engine, "grid", None)
    if grid is not None:
        size = grid.get_slice_parallel_world_size()
        return [_axis("tp", grid.get_slice_parallel_group())] if size > 1 else []
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        getter = getattr(getattr(engine, "mpu", None), name, None)
        if getter is not None:
            group = getter()
            return [_axis("tp", group)] if group is not None and group.size() > 1 else []
    return []


def _expert_axes(engine: Any) -> list[Axis]:
    """Of experts that all have one group size; with several sizes no axis would be true of all."""
    if not getattr(engine, "has_moe_layers", False) or len(engine.expert_parallel_group) != 1:
        return []
    (name,) = engine.expert_parallel_group
    experts, data = engine.expert_parallel_group[name], engine.expert_data_parallel_group[name]
    return [_axis("ep", experts, "expert"), _axis("edp", data, "expert")]
