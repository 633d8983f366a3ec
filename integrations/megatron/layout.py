"""The parallel axes of a Megatron job, seen from one rank.

In:  megatron's parallel_state, or an explicit ProcessGroupCollection.
Out: a `Layout`. Two meshes share the ranks: the dense one (tp, cp, dp, pp, vpp) and that of the
     experts (etp, ep, edp, pp). A group that a collection does not have leaves its axis out.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from upguard_plugin.records import Axis, Layout

# Axis -> (its group's name in a ProcessGroupCollection, and in parallel_state), by mesh.
_DENSE = {
    "tp": ("tp", parallel_state.get_tensor_model_parallel_group),
    "cp": ("cp", parallel_state.get_context_parallel_group),
    "dp": ("dp", parallel_state.get_data_parallel_group),
    "pp": ("pp", parallel_state.get_pipeline_model_parallel_group),
}
_EXPERT = {
    "etp": ("expt_tp", parallel_state.get_expert_tensor_parallel_group),
    "ep": ("ep", parallel_state.get_expert_model_parallel_group),
    "edp": ("expt_dp", parallel_state.get_expert_data_parallel_group),
    "pp": ("pp", parallel_state.get_pipeline_model_parallel_group),
}


def find_layout(pg_collection: Any, num_chunks: int, *, shards_optimizer: bool) -> Layout:
    """The layout of this rank.

    num_chunks: model chunks on this rank; more than one makes an axis vpp, whose parts are all
    here. shards_optimizer: the optimizer is distributed, which is ZeRO stage 1.
    """
    rank = torch.distributed.get_rank()
    axes = [
        _axis(name, group, mesh)
        for mesh, table in (("dense", _DENSE), ("expert", _EXPERT))
        for name, (field, getter) in table.items()
        if (group := _group(pg_collection, field, getter)) is not None
    ]
    if num_chunks > 1:
        axes.append(Axis("vpp", num_chunks, 0, (rank,)))
    return Layout(tuple(axes), 1 if shards_optimizer else None)


def _group(pg_collection: Any, field: str, getter: Any) -> Any:
    if pg_collection is not None:
        group = getattr(pg_collection, field, None)
        if group is None and field == "dp":
            group = getattr(pg_collection, "dp_cp", None)
        return group
    return getter()


def _axis(name: str, group: Any, mesh: str) -> Axis:
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return Axis(name, len(ranks), ranks.index(torch.distributed.get_rank()), ranks, mesh)
