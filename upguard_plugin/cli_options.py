"""What the verbs of the `upguard` command have in common: options, reports, errors.

In:  a verb's arguments, the lines of its report.
Out: what is printed or written, and an exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from upguard_plugin.errors import UpGuardError, UsageError

Verb = TypeVar("Verb", bound=Callable[..., Any])


class _Failure(click.ClickException):
    """An error of ours, as click shows it: the message alone."""

    def __init__(self, error: UpGuardError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc]  # click asks the instance

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=True)


class Verbs(click.Group):
    """Gives a verb's exit code and our errors to whoever runs the command: shell or test."""

    def invoke(self, ctx: click.Context) -> None:
        try:
            ctx.exit(super().invoke(ctx))
        except UpGuardError as error:
            raise _Failure(error) from error


def output_options(verb: Verb) -> Verb:
    """--format, --output, --quiet, --verbose: how a verb reports."""
    for option in (
        click.option("--verbose", is_flag=True, help="Say more: every rank, every note."),
        click.option("--quiet", is_flag=True, help="Print nothing; the exit code is the answer."),
        click.option("--output", type=click.Path(dir_okay=False), help="Write the report here."),
        click.option("--format", "form", type=click.Choice(["text", "json"]), default="text"),
    ):
        verb = option(verb)
    return verb


def selection_options(verb: Verb) -> Verb:
    """--steps, --ranks, --modules, --roles: which events a verb looks at."""
    for option in (
        click.option("--roles", metavar="LIST", help="Only these roles: param,grad."),
        click.option("--modules", metavar="GLOB", help="Only boundaries like blocks.*.mlp,head."),
        click.option("--ranks", metavar="LIST", help="Only these ranks: 0,2-5."),
        click.option("--steps", metavar="LIST", help="Only these steps: 4-6,10 or 4-."),
    ):
        verb = option(verb)
    return verb


def write_report(lines: Iterable[str], output: str | None, quiet: bool) -> None:
    """Print the lines, or write them to the file `output`.

    Raises UsageError if the file cannot be written.
    """
    if quiet and output is None:
        return
    if output is None:
        _print(lines)
        return
    lines = iter(lines)
    first = list(islice(lines, 1))  # before the file is there: there may be nothing to report
    try:
        with Path(output).open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in chain(first, lines))
    except OSError as error:
        raise UsageError(
            f"cannot write the report to {output}: {error.strerror}",
            remedy="name another file with --output",
        ) from None


def _print(lines: Iterable[str]) -> None:
    try:
        for line in lines:
            click.echo(line)
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough: the exit code is still the answer.
        # What is left in our buffer must go somewhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
