"""What each launcher needs so that our variables reach its ranks.

In:  the command of `upguard run`, and the variables that its processes are to see.
Out: the command and the variables, changed as little as that launcher asks for.

Most launchers hand their whole environment on. Three do not always: Open MPI to other hosts,
DeepSpeed to other hosts, and srun where it is told not to.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from upguard_plugin.errors import UsageError
from upguard_plugin.integrations.autoload import CARRIED_PREFIX

Variables = dict[str, str]
MPI_COMMANDS = ("mpirun", "mpiexec", "orterun", "prterun")


def is_open_mpi(command: str) -> bool:
    """Whether this mpirun is Open MPI's; asked by its own `--version`."""
    try:
        asked = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "open mpi" in asked.stdout.lower() or "openrte" in asked.stdout.lower()


def fit_launcher(
    command: Sequence[str],
    variables: Mapping[str, str],
    is_open_mpi: Callable[[str], bool] = is_open_mpi,
) -> tuple[tuple[str, ...], Variables]:
    """The command to start and the variables to set for it.

    Raises UsageError for an srun that keeps variables from its ranks.
    """
    names = {PurePath(word).name for word in command}
    changed = dict(variables)
    if "deepspeed" in names or any(word.startswith("deepspeed.launcher") for word in command):
        # Its launcher exports what begins with PYTHON to other hosts, and nothing else of ours.
        ours = {name: text for name, text in variables.items() if name.startswith("UPGUARD")}
        changed |= {f"{CARRIED_PREFIX}{n.removeprefix('UPGUARD')}": t for n, t in ours.items()}
    first = PurePath(command[0]).name
    if first in MPI_COMMANDS and is_open_mpi(command[0]):
        exports = [word for name in variables for word in ("-x", name)]
        return (command[0], *exports, *command[1:]), changed
    if first == "srun":
        _check_srun(command, variables)
    return tuple(command), changed


def _check_srun(command: Sequence[str], variables: Mapping[str, str]) -> None:
    for place, word in enumerate(command):
        if word == "--export" and place + 1 < len(command):
            exported = command[place + 1]
        elif word.startswith("--export="):
            exported = word.removeprefix("--export=")
        else:
            continue
        words = exported.split(",")
        if "ALL" not in words and "UPGUARD" not in words:
            kept = [w for w in words if w not in ("NONE", "NIL")]
            raise UsageError(
                f"cannot record under srun --export={exported}: it hides UpGuard from the ranks",
                remedy=f"srun --export={','.join([*kept, *variables])}, or --export=ALL",
            )


def is_multi_node(command: Sequence[str]) -> bool:
    """Whether this is one of several launches that together make one run (torchrun, accelerate)."""
    for place, word in enumerate(command):
        flag, _, value = word.replace("_", "-").partition("=")
        if flag in ("--nnodes", "--num-machines"):
            value = value or (command[place + 1] if place + 1 < len(command) else "")
            return value not in ("1", "1:1", "")
    return False
