"""Puts a guard on a DeepSpeed engine, with the probes that only DeepSpeed needs."""

from __future__ import annotations

from typing import Any

from upguard_plugin.capture.collectives import CollectiveProbe
from upguard_plugin.capture.enable import enable
from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.models import named_models
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.probe import Probe
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.integrations.deepspeed.buckets import Buffers
from upguard_plugin.integrations.deepspeed.layout import find_layout, zero_axes
from upguard_plugin.integrations.deepspeed.names import GlobalNames
from upguard_plugin.integrations.deepspeed.optimizer import UpdateProbe
from upguard_plugin.integrations.deepspeed.padding import Padding
from upguard_plugin.integrations.deepspeed.pipeline import ScheduleProbe
from upguard_plugin.integrations.deepspeed.placements import DeepSpeedPlacements
from upguard_plugin.integrations.deepspeed.shards import Shards
from upguard_plugin.integrations.deepspeed.splits import parameter_specs
from upguard_plugin.integrations.deepspeed.versions import moved_places


def begin(engine: Any, config: UpGuardConfig, version: str) -> Guard:
    """Begin to record an engine that `deepspeed.initialize` has made. version: DeepSpeed's."""
    layout = find_layout(engine)
    models = named_models(engine.module)
    rename = GlobalNames(engine, models)
    names = ParameterNames(models, whole=False, rename=rename)
    shards = Shards(engine, names)
    experts = frozenset(
        name for name, p in names.parameters.items() if not getattr(p, "allreduce", True)
    )
    specs = parameter_specs(names.parameters, layout, experts)
    guard = enable(
        engine.module,
        getattr(engine, "basic_optimizer", None) or engine.optimizer,
        config,
        layout=layout,
        placements=DeepSpeedPlacements(layout, shards.by_name, specs, zero_axes(engine, layout)),
        rename=rename,
    )
    if guard.probes:
        _add_probes(guard, engine, shards)
        for sentence in moved_places(version):
            guard.recorder.note(sentence)
    return guard


def _add_probes(guard: Guard, engine: Any, shards: Shards) -> None:
    buffers = Buffers(guard, engine, shards)
    probes: list[Probe] = [UpdateProbe(guard, engine, shards), buffers]
    if engine.pipeline_parallelism:
        probes.append(ScheduleProbe(guard, engine))
    for probe in probes:
        guard.probes.append(probe)
        probe.attach()
    if shards.is_stage3:
        guard.states.sources.append(Padding(guard, engine, shards).tell)
    for probe in guard.probes:
        if isinstance(probe, CollectiveProbe):
            probe.owners.insert(0, buffers.name)
            probe.placers.append(buffers.place)
            for axis in reversed(guard.layout.axes):  # of groups with equal members the first names
                probe.groups.name(axis.ranks, axis.name)
    _read_gradients_first(guard)


def _read_gradients_first(guard: Guard) -> None:
    """Have gradients recorded before ZeRO's own hooks reduce them and take them away."""
    for parameter in guard.names.parameters.values():
        hooks = parameter._post_accumulate_grad_hooks
        if hooks:
            hooks.move_to_end(next(reversed(hooks)), last=False)  # type: ignore[attr-defined]
