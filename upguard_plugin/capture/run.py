"""From a config to an open trace: the run directory, its manifest, this rank's writer.

In:  the config, this process's place in the world, the models.
Out: a `RankWriter`. The lowest recorded rank writes the manifest and prints where the trace goes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch

from upguard_plugin.capture.names import Models
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.environment import (
    collect_sources,
    collect_variables,
    collect_versions,
    device_name,
    program_digest,
    redact_command,
)
from upguard_plugin.records import Layout
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.run_directory import claim_run_directory, run_id_of
from upguard_plugin.trace.writer import RankWriter

# What launchers call this process's place, best known first.
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
WORLD_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(global rank, world size): of torch.distributed once it is up, else of the launcher."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [
        next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), default)
        for names, default in ((RANK_VARIABLES, 0), (WORLD_VARIABLES, 1))
    ]
    return found[0], max(found[1], found[0] + 1)


def run_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launcher's id of this launch, the same on all ranks; None where it gives none."""
    torchelastic = environ.get("TORCHELASTIC_RUN_ID", "none")  # "none" is torchrun's default
    slurm = [environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")]
    candidates = (
        environ.get("UPGUARD_RUN_ID"),
        None if torchelastic == "none" else torchelastic,
        ".".join(part for part in slurm if part) if all(slurm) else None,
        environ.get("PMIX_NAMESPACE"),
    )
    return next((token for token in candidates if token), None)


def open_run(
    config: UpGuardConfig, layout: Layout, rank: int, world_size: int, models: Models
) -> RankWriter:
    """Claim the run directory and begin this rank's trace. Raises RunDirectoryError."""
    run = claim_run_directory(
        Path(config.output_dir), rank=rank, run_token=run_token(), overwrite=config.overwrite
    )
    device = device_name()
    writer = RankWriter(run, rank, layout=layout, device=device, max_bytes=config.max_bytes)
    if rank == first_recorded_rank(config, world_size):
        write_manifest(run, _manifest(run, config, rank, world_size, models, device))
        say(f"recording level {config.level} to {run}; afterwards: upguard compare {run} OTHER_RUN")
    return writer


def first_recorded_rank(config: UpGuardConfig, world_size: int) -> int:
    """The rank that writes the manifest and talks to the user."""
    return next((r for r in range(world_size) if config.selected_rank(r)), 0)


def say_size(num_bytes: int) -> None:
    """Print what a step takes on disk. The first one is the largest: it names everything."""
    say(f"at most {num_bytes / 1e6:.3g} MB per step and rank")


def say(sentence: str) -> None:
    """Print a line beside the training's own output."""
    print(f"upguard: {sentence}", file=sys.stderr, flush=True)


def _manifest(
    run: Path,
    config: UpGuardConfig,
    rank: int,
    world_size: int,
    models: Models,
    device: str,
) -> Manifest:
    sources = collect_sources({type(part) for _, model in models for part in model.modules()})
    command = sys.orig_argv
    recorded = tuple(r for r in range(world_size) if config.selected_rank(r))
    return Manifest(
        run_id=run_id_of(run),
        command=redact_command(command),
        config=config.to_mapping(),
        program_digest=program_digest(
            command, sources, config.program, outputs=[str(config.output_dir)]
        ),
        program=config.program,
        sources=sources,
        world_size=world_size,
        level=config.level,
        versions=collect_versions(),
        variables=collect_variables(),
        devices={str(rank): device},
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        recorded_ranks=None if len(recorded) == world_size else recorded,
    )
