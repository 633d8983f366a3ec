"""A write that torch does not show: the tensor was overwritten, and its reader is not blamed."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sysconfig
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

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


def by_address_of_storage(tensor: torch.Tensor) -> None:
    element = ctypes.c_float.from_address(tensor.untyped_storage().data_ptr() + 20)
    element.value += 1


def by_bare_address(tensor: torch.Tensor) -> None:
    """Without a word to Python: torch does not know that the address was taken."""
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


@pytest.mark.parametrize("write", [by_numpy, by_address, by_bare_address, by_address_of_storage])
def test_a_write_that_bypasses_torch_is_an_overwritten_tensor(clean, tmp_path, write):
    faulty = record(tmp_path / "faulty", level="op", before_step=overwriting(write), **SMALL)
    assert_overwritten(compare(clean, faulty))


@pytest.mark.parametrize("write", [by_numpy, by_address, by_bare_address])
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


# As one that is built against torch, it finds the memory of a tensor without a word to Python; here
# its address is an argument.
KERNEL = """
#include <Python.h>
const char *needed = "libc10.so";
static PyObject *add(PyObject *self, PyObject *args) {
    PyObject *tensor; Py_ssize_t address; double value;
    if (!PyArg_ParseTuple(args, "Ond", &tensor, &address, &value)) return NULL;
    ((float *)address)[5] += value;
    Py_RETURN_NONE;
}
static PyMethodDef functions[] = {{"add", add, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", NULL, -1, functions};
PyMODINIT_FUNC PyInit_kernel(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> ModuleType:
    """An extension module that nobody has imported by name: so does torch load what it builds."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.c").write_text(KERNEL)
    file = folder / f"kernel{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_paths()["include"]
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-I{include}", folder / "kernel.c", "-o", file], check=True
    )
    spec = importlib.util.spec_from_file_location("kernel", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_kernel(function: Callable[[], Any], value: float, tensor: torch.Tensor) -> None:
    function()(tensor, torch._C.TensorBase.data_ptr(tensor), value)


def test_the_function_of_an_extension_module_is_a_boundary(kernel, tmp_path):
    runs = [
        record(
            tmp_path / name, level="op", **SMALL,
            before_step=overwriting(partial(by_kernel, lambda: kernel.add, value)),
        )
        for name, value in (("none", 0.0), ("again", 0.0), ("one", 1.0))
    ]  # fmt: skip

    assert compare(runs[0], runs[1])["verdict"] == "identical"
    assert found(compare(runs[0], runs[2]), "step", "boundary", "operator", "role", "moment") == (
        1, "blocks.0.mlp", "kernel.add", "output", "after",
    )  # fmt: skip
    assert type(kernel.add).__name__ == "builtin_function_or_method"


def test_one_that_was_taken_out_of_its_module_before_has_overwritten_the_tensor(kernel, tmp_path):
    add = kernel.add
    runs = [
        record(
            tmp_path / name, level="op", **SMALL,
            before_step=overwriting(partial(by_kernel, lambda: add, value)),
        )
        for name, value in (("none", 0.0), ("one", 1.0))
    ]  # fmt: skip

    verdict = compare(*runs)

    assert found(verdict, "step", "boundary", "role") == (1, "blocks.0.mlp.fc2", "input")
    assert "overwritten in between" in verdict["first_divergence"]["explanation"]
