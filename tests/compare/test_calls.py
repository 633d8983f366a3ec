"""Calls of operators that changed places, and calls that are other ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.memory_run import run
from upguard_plugin.compare.runs import compare_runs

Call = Callable[[int, str], str]


def zeroed(number: int, shape: str, operator: str = "zero_") -> str:
    """DDP's reducer zeroes the gradients of unused parameters, in the order of their addresses."""
    return f"accumulate - output c.bias/0#{number} zeros aten.{operator} {shape} moment=after"


def copied(number: int, shape: str) -> str:
    return (
        f"accumulate - input  c.bias/1#{number} x aten.copy_ {shape}\n"
        f"accumulate - output c.bias/0#{number} x aten.copy_ {shape} moment=after"
    )


def made(number: int, shape: str) -> str:
    return zeroed(number, shape, "relu_")


def verdict(call: Call, baseline: list[str], target: list[str]) -> str:
    """Of runs that call it with these shapes."""
    runs = [
        run("\n".join(call(number, shape) for number, shape in enumerate(shapes)))
        for shapes in (baseline, target)
    ]
    return compare_runs(*runs).verdict


@pytest.mark.parametrize("call", [zeroed, copied])
def test_calls_of_two_shapes_that_changed_places_are_no_difference(call):
    assert verdict(call, ["[8]", "[8,8]"], ["[8,8]", "[8]"]) == "identical"
    assert verdict(call, ["[8]", "[8,8]"], ["[8]", "[9]"]) == "divergent"


def test_results_alone_do_not_tell_that_calls_changed_places():
    assert verdict(made, ["[8]", "[8,8]"], ["[8,8]", "[8]"]) == "divergent"
