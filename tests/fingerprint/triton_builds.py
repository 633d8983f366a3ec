"""Run by test_triton.py, not in the interpreter: the kernels are built for a GPU elsewhere."""

from __future__ import annotations

import pytest
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from upguard_plugin.fingerprint import triton_kernels as kernels

HOPPER = GPUTarget("cuda", 90, 32)
SWEEP = [f"{name}{dim}" for dim in range(4) for name in ("size", "memory", "logical")]
PLAIN = {"MEASURED": False, "BY_TABLE": False, "SIZE": 0}
SKETCHED = {"MEASURED": True, "BY_TABLE": False, "SIZE": 64}
POINTERS = {"table": "*i32", "keys_b": "*i64", "out": "*i64", "words": "*i32"}
MEASURES = {"numbers": "*fp32", "column_signs": "*fp64", "measures": "*fp64"}

BUILDS = {
    "small": (kernels.hash_small, {"table": "*i64", "keys_b": "*i64"}, {}),
    "blocks": (
        kernels.hash_blocks,
        POINTERS,
        {**PLAIN, "BLOCKS": 16, "IN_TABLE": True, "WITH_SUM": False, "WIDTH": 1, "numbers": None,
         "values": None, "column_signs": None, "measures": None},
    ),
    "blocks with a sketch": (
        kernels.hash_blocks,
        POINTERS | MEASURES,
        {**SKETCHED, "BLOCKS": 16, "IN_TABLE": False, "WITH_SUM": True, "WIDTH": 4, "values": None},
    ),
    "elements": (
        kernels.hash_elements,
        {"elements": "*i16", "keys_b": "*i64", "out": "*i64"},
        {**PLAIN, "WIDTH": 2, "ELEMENTS": 1024, "WITH_SUM": False, "values": None,
         "column_signs": None, "measures": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
def test_a_kernel_is_built_for_a_gpu(name):
    kernel, pointers, constants = BUILDS[name]
    signature = {
        argument: "constexpr" if argument in constants else pointers.get(argument, "i64")
        for argument in kernel.arg_names
    }

    built = build(ASTSource(kernel, signature, constexprs=constants), target=HOPPER)

    assert ".target sm_90" in built.asm["ptx"]
