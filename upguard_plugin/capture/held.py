"""What an optimizer holds: parameters, groups, state, whoever made it.

In:  any object with `param_groups` and `state`.
Out: plain lists; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from upguard_plugin.capture.tensors import tensors_in

Groups = Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]]  # each with its parameters


def leaves_of(state: Any) -> list[tuple[str, Any]]:
    """(slot, tensor or value) of a parameter's state, however it is nested."""
    return [leaf for key, value in (state or {}).items() for leaf in tensors_in(value, str(key))]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def groups_of(optimizer: Any) -> Groups:
    """The hyper-parameters and parameters of each group."""
    return [(group, group["params"]) for group in getattr(optimizer, "param_groups", ())]


def state_of(optimizer: Any) -> Mapping[Any, Any]:
    """What it keeps of each parameter."""
    return getattr(optimizer, "state", {})


def innermost(optimizer: Any) -> Any:
    """The optimizer that a wrapper without hooks of its own passes its steps on to."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not hasattr(inner, "param_groups"):
            return optimizer
        optimizer = inner
    return optimizer
