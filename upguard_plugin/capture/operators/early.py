"""Operators that use the output of a collective before the program has waited for it.

In:  an operator with its arguments, while some output is under way.
Out: what it uses of that, to whoever follows the collectives.

An operator that only looks at shapes, or changes them in place, uses nothing, nor does code that
may wait inside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from upguard_plugin.capture.collectives.caller import find_caller
from upguard_plugin.capture.collectives.under_way import UnderWay, Use
from upguard_plugin.capture.operators.arguments import Argument
from upguard_plugin.capture.operators.schema import Operator


def look_for_use(
    under_way: UnderWay, operator: Operator, arguments: Sequence[Argument], phase: str
) -> None:
    """Tell of all memory that the operator is about to read or write."""
    if operator.reshapes:
        for argument in arguments:
            under_way.reshaped(argument.tensor)
        return
    if _looks_at_shapes(operator.name):
        return
    source = None
    for argument in arguments:
        if under_way.touches(argument.tensor):
            source = source or find_caller().source
            use = Use(operator.name, argument.key in operator.written, phase, source)
            under_way.use(argument.tensor, use)


@lru_cache(maxsize=4096)
def _looks_at_shapes(name: str) -> bool:
    namespace, _, short = name.partition(".")
    if namespace == "autograd":  # a Function: what it reads comes by itself
        return True
    return namespace == "aten" and (
        short.endswith("_like") or short.startswith(("new_", "empty")) or short in _SILENT
    )


_SILENT = frozenset(("record_stream", "is_pinned", "is_same_size"))
