"""The `upguard` command: one short function per verb.

In:  the command line.
Out: a report on stdout, an exit code (0 identical, 1 divergent, 2 usage or unreadable, 3 not
     comparable). What goes wrong becomes one message on stderr, never a traceback.

A verb imports its code when it is used: `upguard --help` does not pay for numpy and pyarrow. It
returns its exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from upguard_plugin import __version__
from upguard_plugin.cli_options import Verbs, output_options, selection_options, write_report
from upguard_plugin.errors import (
    EXIT_DIVERGENT,
    EXIT_IDENTICAL,
    IncomparableError,
    UpGuardError,
    UsageError,
)

EXIT_INTERRUPTED = 130  # what shells give for Ctrl-C


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="upguard")
def upguard() -> None:
    """Compare two training runs bit by bit and name the first operation where they differ."""


@upguard.command()
@click.argument("baseline")
@click.argument("target")
@selection_options
@click.option(
    "--same-program",
    is_flag=True,
    help="Both runs ran the same program: other output from equal inputs is nondeterminism.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Both runs' sums are exact (upguard_plugin.exact): no difference is rounding.",
)
@click.option("--verify", is_flag=True, help="Decode every step, also where digests agree.")
@click.option(
    "--noise",
    metavar="RUN",
    multiple=True,
    help="A repeat of the baseline: what differs from it is left out.",
)
@click.option("--ignore", metavar="FILE", help="Rules for boundaries to leave out, with reasons.")
@click.option("--map", "renames", metavar="FILE", help="Rules that rename the target's boundaries.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    metavar="N",
    help="Use N processes; under mpiexec its processes share the work without this option.",
)
@output_options
def compare(
    baseline: str,
    target: str,
    steps: str | None,
    ranks: str | None,
    modules: str | None,
    roles: str | None,
    same_program: bool,
    exact: bool,
    verify: bool,
    noise: tuple[str, ...],
    ignore: str | None,
    renames: str | None,
    jobs: int,
    form: str,
    output: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Compare two runs and name their first divergence.

    Exit code 0 if they are identical, 1 if they diverge, 2 if something cannot be read or was
    asked wrongly, 3 if they are not comparable or it is not decided.
    """
    from upguard_plugin.compare.driver import Comparison, team_for  # slow to load: numpy, pyarrow
    from upguard_plugin.compare.dumped import show_command
    from upguard_plugin.compare.selection import Selection
    from upguard_plugin.report.progress import Progress
    from upguard_plugin.report.text import verdict_text  # slow to load: pydantic
    from upguard_plugin.trace.reader import open_trace

    comparison = Comparison(
        Path(baseline),
        Path(target),
        Selection.parse(steps=steps, ranks=ranks, modules=modules, roles=roles),
        same_program=same_program,
        exact=exact,
        verify=verify,
        noise=tuple(Path(run) for run in noise),
        ignore=None if ignore is None else Path(ignore),
        renames=None if renames is None else Path(renames),
    )
    with team_for(comparison, jobs) as team:
        try:
            with Progress(quiet or team.index > 0) as progress:
                verdict = comparison.verdict(team, progress)
        except UpGuardError as error:
            if team.index:
                return error.exit_code  # the first process says it
            raise
    if team.index:
        return verdict.exit_code
    if form == "json":
        report = verdict.to_json()
    else:
        traces = open_trace(Path(baseline)), open_trace(Path(target))
        elements = show_command(*traces, verdict.first_divergence)
        report = verdict_text(verdict, verbose=verbose, elements=elements)
    write_report([report], output, quiet)
    return verdict.exit_code


