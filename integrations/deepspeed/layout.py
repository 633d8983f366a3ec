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


def zero_axes(engine: Any, layout: Layout) -> tuple[str, ...]:
    """The axes over which ZeRO cuts what all dense ranks have: the ranks of its group."""
    data, sequence = layout.axis("dp"), layout.axis("cp")
    if data is None or sequence is None or sequence.size == 1:
        return ("dp",)
    cut_over = dist.get_world_size(engine.seq_data_parallel_group)
    return ("dp", "cp") if cut_over == data.size * sequence.size else ("dp",)


def _axis(name: str, group: Any, mesh: str = "dense") -> Axis:
    return _axis_of(name, tuple(dist.get_process_group_ranks(group)), mesh)


def _axis_of(name: str, ranks: tuple[int, ...], mesh: str = "dense") -> Axis:
    return Axis(name, len(ranks), ranks.index(dist.get_rank()), ranks, mesh)


def _data_axes(engine: Any) -> list[Axis]:
    grid = getattr(engine, "grid", None)
    if grid is not None:  # of a pipeline
        pipe, data = grid.get_pipe_parallel_group(), grid.get_data_parallel_group()
        return [_axis("dp", data), _axis("pp", pipe)]
    both = getattr(engine, "seq_data_parallel_group", None)
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        return _data_and_sequence(both, _sequence_group(engine))
    return [] if both is None else [_axis("dp", both)]


def _sequence_group(engine: Any) -> Any:
    """Of an mpu, or else of the mesh that `initialize` was given."""
    getter = getattr(engine.mpu, "get_sequence_parallel_group", None)
    return (
        engine.mesh_device.get_group(mesh_dim="sequence_parallel") if getter is None else getter()
    )


def _data_and_sequence(both: Any, sequence: Any) -> list[Axis]:
    """DeepSpeed's own mpu has no group for data alone: its ranks follow from the other two."""
    ranks = dist.get_process_group_ranks(both)
    members = dist.get_process_group_ranks(sequence)
    if set(members) <= set(ranks):  # one sequence after the other
        ranks = ranks[members.index(dist.get_rank()) :: len(members)]
    return [_axis_of("dp", tuple(ranks)), _axis_of("cp", tuple(members))]


def _tensor_axis(engine: Any) -> list[Axis]:
    grid = getattr(engine, "grid", None)
    if grid is not None:
        size = grid.get_slice_parallel_world_size()
        return [_axis("tp", grid.get_slice_parallel_group())] if size > 1 else []
    mpu = getattr(engine, "mpu", None)
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if name == "get_model_parallel_group" and hasattr(mpu, "initialize_sequence_parallel"):
            return []  # DeepSpeed's mpu of sequences calls their group that, too
        getter = getattr(mpu, name, None)
        if getter is not None:
            group = getter()
            return [_axis("tp", group)] if group is not None and group.size() > 1 else []
    return []


def _expert_axes(engine: Any) -> list[Axis]:
    """Of experts that all have one group size; with several sizes no axis would be true of all."""
    if not getattr(engine, "has_moe_layers", False):
        return []
    names = {getattr(parameter, "group_name", None) for parameter in engine.module.parameters()}
    names &= set(engine.expert_parallel_group)
    if len(names) != 1:
        return []
    (name,) = names
    experts, data = engine.expert_parallel_group[name], engine.expert_data_parallel_group[name]
    return [_axis("ep", experts, "expert"), _axis("edp", data, "expert")]
