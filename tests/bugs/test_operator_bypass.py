"""A write that torch does not show: the tensor was overwritten, and its reader is not blamed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

import upguard_plugin
from tests.bugs.training import Deed, compare, found, record

SMALL = {"num_layers": 1, "width": 16, "num_heads": 2, "vocabulary": 32, "length": 8}
WIDE = SMALL | {"width": 64, "length": 32}


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy().reshape(-1)[5] += 1


def by_address(tensor: torch.Tensor) -> None:
    element = ctypes.c_float.from_address(tensor.data_ptr() + 20)
    element.value += 1


def by_kernel(tensor: torch.Tensor) -> None:
    """As a C++ extension does it: it takes the tensor, and the address without a word to Python."""
    address = torch._C.TensorBase.data_ptr(tensor)
    memory = (ctypes.c_float * tensor.numel()).from_address(address)
    np.ctypeslib.as_array(memory)[:] *= 2


def overwriting(write: Callable[[torch.Tensor], None]) -> Deed:
    """From step 1 on, the output of an activation is overwritten behind torch's back."""

    def plant(model, optimizer, step):
        if step == 1:
            act = model.blocks[0].mlp.act
            act.register_forward_hook(lambda module, args, output: write(output))

    return plant


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return record(tmp_path_factory.mktemp("clean") / "clean", level="op", **SMALL)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Its activations are longer than what is hashed each time that it is read."""
    return record(tmp_path_factory.mktemp("wide") / "wide", level="op", **WIDE)


@pytest.mark.parametrize("write", [by_numpy, by_address, by_kernel])
def test_a_write_that_bypasses_torch_is_an_overwritten_tensor(clean, tmp_path, write):
    faulty = record(tmp_path / "faulty", level="op", before_step=overwriting(write), **SMALL)
    assert_overwritten(compare(clean, faulty))


@pytest.mark.parametrize("write", [by_numpy, by_address, by_kernel])
def test_so_is_one_of_a_long_tensor(wide, tmp_path, write):
    faulty = record(tmp_path / "faulty", level="op", before_step=overwriting(write), **WIDE)
    assert_overwritten(compare(wide, faulty))


def assert_overwritten(verdict: dict) -> None:
    assert found(verdict, "step", "phase", "boundary", "role") == (
        1, "forward", "blocks.0.mlp.fc2", "input",
    )  # fmt: skip
    first = verdict["first_divergence"]
    assert "overwritten in between" in first["explanation"]
    assert first["producer"]["boundary"] == "blocks.0.mlp.act"


def test_an_array_that_is_only_read_changes_nothing(clean, tmp_path):
    def read(tensor: torch.Tensor) -> None:
        tensor.detach().numpy().sum()

    again = record(tmp_path / "again", level="op", before_step=overwriting(read), **SMALL)
    assert compare(clean, again)["verdict"] == "identical"


def test_a_number_that_was_expanded_and_overwritten_is_seen(tmp_path):
    """Its elements are many, its bytes are few."""

    def run(name: str, factor: float):
        model = torch.nn.Identity()
        settings = {"level": "op", "output_dir": str(tmp_path / name)}
        with upguard_plugin.enable(model, None, settings) as guard:
            number = torch.full((), 2.0)
            many = number.expand(100, 100)
            first = many.sum()
            memory = (ctypes.c_float * 1).from_address(torch._C.TensorBase.data_ptr(number))
            memory[0] *= factor
            (first + many.mean()).item()
            guard.step()
        return tmp_path / name

    first = compare(run("baseline", 1.0), run("target", 3.0))["first_divergence"]
    assert (first["operator"], first["role"], first["slot"]) == ("aten.mean", "input", "args.0")
    assert "overwritten in between" in first["explanation"]
