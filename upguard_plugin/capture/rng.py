"""States of random generators: Python's, numpy's, torch's, and generators that a model owns.

In:  the process's generators and those found in the attributes of modules.
Out: one `rng` value per generator and look; no generator is moved by looking at it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

State = bytes | Tensor
Source = torch.Generator | Callable[[], State]

# torch's CPU state is a C struct; the bytes between these two fields and after the second pad it
# to its alignment and are never written.
_CPU_STATE_BYTES = 5056
_CPU_FIELDS = (slice(0, 5044), slice(5048, 5053))


def read_generators(
    modules: Mapping[str, nn.Module], sources: Mapping[str, Source]
) -> Iterator[tuple[str, State]]:
    """(boundary, state) of every generator, in an order that the program fixes.

    modules: by their names; generators among their attributes are found.
    sources: further generators by name, or functions that return a state.
    """
    yield "rng.python", python_state()
    yield "rng.numpy", numpy_state()
    yield "rng.torch_cpu", generator_state(torch.default_generator)
    # Read from the tuple itself: it is empty until CUDA is in use, whatever an emulation says.
    for index, generator in enumerate(torch.cuda.default_generators):
        yield f"rng.cuda{index}", generator_state(generator)
    for name, module in modules.items():
        # By type: modules have many attributes, and isinstance asks the class's metaclass.
        if torch.Generator not in map(type, vars(module).values()):
            continue
        for attribute, value in vars(module).items():
            if type(value) is torch.Generator:
                path = attribute if name == "(root)" else f"{name}.{attribute}"
                yield f"rng.{path}", generator_state(value)
    for name, source in sources.items():
        state = generator_state(source) if isinstance(source, torch.Generator) else source()
        yield f"rng.{name}", state


def look() -> dict[str, bytes]:
    """States of the generators that operators draw from when they are given none, by slot.

    Cheap enough for every module call. Empty while a CUDA graph is captured: its draws come later.
    """
    states = {"torch_cpu": generator_state(torch.default_generator)}
    if torch.cuda.default_generators:
        if torch.cuda.is_current_stream_capturing():
            return {}
        current = torch.cuda.current_device()
        states["cuda"] = generator_state(torch.cuda.default_generators[current])
    return states


def python_state() -> bytes:
    """State of the `random` module."""
    version, words, gauss = random.getstate()
    return array("I", words).tobytes() + repr((version, gauss)).encode()


def numpy_state() -> bytes:
    """State of numpy's global generator."""
    name, words, position, has_gauss, gauss = np.random.get_state()
    rest = (str(name), int(position), float(gauss) if has_gauss else None)
    return np.asarray(words).tobytes() + repr(rest).encode()


def generator_state(generator: torch.Generator) -> bytes:
    """State of a torch generator. Does not wait for its device."""
    with torch._C._DisableTorchDispatch():  # none of the training's operators
        return state_bytes(generator.get_state())


def state_bytes(state: Tensor) -> bytes:
    """The bytes that count of what `get_state` or `torch.get_rng_state` gave."""
    found = state.numpy().tobytes()
    if len(found) == _CPU_STATE_BYTES:
        return b"".join(found[field] for field in _CPU_FIELDS)
    return found


def default_generator(device: Any) -> torch.Generator | None:
    """The generator an operator on the device draws from, where it can be read without waiting."""
    device = torch.device(device or "cpu")
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
