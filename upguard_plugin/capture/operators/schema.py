"""What an operator's schema says of it: its name, what it writes, what it returns.

In:  a `torch._ops.OpOverload`.
Out: an `Operator`, plain data, made once per overload.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from upguard_plugin.capture.contents import MOVES

# Their results hold whatever memory held before: not a value of the run, so never fingerprinted.
_UNINITIALISED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "resize_",
}  # fmt: skip
# What was in the memory they write plays no part: it may be nothing yet, or still be on its way.
_OVERWRITING = {
    "copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_", "log_normal_",
    "cauchy_", "geometric_", "eye_", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
# Their last argument, or the list they get, is copied as it is: what nobody wrote stays no value.
_COPYING = {"copy_", "clone", "_to_copy", "cat", "stack"}
# They compute nothing of the run: bookkeeping of the profiler and of autograd.
_UNOBSERVED_NAMESPACES = {"profiler", "prim", "prims"}
_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# Arguments that are written although the schema does not say so. `tests/capture/
# test_operator_writes.py` runs those that run on a CPU, and looks for others.
UNANNOTATED_WRITES: dict[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
}
# Results that are partly, or without dropout wholly, memory that nobody wrote: work space that an
# operator leaves for its backward. By place, and by name in all schemas that have such a result.
# `tests/capture/test_operator_blanks.py` looks for others among those that run on a CPU.
SCRATCH_RESULTS: dict[str, tuple[int, ...]] = {
    "aten::mkldnn_rnn_layer": (3,),
    "aten::_ctc_loss": (1,),
    "aten::_cudnn_rnn": (4,),
    "aten::miopen_rnn": (4,),
    "aten::cudnn_batch_norm": (3,),
}
_SCRATCH_NAMES = {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}
# Overloads are kept with what was read of them, so that the id of one stays its own.
_known: dict[int, tuple[torch._ops.OpOverload, Operator]] = {}
# Its first result is what it wrote into the memory of an argument.
_WRITES_ITS_RESULT = {"fsdp::all_gather_copy_in"}


@dataclass(frozen=True, slots=True)
class Operator:
    """One overload of an operator."""

    name: str  # "aten.addmm"
    written: frozenset[int | str]  # positions of arguments it writes, or names of keyword-only ones
    overwrites: bool  # what was in the memory it writes plays no part
    copies: bool  # what it writes or returns has the value of its last argument, or of a list
    is_view: bool  # its results are other looks at its arguments
    is_random: bool  # it draws from a generator
    is_foreach: bool  # element i of each list argument belongs together
    is_collective: bool  # seen by the collective probe; its buffers are in flight afterwards
    makes_uninitialised: bool
    writes_its_result: bool
    is_observed: bool
    is_foreign: bool  # not torch's own: its schema may be silent on what it writes
    scratch: frozenset[int]  # places of results that hold no value of the run
    returns_written: bool  # its results are arguments that it wrote, nothing else
    looked_at: tuple[int | str, ...] | None  # arguments to follow if none is recorded; None: all
    moves: bool = False  # it puts elements elsewhere, in their order
    is_silent: bool = False  # it makes no tensor and writes none
    reshapes: bool = False  # it writes how a tensor lies in memory, not the memory

    @property
    def has_effects(self) -> bool:
        """Whether it has to be followed where it is not recorded."""
        return bool(self.written) or self.is_foreign or self.makes_uninitialised


def describe(overload: torch._ops.OpOverload) -> Operator:
    """What the schema says, read once: a run has some hundred overloads."""
    known = _known.get(id(overload))  # by id: overloads are slow to hash
    if known is None:
        known = _known[id(overload)] = (overload, _read(overload))
    return known[1]


def _read(overload: torch._ops.OpOverload) -> Operator:
    schema = overload._schema
    namespace = overload.namespace
    name = schema.name.split("::", 1)[1]
    unannotated = UNANNOTATED_WRITES.get(schema.name, ())
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        annotated = argument.alias_info is not None and argument.alias_info.is_write
        if annotated or argument.name in unannotated:
            written.add(argument.name if argument.kwarg_only else position)
    aliases = [value.alias_info for value in schema.returns]
    returns_written = bool(written) and all(
        alias is not None and alias.is_write for alias in aliases
    )
    is_foreach = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
    is_random = torch.Tag.nondeterministic_seeded in overload.tags
    # Its results may share memory with any argument, or the others tell whom or where it is for.
    shares = not returns_written if written else any(aliases)
    copies = namespace == "aten" and name in _COPYING
    any_matters = namespace != "aten" or shares or is_foreach or is_random or copies
    is_silent = namespace == "aten" and not written and not any(map(_holds_tensors, schema.returns))
    return Operator(
        name=f"{namespace}.{name}",
        written=frozenset(written),
        overwrites=namespace == "aten" and name in _OVERWRITING,
        copies=copies,
        # `set_` gives a tensor another storage: it writes no memory.
        is_view=name == "set_"
        or (bool(aliases) and not written and all(alias is not None for alias in aliases)),
        is_random=is_random,
        is_foreach=is_foreach,
        is_collective=namespace in _COLLECTIVE_NAMESPACES,
        makes_uninitialised=namespace == "aten" and name in _UNINITIALISED,
        writes_its_result=schema.name in _WRITES_ITS_RESULT,
        is_observed=namespace not in _UNOBSERVED_NAMESPACES,
        is_foreign=namespace != "aten",
        scratch=frozenset(
            place
            for place, value in enumerate(schema.returns)
            if place in SCRATCH_RESULTS.get(schema.name, ()) or value.name in _SCRATCH_NAMES
        ),
        returns_written=returns_written,
        looked_at=None if any_matters else tuple(sorted(written, key=str)),
        moves=namespace == "aten" and name in MOVES,
        is_silent=is_silent,
        reshapes=torch.Tag.inplace_view in overload.tags,
    )


def _holds_tensors(value: Any) -> bool:
    return "Tensor" in str(value.type)


@cache
def opaque_operator(name: str, written: frozenset[int | str] | None = None) -> Operator:
    """Code that is no operator, but a boundary like one: what it calls may not be seen."""
    return Operator(
        name=name,
        written=written or frozenset(),
        overwrites=False,
        copies=False,
        is_view=False,
        is_random=False,
        is_foreach=False,
        is_collective=False,
        makes_uninitialised=False,
        writes_its_result=False,
        is_observed=True,
        is_foreign=True,
        scratch=frozenset(),
        returns_written=False,
        looked_at=None,
    )
