"""How an adapter begins to record: as `enable`, but a failure of ours never ends a training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from upguard_plugin.errors import UpGuardError

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard


def attach(make_guard: Callable[[], Guard], what: str) -> Guard | None:
    """The guard that `make_guard` returns; None, with a line on stderr, where it fails.

    what: what is not recorded then, for that line. A wrong setting or an unusable run directory is
    the user's to mend, before the first step: those errors (UpGuardError) are raised.
    """
    try:
        return make_guard()
    except UpGuardError:
        raise
    except Exception as error:
        say(f"not recorded: {what}: {type(error).__name__}: {error}")
        return None


def say(text: str) -> None:
    """One line on stderr. stdout belongs to the training."""
    print(f"upguard: {text}", file=sys.stderr, flush=True)
