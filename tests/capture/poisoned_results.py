"""Runs torch's own samples of its operators and prints a hash of each result, as JSON.

Started twice, with memory that malloc fills with other bytes (MALLOC_PERTURB_): a result whose hash
differs holds memory that nobody wrote.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import types
import unittest
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from upguard_plugin.capture.extents import is_tracked
from upguard_plugin.capture.operators.schema import describe

NUM_SAMPLES = 3


class Hashes(TorchDispatchMode):
    """Of each result of each operator: [its name, place, hash]."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = describe(func)
        if operator.is_view or operator.makes_uninitialised or operator.copies:
            return result
        for place, value in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if place not in operator.scratch and isinstance(value, torch.Tensor):
                with torch._C._DisableTorchDispatch():
                    self.found.append((func._schema.name, place, hash_of(value)))
        return result


def hash_of(tensor: torch.Tensor) -> str:
    if not is_tracked(tensor) or tensor.is_quantized or tensor._is_zerotensor():
        return ""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return hashlib.md5(whole.view(torch.uint8).numpy().tobytes()).hexdigest()


def backward_of(result: Any) -> None:
    results = result if isinstance(result, (tuple, list)) else [result]
    wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if wanted:
        sum(r.sum().abs() for r in wanted).backward()


def main() -> None:
    # torch's samples import a package that only torch's own tests need.
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase, stand_in.assert_expected_inline = unittest.TestCase, None
    sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db  # slow to load
    from torch.testing._internal.common_modules import module_db

    hashes = Hashes()
    for info in op_db:
        if info.name.removeprefix("new_").startswith(("empty", "resize_")):
            continue
        seed()
        try:
            samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=True))
        except Exception:  # a sample that needs what this machine lacks
            continue
        for sample in samples[:NUM_SAMPLES]:
            with hashes, torch.autograd.set_multithreading_enabled(False):
                try:
                    backward_of(info.op(sample.input, *sample.args, **sample.kwargs))
                except Exception:  # samples are also made to be refused
                    continue
    for info in module_db:
        seed()
        try:
            inputs = list(info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
            ))  # fmt: skip
        except Exception:
            continue
        for given in inputs[:NUM_SAMPLES]:
            made, passed = given.constructor_input, given.forward_input
            with hashes:
                try:
                    module = info.module_cls(*made.args, **made.kwargs)
                    backward_of(module(*passed.args, **passed.kwargs))
                except Exception:
                    continue
    print(json.dumps(hashes.found))


def seed() -> None:
    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
