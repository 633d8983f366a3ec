"""Settings that name nothing: a glob that no module fits, steps that the run did not have.

In:  the config, and what was there to be named.
Out: one sentence for each, most often about a slip.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.operators.places import OUTSIDE
from upguard_plugin.config import UpGuardConfig


def idle_globs(config: UpGuardConfig, names: ParameterNames) -> Iterator[str]:
    """Globs of `modules` that fit no name. Level `op` knows parameters too, level `stage` none."""
    known = [*names.modules]
    if config.level == "op":
        known += [*names.parameters, OUTSIDE]
    for glob in config.modules if config.level != "stage" else ():
        if not any(fnmatchcase(name, glob.removeprefix("!")) for name in known):
            yield f"the setting modules has {glob!r}, and no module is called like that"


def idle_ranks(config: UpGuardConfig, world_size: int) -> Iterator[str]:
    """What is to be said where `ranks` holds no rank of the run."""
    if not any(map(config.selected_rank, range(world_size))):
        yield (
            f"the setting ranks is {config.ranks!r}, and the run has {_count(world_size, 'rank')}: "
            "nothing is recorded"
        )


def idle_steps(config: UpGuardConfig, num_steps: int, num_recorded: int) -> Iterator[str]:
    """What is to be said of a run of which no step was recorded."""
    if num_steps and not num_recorded:
        yield (
            f"the setting steps is {config.steps!r}, and the run had {_count(num_steps, 'step')}: "
            "nothing was recorded"
        )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
