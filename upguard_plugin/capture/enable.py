"""`enable`: from models, optimizers and settings to a guard that records them.

In:  the user's models and optimizers, a config, and what the user says of their layout.
Out: a `Guard` with all its probes attached; an `IdleGuard` where nothing is to be recorded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from upguard_plugin.capture.guard import Guard
from upguard_plugin.capture.idle_settings import idle_ranks
from upguard_plugin.capture.models import named_models
from upguard_plugin.capture.names import ParameterNames, Rename
from upguard_plugin.capture.placements import Placements, layout_of
from upguard_plugin.capture.position import Position
from upguard_plugin.capture.recorder import Recorder
from upguard_plugin.capture.run import find_rank, first_recorded_rank, open_run, say, say_size
from upguard_plugin.config import UpGuardConfig, load_config
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.fingerprint.sketch import DEFAULT_SIZE
from upguard_plugin.invariants.online import OnlineCheck
from upguard_plugin.records import Layout

Many = Sequence[Any] | Any


def enable(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Many = None,
    config: UpGuardConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    *,
    layout: Layout | Mapping[str, Any] | None = None,
    placements: Placements | Mapping[str, Any] | None = None,
    tied: Sequence[Sequence[str]] | None = None,
    rename: Rename | None = None,
) -> Guard:
    """Begin to record this process; call it when the models are on their devices and wrapped.

    model, optimizer: one, or a list (pipeline chunks, several models). config: settings, or the
    path of a file with them. layout: per axis a ProcessGroup or a size. placements: boundary name
    or glob -> spec. tied: lists of names of one parameter. rename: from a name in these models to
    the one in the whole model, where they are parts of it.
    Raises ConfigError for a wrong setting and RunDirectoryError for a directory that cannot be
    used. Returns a guard that does nothing where recording is off for this rank.
    """
    settings = load_config(config)
    rank, world_size = find_rank()
    models = named_models(model)
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    optimizers = tuple(o for o in optimizers if o is not None)
    place = layout_of(layout, rank, world_size)
    rules = placements if isinstance(placements, Placements) else Placements(placements, place)
    stages = place.axis("pp")
    names = ParameterNames(models, tied, whole=stages is None or stages.size == 1, rename=rename)
    if settings.enabled and rank == 0:
        for sentence in idle_ranks(settings, world_size):
            say(sentence)
    if not settings.enabled or not settings.selected_rank(rank):
        return IdleGuard(settings)
    writer = open_run(settings, place, rank, world_size, models)
    queue = FingerprintQueue(sketch_size=DEFAULT_SIZE if settings.sketch else 0)
    recorder = Recorder(writer, queue, settings.roles, settings.phases, settings.dump)
    guard = Guard(settings, recorder, models, optimizers, names, rules)
    guard.rank, guard.world_size, guard.layout = rank, world_size, place
    if rank == first_recorded_rank(settings, world_size):
        # Where ranks hold other modules, none of them knows what names nothing.
        guard.speaks = not any(a.size > 1 for a in place.axes if a.name in ("pp", "ep"))
        recorder.writing.on_first_step = lambda: say_size(writer.bytes_written)
    if settings.check:
        online = OnlineCheck(rank, place, settings.level, settings.check)
        recorder.writing.on_batch = lambda batch: _tell(recorder, online.look(batch))
        recorder.writing.on_end = lambda: _tell(recorder, online.finish())
    try:
        guard.attach()
    except BaseException:
        guard.close()
        raise
    return guard


class IdleGuard(Guard):
    """What `enable` returns where nothing is recorded: no hook, no file, no cost."""

    active = False

    def __init__(self, config: UpGuardConfig) -> None:
        self.config = config
        self.position = Position()
        self.models, self.optimizers, self.probes = (), (), []

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    attach = begin_step_if_needed = step = microbatch = data = scalar = observe = _nothing  # type: ignore[assignment]
    placement = close = __exit__ = _nothing  # type: ignore[assignment]


def _tell(recorder: Recorder, broken: Sequence[str]) -> None:
    """Print the first thing that broke, and note all in the trace."""
    for sentence in broken:
        recorder.note(sentence)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        say(broken[0] + more)
