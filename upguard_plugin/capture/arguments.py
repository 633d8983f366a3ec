"""What a training loop hands to `enable` and to the guard: wrong types are refused in a sentence.

A value is never read here, and never printed: it may be a tensor on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from upguard_plugin.errors import ConfigError
from upguard_plugin.records import PHASES, ROLES, Placement

Kinds = type | tuple[type, ...]

NUMBER = (bool, int, float, np.bool_, np.integer, np.floating)
WHOLE = (int, np.integer)


def expect(call: str, what: str, value: object, kinds: Kinds, words: str) -> None:
    """Raises ConfigError unless the value is of one of these kinds; words: what they are."""
    if not isinstance(value, kinds):
        kind = type(value).__name__
        raise ConfigError(f"cannot call {call}: {what} is of type {kind}, not {words}")


def expect_microbatch(k: object) -> None:
    """Raises ConfigError for what counts no micro-batch."""
    expect("guard.microbatch", "k", k, WHOLE, "a whole number")
    if isinstance(k, WHOLE) and k < 0:
        raise ConfigError(f"cannot call guard.microbatch: k is {k}; micro-batches count from 0")


def is_scalar(value: object) -> bool:
    """Whether `guard.scalar` takes it."""
    return isinstance(value, (*NUMBER, Tensor))


def expect_scalar(name: object, value: object) -> None:
    """Raises ConfigError for what is no number under a name."""
    expect("guard.scalar", "the name", name, str, "text")
    expect(f"guard.scalar({name!r}, ...)", "the value", value, (*NUMBER, Tensor), "a number")


def expect_batch(name: object, batch_dim: object) -> None:
    """Raises ConfigError for a batch without a name, or whose samples no dim counts."""
    expect("guard.data", "the name", name, str, "text")
    expect(f"guard.data({name!r}, ...)", "batch_dim", batch_dim, int, "a whole number")


def expect_step(iteration: object, mark: object) -> None:
    """Raises ConfigError for an iteration that is no number, a mark that is no text."""
    expect("guard.step", "iteration", iteration, (*WHOLE, type(None)), "a whole number")
    expect("guard.step", "mark", mark, (str, type(None)), "text")


def expect_event(
    boundary: object, tensor: object, role: object, slot: object, phase: object, placement: object
) -> None:
    """Raises ConfigError for what `guard.observe` cannot record."""
    expect("guard.observe", "the boundary", boundary, str, "text")
    call = f"guard.observe({boundary!r}, ...)"
    expect(call, "the tensor", tensor, Tensor, "a torch.Tensor")
    expect(call, "slot", slot, str, "text")
    expect(call, "placement", placement, (str, Placement, type(None)), "a placement or its text")
    if role not in ROLES or (phase is not None and phase not in PHASES):
        raise ConfigError(f"cannot observe {boundary}: unknown role {role!r} or phase {phase!r}")


def expect_setup(optimizers: Sequence[Any], tied: Any) -> None:
    """Raises ConfigError for what is no optimizer, and for names that are not in lists."""
    for optimizer in optimizers:
        if not (hasattr(optimizer, "param_groups") or hasattr(optimizer, "step")):
            raise ConfigError(
                f"cannot call enable: the optimizer is of type {type(optimizer).__name__}, which "
                "has neither param_groups nor step"
            )
    lists = (list, tuple, type(None))
    expect("enable", "tied", tied, lists, "a list of lists of names")
    for names in tied or ():
        expect("enable", "an entry of tied", names, (list, tuple), "a list of names")
