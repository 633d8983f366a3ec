"""Puts a guard on a Megatron training, with the probes that only Megatron needs."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config

from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.guard import Guard, enable
from upguard_plugin.capture.models import named_models
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.rng import State, state_bytes
from upguard_plugin.integrations.megatron.layout import find_layout
from upguard_plugin.integrations.megatron.names import GlobalNames
from upguard_plugin.integrations.megatron.optimizer import (
    BucketOwner,
    MegatronOptimizerProbe,
    chained,
    find_shards,
    inner_optimizers,
    is_distributed,
)
from upguard_plugin.integrations.megatron.pauses import PauseProbe
from upguard_plugin.integrations.megatron.placements import (
    MegatronPlacements,
    find_rules,
    partial_axes,
)
from upguard_plugin.integrations.megatron.schedules import ScheduleProbe

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
        partial_axes(names, layout, (EMBEDDING,) if tied else ()),
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
            _add_probes(guard, chunks, optimizer, rules, shards)
        except BaseException:
            guard.close()
            raise
    return guard


def _add_probes(
    guard: Guard, chunks: list[Any], optimizer: Any, rules: MegatronPlacements, shards: Any
) -> None:
    optimizers = MegatronOptimizerProbe(guard, optimizer, chunks, rules, shards)
    schedule = ScheduleProbe(guard, schedules, optimizers.record_final_gradients)
    # Timers exchange what the clock said.
    clocks = PauseProbe(guard, [(Timers, "get_all_timers_string"), (Timers, "write")])
    for probe in (optimizers, schedule, clocks):
        guard.probes.append(probe)
        probe.attach()
    for probe in guard.probes:
        if isinstance(probe, CollectiveProbe):
            probe.owners.append(BucketOwner(chunks, guard.names))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in tracker.get_states():
        guard.states.generators[f"megatron.{name}"] = partial(_tracked_state, name)
    for chunk in chunks:
        _keep_gathering_first(chunk)


def _tracked_state(name: str) -> State:
    state = tensor_parallel.get_cuda_rng_tracker().get_states()[name]
    return state_bytes(state if hasattr(state, "numpy") else state.get_state())


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


def _keep_gathering_first(chunk: Any) -> None:
    """Have Megatron's own hooks, which wait for a weight to be gathered, run before ours.

    Megatron-LM takes them off for the first step and hangs them on again.
    """
    enable_hooks = getattr(chunk, "enable_forward_pre_hook", None)
    if enable_hooks is None or not getattr(chunk, "use_forward_hook", False):
        return

    def enable_forward_pre_hook() -> None:
        enable_hooks()
        for module, handle in chunk.remove_forward_pre_hook_handles.items():
            module._forward_pre_hooks.move_to_end(handle.id, last=False)

    chunk.enable_forward_pre_hook = enable_forward_pre_hook