@upguard.command()
@click.argument("run")
@selection_options
@output_options
def check(
    run: str,
    steps: str | None,
    ranks: str | None,
    modules: str | None,
    roles: str | None,
    form: str,
    output: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Check what must hold inside one run.

    Replicas agree, collectives keep their data, a recompute repeats its forward, ...

    Exit code 0 if nothing is broken, 1 if something is, 3 if there is nothing to check.
    """
    from upguard_plugin.compare.idle_rules import refuse_absent  # slow to load: numpy
    from upguard_plugin.compare.selection import Selection
    from upguard_plugin.invariants.check import check_run  # slow to load: pydantic
    from upguard_plugin.report.check_text import check_text
    from upguard_plugin.report.progress import Progress
    from upguard_plugin.trace.reader import open_trace  # slow to load: pyarrow

    selection = Selection.parse(steps=steps, ranks=ranks, modules=modules, roles=roles)
    trace = open_trace(Path(run))
    refuse_absent(trace, selection, IncomparableError)
    with Progress(quiet, "checking") as progress:
        found = check_run(trace, selection, progress=progress)
    report = found.to_json() if form == "json" else check_text(found, verbose=verbose)
    write_report([report], output, quiet)
    return found.exit_code


@upguard.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN | --diff BASELINE TARGET")
@selection_options
@click.option("--phase", metavar="LIST", help="Only these phases: forward,loss.")
@click.option("--diff", is_flag=True, help="Compare the elements of tensors that were dumped.")
@click.option("--event", metavar="WORDS", default="", help="With --diff: 'step 1 head output'.")
@click.option("--limit", type=click.IntRange(min=0), default=None, help="At most so many events.")
@output_options
def show(
    runs: tuple[str, ...],
    steps: str | None,
    ranks: str | None,
    modules: str | None,
    roles: str | None,
    phase: str | None,
    diff: bool,
    event: str,
    limit: int | None,
    form: str,
    output: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Print events, or how dumped tensors differ.

    The events of one run; with --diff the elements of the tensors that both runs kept whole.
    """
    from upguard_plugin.compare.browse import browse  # slow to load: numpy
    from upguard_plugin.compare.dumped import EventName, dumped_pairs
    from upguard_plugin.compare.selection import Selection
    from upguard_plugin.report.elements import diff_lines
    from upguard_plugin.report.events import event_lines  # slow to load: pydantic
    from upguard_plugin.trace.reader import open_trace  # slow to load: pyarrow

    forms = "upguard show RUN, or upguard show --diff BASELINE TARGET [--event WORDS]"
    if len(runs) != 1 + diff:
        taken = "two runs with" if diff else "one run without"
        raise UsageError(f"show takes {taken} --diff, not {len(runs)}", remedy=forms)
    if event and not diff:
        raise UsageError("--event goes with --diff", remedy=forms)
    selection = Selection.parse(steps=steps, ranks=ranks, modules=modules, roles=roles, phase=phase)
    traces = [open_trace(Path(path)) for path in runs]
    if diff:
        pairs = dumped_pairs(traces[0], traces[1], selection, EventName.parse(event))
        write_report(diff_lines(pairs, form, limit), output, quiet)
        return EXIT_IDENTICAL
    events = browse(traces[0], selection, limit)
    write_report(event_lines(events, form, verbose=verbose), output, quiet)
    return EXIT_IDENTICAL


@upguard.command(context_settings={"allow_interspersed_args": False})
@click.option("--config", metavar="FILE", help="Settings, JSON or YAML.")
@click.option("--level", help="How much to record: stage, module (the default) or op.")
@click.option("--output", metavar="DIR", help="Run directory; the default is runs/NAME-1, -2, ...")
@click.option("--cpu", is_flag=True, help="Let a CUDA-only program (Megatron) run on the CPU.")
@click.option("--repeat", metavar="N", type=int, default=1, help="Run it N times, to DIR/1, ...")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND ...")
def run(
    config: str | None,
    level: str | None,
    output: str | None,
    cpu: bool,
    repeat: int,
    command: tuple[str, ...],
) -> int:
    """Run a training command, recorded.

    COMMAND is a deepspeed, torchrun, mpiexec, srun, accelerate or python command as you have it.
    The exit code is its own.
    """
    from upguard_plugin.launch.run import Options, run_recorded  # slow to load: pyarrow

    return run_recorded(command, Options(config, level, output, cpu, repeat))


@upguard.command()
@click.option(
    "--fault",
    default="flipped-bit",
    metavar="NAME",
    show_default=True,
    help="What is wrong in the target; `all` tries every fault, one after the other.",
)
@click.option("--list", "only_list", is_flag=True, help="Print the faults and what they do.")
@click.option("--output", type=click.Path(file_okay=False), help="Keep the runs in this folder.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def demo(fault: str, only_list: bool, output: str | None, form: str) -> int:
    """Plant a fault in a real training and find it.

    Trains a small Megatron GPT twice on two processes, once with the fault.

    Exit code 0 if each verdict is the expected one, else 1.
    """
    from upguard_plugin.launch.demo.faults import fault_lines, faults_named

    if only_list:
        write_report(fault_lines(), None, False)
        return EXIT_IDENTICAL
    names = faults_named(fault)
    from upguard_plugin.launch.demo.show import (  # slow to load: numpy, pyarrow, pydantic
        finding_text,
        findings_json,
        run_demo,
    )

    where = None if output is None else Path(output)
    findings = run_demo(names, where, say=lambda line: click.echo(line, err=True))
    lines = [findings_json(findings)] if form == "json" else map(finding_text, findings)
    write_report(lines, None, False)
    return EXIT_IDENTICAL if all(finding.is_right for finding in findings) else EXIT_DIVERGENT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; `arguments` default to the process's own."""
    try:
        code: Any = upguard.main(arguments, prog_name="upguard", standalone_mode=False)
        return int(code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
