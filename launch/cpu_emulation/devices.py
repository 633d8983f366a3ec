"""Device arguments: whatever says "cuda" means the CPU.

Factories, `Tensor.to`, `Module.to`, `torch.load`, autocast and device meshes take their device
through `on_cpu`; `Tensor.type()` answers clients "torch.cuda.FloatTensor", as Megatron sorts and
checks its parameters by that text. Only attributes are replaced: a TorchFunctionMode would be bound
to one thread and share a stack with capture.

`Tensor.cuda()` returns the tensor itself, as it does for a tensor that is on the GPU already. Code
that uses it to make a copy of a CPU tensor shares memory here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.device_mesh as device_mesh
import torch.utils._device

from upguard_plugin.launch.cpu_emulation.patches import Patches, caller_wants_truth

_FACTORIES = (
    "arange asarray as_tensor empty empty_like empty_permuted empty_strided eye fft.fftfreq "
    "fft.rfftfreq from_file full full_like hann_window hamming_window blackman_window "
    "bartlett_window kaiser_window linspace logspace normal ones ones_like rand rand_like randint "
    "randint_like randn randn_like randperm scalar_tensor sparse_coo_tensor tensor tril_indices "
    "triu_indices zeros zeros_like load"
)
_DEVICE_FIRST = "set_default_device is_autocast_enabled get_autocast_dtype"
_TENSOR_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
_DEVICE_KEYWORDS = ("device", "device_type", "map_location")
_TENSOR_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"


def on_cpu(device: Any) -> Any:
    """What to say to torch instead of `device`: "cuda", "cuda:1", its torch.device, or a number.

    Anything else is returned as it is, "cpu" and "meta" included.
    """
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device == "cuda" or device.startswith("cuda:") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    return device


def emulate_devices(patches: Patches) -> None:
    """Map device arguments to the CPU everywhere, and name tensor types as CUDA's for clients."""
    for path in _FACTORIES.split():
        owner, name = _locate(path)
        if hasattr(owner, name):
            _replace_factory(patches, owner, name)
    for name in _DEVICE_FIRST.split():
        patches.set(torch, name, _with_cpu(getattr(torch, name), place=0))
    for name in _TENSOR_METHODS.split():
        patches.set(torch.Tensor, name, _with_cpu(getattr(torch.Tensor, name)))
    patches.set(torch.Tensor, "to", _with_cpu(torch.Tensor.to, place=1))
    patches.set(torch.nn.Module, "to", _with_cpu(torch.nn.Module.to, place=1))
    patches.set(torch.nn.Module, "cuda", _stay)
    patches.set(torch.Tensor, "cuda", _stay)
    patches.set(torch.Tensor, "pin_memory", _stay)
    patches.set(torch.Tensor, "record_stream", _record_stream)
    patches.set(torch.Tensor, "type", _type_for_clients(torch.Tensor.type))
    device_context = torch.utils._device.DeviceContext  # what `with torch.device("cuda"):` makes
    for cls in (torch.autocast, torch.amp.GradScaler, device_mesh.DeviceMesh, device_context):
        patches.set(cls, "__init__", _with_cpu(cls.__init__, place=1))
    init_device_mesh = _with_cpu(device_mesh.init_device_mesh, place=0)
    for module in (device_mesh, torch.distributed):
        patches.set(module, "init_device_mesh", init_device_mesh)
    for kind in _TENSOR_TYPES.split():
        patches.set(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"), follow=False)


def _locate(path: str) -> tuple[Any, str]:
    *folders, name = path.split(".")
    return functools.reduce(getattr, folders, torch), name


def _replace_factory(patches: Patches, owner: Any, name: str) -> None:
    real = getattr(owner, name)
    mapped = _with_cpu(real)
    patches.set(owner, name, mapped)
    # torch.jit.script knows its operators by object identity.
    builtins = torch.jit._builtins._get_builtin_table()
    if id(real) in builtins:
        patches.set_item(builtins, id(mapped), builtins[id(real)])


def _with_cpu(real: Callable[..., Any], *, place: int | None = None) -> Callable[..., Any]:
    """`real` with its device keywords mapped, and the argument at `place` if one is given."""

    @functools.wraps(real)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        for keyword in _DEVICE_KEYWORDS:
            if keyword in kwargs:
                kwargs[keyword] = on_cpu(kwargs[keyword])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # there is no device to pin memory for
        if place is not None and len(args) > place:
            args = (*args[:place], on_cpu(args[place]), *args[place + 1 :])
        return real(*args, **kwargs)

    return mapped


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of moving to the GPU or to pinned memory."""
    return self


def _record_stream(self: torch.Tensor, stream: object) -> None:
    """Nothing to record: the CPU has one stream."""


def _type_for_clients(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch.")
            return real(self, dtype, *args, **kwargs)
        name = real(self)
        if caller_wants_truth() or self.device.type != "cpu":
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    return tensor_type
