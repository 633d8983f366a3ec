"""What an operator's schema says of it: its name, what it writes, what it returns.

In:  a `torch._ops.OpOverload`.
Out: an `Operator`, plain data, made once per overload.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Their results hold whatever memory held before: not a value of the run, so never fingerprinted.
_UNINITIALISED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "resize_",
}  # fmt: skip
# They compute nothing of the run: bookkeeping of the profiler and of autograd.
_UNOBSERVED_NAMESPACES = {"profiler", "prim", "prims"}
_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


@dataclass(frozen=True, slots=True)
class Operator:
    """One overload of an operator."""

    name: str  # "aten.addmm"
    written: frozenset[int | str]  # positions of arguments it writes, or names of keyword-only ones
    is_view: bool  # its results are other looks at its arguments
    is_random: bool  # it draws from a generator
    is_foreach: bool  # element i of each list argument belongs together
    is_collective: bool  # seen by the collective probe; its buffers are in flight afterwards
    makes_uninitialised: bool
    is_observed: bool


@cache
def describe(overload: torch._ops.OpOverload) -> Operator:
    """Read an overload's schema, once: a run has some hundred overloads."""
    schema = overload._schema
    namespace = overload.namespace
    name = schema.name.split("::", 1)[1]
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(argument.name if argument.kwarg_only else position)
    aliases = [value.alias_info for value in schema.returns]
    return Operator(
        name=f"{namespace}.{name}",
        written=frozenset(written),
        is_view=bool(aliases) and not written and all(alias is not None for alias in aliases),
        is_random=torch.Tag.nondeterministic_seeded in overload.tags,
        is_foreach=name.startswith(("_foreach_", "_fused_", "_amp_foreach_")),
        is_collective=namespace in _COLLECTIVE_NAMESPACES,
        makes_uninitialised=namespace == "aten" and name in _UNINITIALISED,
        is_observed=namespace not in _UNOBSERVED_NAMESPACES,
    )
