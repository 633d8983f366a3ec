"""Which modules are boundaries, and what is known of each before it is first called.

In:  the models and the config.
Out: one `Boundary` per module to hook. Wrappers (DDP, FSDP, checkpoint) are not boundaries: what
     they wrap is. A compiled module is one, and nothing inside it: a hook there would change what
     the compiler makes of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from upguard_plugin.capture.names import ParameterNames, is_wrapper
from upguard_plugin.config import UpGuardConfig
from upguard_plugin.records import Source

# Looking at the generators around every call would cost as much as all else that a call costs.
_NEVER_DRAW = frozenset(
    {
        nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d,
        nn.BatchNorm2d, nn.GroupNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax,
        nn.Identity, nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, nn.CrossEntropyLoss, nn.MSELoss,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """A module that is hooked."""

    name: str
    operator: str  # the module's class
    source: Source | None  # where its forward is defined
    parameters: tuple[tuple[str, str], ...]  # (canonical name, attribute) of those it owns itself
    is_loss: bool
    may_draw: bool  # random numbers: False for classes of torch that never do
    recorded: bool  # False: a model's root that is hooked to know the phase only


def find_boundaries(
    names: ParameterNames, config: UpGuardConfig
) -> tuple[list[tuple[nn.Module, Boundary]], list[str]]:
    """The modules to hook, parents first, and sentences about those that cannot be looked into."""
    found: list[tuple[nn.Module, Boundary]] = []
    notes: list[str] = []
    known: set[int] = set()  # hooked already, or inside a compiled module
    for name, module in names.walk():
        if id(module) in known:
            continue
        known.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            known.update(id(part) for part in module.modules())
            notes.append(f"{name} was not recorded: a ScriptModule takes no hooks")
            continue
        if is_compiled(module):
            known.update(id(part) for part in module.modules())
            notes.append(f"inside {name} nothing was recorded: it is compiled")
        elif is_wrapper(module):
            continue
        selected = config.level != "stage" and config.selected_module(name)
        # At level op all are hooked: the innermost one that runs is where an operator belongs.
        if selected or name in names.roots or config.level == "op":
            found.append((module, _boundary(name, module, names, selected)))
    return found, notes


def is_compiled(module: nn.Module) -> bool:
    """Whether the module's inside runs as compiled code that hooks must not enter."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _boundary(name: str, module: nn.Module, names: ParameterNames, recorded: bool) -> Boundary:
    parameters = tuple(
        (names.of(parameter) or leaf, leaf)
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    )
    operator = type(module).__name__
    is_loss = operator.endswith("Loss") or isinstance(module, nn.modules.loss._Loss)
    source = source_of(type(module))  # type: ignore[arg-type]
    may_draw = type(module) not in _NEVER_DRAW
    return Boundary(name, operator, source, parameters, is_loss, may_draw, recorded)


@lru_cache(maxsize=4096)
def source_of(cls: type) -> Source | None:
    """Where a module class defines its forward; the file as it is imported: `megatron/core/...`."""
    forward = inspect.unwrap(getattr(cls, "forward", cls))
    code = getattr(forward, "__code__", None)
    if code is None:
        return None
    return Source(_short_path(code.co_filename), code.co_firstlineno)


def _short_path(file: str) -> str:
    path = Path(file)
    for entry in _import_paths():
        if path.is_relative_to(entry):
            return str(path.relative_to(entry))
    return path.name


def _import_paths() -> Iterator[Path]:
    """The import path, most specific first, so that a package keeps its full dotted path."""
    return iter(sorted((Path(p) for p in sys.path if p), key=lambda p: -len(p.parts)))
