"""`upguard run -- CMD ...`: any training command, recorded.

In:  a deepspeed, torchrun, mpiexec, srun, accelerate or python command as the user has it.
Out: one run directory for all its ranks, and the command's own exit code.

The command itself is not touched: a few environment variables switch UpGuard on in its processes.
A plan is made first, and everything that can be wrong with it is found before anything is started.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from upguard_plugin.config import environment_switch, load_config
from upguard_plugin.errors import RunDirectoryError, UsageError
from upguard_plugin.launch.run_child import run_child
from upguard_plugin.launch.run_launchers import fit_launcher, is_multi_node
from upguard_plugin.trace.manifest import NAME as MANIFEST_NAME
from upguard_plugin.trace.run_directory import CLAIM_NAME

STARTUP = Path(__file__).parent / "sitecustomize"


@dataclass(frozen=True, slots=True)
class Options:
    """What `upguard run` was told, as far as it was."""

    config: str | None = None  # path of a config file
    level: str | None = None
    output: str | None = None  # run directory; with `repeat`, the directory of the runs
    cpu: bool = False  # let CUDA-only programs run on the CPU
    repeat: int = 1  # run the command so many times, into OUTPUT/1, OUTPUT/2, ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of the command."""

    command: tuple[str, ...]
    variables: Mapping[str, str]  # in addition to the environment
    run: Path


def run_recorded(
    command: Sequence[str], options: Options, environ: Mapping[str, str] = os.environ
) -> int:
    """Run the command with recording on; returns its exit code.

    Repeats end early when one of them fails. Raises UpGuardError before anything is started.
    """
    if not command:
        raise UsageError("cannot run: no command", remedy="upguard run -- python train.py")
    if environment_switch(environ) is False:
        _say(["upguard: not recording, because UPGUARD=0"])
        return run_child(command, environ).exit_code
    launches = plan(command, options, environ)
    done: list[Path] = []
    for launch in launches:
        _make(launch.run)
        ended = run_child(launch.command, {**environ, **launch.variables})
        done.append(launch.run)
        if ended.exit_code or ended.interrupted:
            break
    from upguard_plugin.launch.run_report import report_lines  # slow to load, and not needed before

    _say(report_lines(done, ended.exit_code, len(launches)))
    for unused in done:
        _remove_if_empty(unused)
    return ended.exit_code


def plan(command: Sequence[str], options: Options, environ: Mapping[str, str]) -> list[Launch]:
    """The starts that the options ask for.

    Raises ConfigError for a wrong setting, RunDirectoryError for a directory that holds a run.
    """
    if options.repeat < 1:
        raise UsageError(f"cannot run the command {options.repeat} times: --repeat takes 1 or more")
    # The user's own are listed too: some launchers have to be told of each.
    variables = {name: text for name, text in environ.items() if name.startswith("UPGUARD_")}
    variables |= {"UPGUARD": "1", "PYTHONPATH": _with_startup(environ.get("PYTHONPATH"))}
    if options.config is not None:
        variables["UPGUARD_CONFIG"] = str(Path(options.config).absolute())
    if options.level is not None:
        variables["UPGUARD_LEVEL"] = options.level
    if options.cpu:
        variables["UPGUARD_CPU"] = "1"
    config = load_config(
        flags={"--output-dir": options.output, "--level": options.level},
        block={"output_dir": str(_free_directory(command))},  # where nobody names one
        environ={**environ, **variables},
    )
    several_launches = is_multi_node(command)
    launches = []
    for run in _run_directories(Path(config.output_dir), options.repeat):
        if not (several_launches or config.overwrite):
            _refuse_used(run)
        mine = {**variables, "UPGUARD_OUTPUT_DIR": str(run.absolute())}
        if not several_launches and "UPGUARD_RUN_ID" not in environ:
            mine["UPGUARD_RUN_ID"] = uuid.uuid4().hex
        fitted, mine = fit_launcher(command, mine)
        launches.append(Launch(fitted, mine, run))
    return launches


def _with_startup(pythonpath: str | None) -> str:
    return os.pathsep.join(path for path in (str(STARTUP), pythonpath) if path)


def _run_directories(output: Path, repeat: int) -> list[Path]:
    return [output] if repeat == 1 else [output / str(k) for k in range(1, repeat + 1)]


def _free_directory(command: Sequence[str]) -> Path:
    """`runs/train-1`, or the next number: short names, because people type them."""
    script = next((word for word in command if word.endswith(".py")), None)
    module = next((after for word, after in pairwise(command) if word in ("-m", "--module")), None)
    name = Path(script).stem if script else (module or Path(command[0]).name)
    taken = Path("runs")
    return next(p for k in count(1) if not (p := taken / f"{name}-{k}").exists())


def _make(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot record in {run}: {(error.strerror or str(error)).lower()}",
            remedy="name a directory that can be made with --output",
        ) from None


def _refuse_used(run: Path) -> None:
    if (run / CLAIM_NAME).exists() or (run / MANIFEST_NAME).exists():
        raise RunDirectoryError(
            f"cannot record in {run}: it holds a run already",
            remedy="name another directory with --output, or set UPGUARD_OVERWRITE=1",
        )


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # it holds a trace
        directory.rmdir()


def _say(lines: Sequence[str]) -> None:
    """On stderr: stdout belongs to the command."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
