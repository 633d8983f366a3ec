"""Puts a guard on a Megatron training, with the probes that only Megatron needs."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config

from upguard_plugin.capture.enable import enable
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.models import named_models
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.rng import State, state_bytes
from upguard_plugin.integrations.megatron.buckets import BucketOwner
from upguard_plugin.integrations.megatron.coalesced import CoalescedProbe
from upguard_plugin.integrations.megatron.cuda_graphs import GraphProbe, captures
from upguard_plugin.integrations.megatron.layout import find_layout
from upguard_plugin.integrations.megatron.names import GlobalNames
from upguard_plugin.integrations.megatron.optimizer import (
    MegatronOptimizerProbe,
    chained,
    find_shards,
    inner_optimizers,
    is_distributed,
)
from upguard_plugin.integrations.megatron.pauses import PauseProbe
from upguard_plugin.integrations.megatron.placements import (
    MegatronPlacements,
    Shard,
    find_rules,
    partial_axes,
)
from upguard_plugin.integrations.megatron.schedules import ScheduleProbe

try:  # came with 0.12 or so, and may go
    from megatron.core.transformer import cuda_graphs
except ImportError:
    cuda_graphs = None
# By its full name: the package has a function of the module's name.
FINALIZER = "megatron.core.distributed.finalize_model_grads"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def begin(
    chunks: list[Any],
    optimizer: Any,
    config: Any,
    *,
    pg_collection: Any,
    placements: Any,
    vocabulary_size: int | None,
) -> Guard:
    """As `attach`, for a Megatron that has been checked."""
    layout = find_layout(
        pg_collection, len(chunks), shards_optimizer=any(map(is_distributed, chained(optimizer)))
    )
    models = named_models(chunks[0] if len(chunks) == 1 else chunks)
    rename = GlobalNames(models)
    tied = _tied(chunks, layout)
    names = ParameterNames(models, tied, whole=False, rename=rename)
    shards = find_shards(optimizer, names)
    rules = MegatronPlacements(
        find_rules(names, get_model_config(chunks[0]), layout, vocabulary_size),
        placements,
        layout,
        shards,
        partial_axes(names, layout, (EMBEDDING,) if tied or _embeds_twice(chunks, layout) else ()),
    )
    guard = enable(
        chunks[0] if len(chunks) == 1 else chunks,
        inner_optimizers(optimizer),
        config,
        layout=layout,
        placements=rules,
        tied=tied,
        rename=rename,
    )
    if guard.probes:
        rules.misfit = guard.recorder.note
        try:
            _add_probes(guard, chunks, optimizer, shards, rules)
        except BaseException:
            guard.close()
            raise
    return guard


def _add_probes(
    guard: Guard,
    chunks: list[Any],
    optimizer: Any,
    shards: dict[str, Shard],
    rules: MegatronPlacements,
) -> None:
    optimizers = MegatronOptimizerProbe(guard, optimizer, chunks, shards)
    schedule = ScheduleProbe(
        guard, schedules, optimizers.record_final_gradients, rules.set_batch_size
    )
    # Timers exchange what the clock said.
    clocks = PauseProbe(guard, [(Timers, "get_all_timers_string"), (Timers, "write")])
    captured = PauseProbe(guard, captures(cuda_graphs, schedules))
    graphs = GraphProbe(guard, cuda_graphs)
    coalesced = CoalescedProbe(guard, import_module(FINALIZER))
    for added in (optimizers, schedule, clocks, captured, graphs, coalesced):
        guard.probes.append(added)
        added.attach()
    if guard.collectives is not None:
        guard.collectives.owners.append(BucketOwner(chunks, guard.names))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in tracker.get_states():
        guard.states.generators[f"megatron.{name}"] = partial(_tracked_state, name)


def _tracked_state(name: str) -> State:
    state = tensor_parallel.get_cuda_rng_tracker().get_states()[name]
    return state_bytes(state if hasattr(state, "numpy") else state.get_state())


def _embeds_twice(chunks: list[Any], layout: Any) -> bool:
    """Whether the stage that predicts further tokens has an embedding like the first stage's."""
    stages = layout.axis("pp")
    config = get_model_config(chunks[0])
    further = getattr(config, "mtp_num_layers", None)
    return stages is not None and stages.size > 1 and bool(further)


def _tied(chunks: list[Any], layout: Any) -> list[list[str]] | None:
    """The embedding and the output layer, where they are one weight on two pipeline stages."""
    stages = layout.axis("pp")
    if stages is None or stages.size == 1:
        return None
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "share_embeddings_and_output_weights", False):
                return [[EMBEDDING, OUTPUT]]
    return None
