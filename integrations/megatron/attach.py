"""Recording a Megatron-Core training: all that `enable` takes, found by itself.

In:  the model chunks and the optimizer, once both are made.
Out: a Guard. Micro-batches, phases, names and placements come from Megatron; the loop says
     `guard.step()` after each optimizer step, and `guard.close()`.

    guard = attach(model_chunks, optimizer)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard
    from upguard_plugin.config import UpGuardConfig


def attach(
    model_chunks: Sequence[Any] | Any,
    optimizer: Any,
    config: UpGuardConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    *,
    pg_collection: Any = None,
    placements: Mapping[str, Any] | None = None,
    vocabulary_size: int | None = None,
) -> Guard:
    """Begin to record this rank; call it when model and optimizer are made, before training.

    model_chunks: one model, or the chunks of a virtual pipeline, as the schedule takes them.
    optimizer: what `get_megatron_optimizer` returned. config: settings, or a file with them.
    pg_collection: the ProcessGroupCollection the model was built with; without it the groups of
    parallel_state. placements: rules of your own, as for `enable`; they go before Megatron's.
    vocabulary_size: real tokens, where the vocabulary is padded and runs of other layouts are to be
    compared.
    Raises UsageError for a Megatron that is not known, ConfigError and RunDirectoryError as
    `enable`. Returns a guard that does nothing where recording is off for this rank.
    """
    # Slow to load, and optional: this module is imported with every Megatron program.
    from upguard_plugin.integrations.megatron.versions import check_megatron

    untried = check_megatron()
    from upguard_plugin.integrations.megatron.adapter import begin

    chunks = list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks]
    guard = begin(
        chunks,
        optimizer,
        config,
        pg_collection=pg_collection,
        placements=placements,
        vocabulary_size=vocabulary_size,
    )
    if untried and guard.probes:
        guard.recorder.note(untried)
    return guard
