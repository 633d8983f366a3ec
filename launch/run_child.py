"""One child process, with everything that happens to us passed on to it.

In:  a command, its environment, and the signals that arrive while it runs.
Out: its exit code, as a shell would give it: 128 + n after signal n.

Ctrl-C on a terminal reaches the whole foreground group: the child has it already, and must not get
it twice. `kill` reaches us alone. The kernel tells which it was, so signals are waited for instead
of handled.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upguard_plugin.errors import UsageError

_SI_KERNEL = 0x80  # si_code of a signal that the terminal sent (Linux, <asm-generic/siginfo.h>)
_PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    exit_code: int
    interrupted: bool  # by a signal that reached us too


def run_child(command: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Run a command to its end, with our stdin, stdout and stderr.

    Raises UsageError if it cannot be started. Call it from the main thread.
    """
    waited_for = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        child = _start(command, environ, before)
        return _wait(child, waited_for)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], environ: Mapping[str, str], mask: set[int | signal.Signals]
) -> subprocess.Popen[bytes]:
    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(command, env=environ, preexec_fn=unblock)
    except FileNotFoundError:
        raise UsageError(f"cannot run {command[0]}: no such command") from None
    except OSError as error:
        remedy = "upguard run -- python " + command[0] if command[0].endswith(".py") else ""
        raise UsageError(f"cannot run {command[0]}: {error.strerror}", remedy=remedy) from None


def _wait(child: subprocess.Popen[bytes], waited_for: set[signal.Signals]) -> Ended:
    interrupted = False
    while child.poll() is None:
        arrived = signal.sigwaitinfo(waited_for)
        if arrived.si_signo == signal.SIGCHLD:
            continue
        interrupted = True
        if arrived.si_code != _SI_KERNEL and child.poll() is None:
            os.kill(child.pid, arrived.si_signo)
    code = child.returncode
    return Ended(128 - code if code < 0 else code, interrupted)
