"""Names of modules, parameters and buffers, found by object.

In:  the models as the user passed them, wrapped or not.
Out: for each object one canonical name, free of wrapper prefixes, so that a model has the same
     names under DDP, FSDP, torch.compile or a checkpoint wrapper as without.

A tied parameter has one canonical name (its first in the order of `named_parameters`, or the first
of the user's `tied` list); its other names are its aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import nn

from upguard_plugin.errors import ConfigError

WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"}
)
_WRAPPER_CLASSES = frozenset(
    {
        "DistributedDataParallel", "DataParallel", "OptimizedModule", "CheckpointWrapper",
        "FullyShardedDataParallel", "FlattenParamsWrapper", "DeepSpeedEngine", "PipelineEngine",
        "Float16Module", "OffloadWrapper",
    }
)  # fmt: skip
ROOT = "(root)"  # the name of a model that is the only one; its parts have bare names

Models = tuple[tuple[str, nn.Module], ...]
Rename = Callable[[str], str]


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module only forwards to the one inside, under a name that is dropped."""
    # mypy takes a class for as hashable as its instances.
    is_wrapper_class = _is_wrapper_class(type(module))  # type: ignore[arg-type]
    return is_wrapper_class and not WRAPPERS.isdisjoint(module._modules)


@lru_cache(maxsize=4096)
def _is_wrapper_class(cls: type) -> bool:
    return any(base.__name__ in _WRAPPER_CLASSES for base in cls.__mro__)


class ParameterNames:
    """Canonical names of everything in the models. `refresh` after the models have changed."""

    def __init__(
        self,
        models: Models,
        tied: Sequence[Sequence[str]] | None = None,
        *,
        whole: bool = True,
        rename: Rename | None = None,
    ) -> None:
        """tied: lists of names of one parameter, the canonical one first.

        whole: the models have all parameters; a pipeline stage need not have what `tied` names.
        rename: from a name in these models to the one in the whole model (global layer numbers).
        Raises ConfigError if `tied` names a parameter that a whole model does not have.
        """
        self._models = models
        self._whole = whole
        self.rename = rename or _same_name
        self._tied = tuple(tuple(names) for names in tied or ())
        self.modules: dict[str, nn.Module] = {}  # the innermost of each name
        self.parameters: dict[str, nn.Parameter] = {}  # by canonical name
        self.buffers: dict[str, torch.Tensor] = {}  # also those that are not persistent
        self.aliases: dict[str, tuple[str, ...]] = {}  # canonical name -> its other names
        self._by_id: dict[int, str] = {}
        self.roots = tuple(prefix.removesuffix(".") or ROOT for prefix, _ in models)
        self.refresh()

    def refresh(self) -> None:
        """Read the models again: parameters may have been replaced."""
        for table in (self.modules, self.parameters, self.buffers, self.aliases, self._by_id):
            table.clear()  # in place: others hold these tables
        canonical = {name: names[0] for names in self._tied for name in names}
        for name, module in self._walk():
            self._add_module(name, module, canonical)
        known = {*self.parameters, *(n for names in self.aliases.values() for n in names)}
        for name in canonical:
            if self._whole and name not in known:
                raise ConfigError(
                    f"tied names a parameter that no model has: {name!r}",
                    remedy="names are those of model.named_parameters(), without `module.`",
                )

    def walk(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of all models, parents first, wrappers included; shared modules repeat."""
        for name, module in self._walk():
            yield self.rename(name), module

    @property
    def tied(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters here that `tied` names, by canonical name: other stages hold them too."""
        names = dict.fromkeys(names[0] for names in self._tied)
        return [(name, self.parameters[name]) for name in names if name in self.parameters]

    def of(self, thing: torch.Tensor | nn.Module) -> str | None:
        """The canonical name of a parameter, buffer or module; None for anything else."""
        return self._by_id.get(id(thing))

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        for root, (_, model) in zip(self.roots, self._models, strict=True):
            yield from _walk(root, model)

    def _add_module(self, name: str, module: nn.Module, canonical: dict[str, str]) -> None:
        self.modules[self.rename(name)] = module
        self._by_id.setdefault(id(module), self.rename(name))
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                self._add_parameter(self.rename(_join(name, leaf)), parameter, canonical)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._by_id:
                whole_name = self.rename(_join(name, leaf))
                self.buffers[whole_name] = buffer
                self._by_id[id(buffer)] = whole_name

    def _add_parameter(self, name: str, parameter: nn.Parameter, canonical: dict[str, str]) -> None:
        first = self._by_id.get(id(parameter))
        if first is None:
            first = canonical.get(name, name)
            self._by_id[id(parameter)] = first
            # Tied parameters that are different objects (pipeline stages) keep their own name too.
            self.parameters[name if first in self.parameters else first] = parameter
        if name != first and name not in self.aliases.get(first, ()):
            self.aliases[first] = (*self.aliases.get(first, ()), name)


def _same_name(name: str) -> str:
    return name


def _join(module: str, leaf: str) -> str:
    """The name of a part: the root's name is not part of its children's names."""
    return leaf if module == ROOT else f"{module}.{leaf}"


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    wrapped = is_wrapper(module)
    for leaf, child in module._modules.items():
        if child is not None:
            inside = wrapped and leaf in WRAPPERS
            yield from _walk(name if inside else _join(name, leaf), child)


def clean_name(name: str) -> str:
    """A dotted name without any part that is a wrapper's: for names that others composed."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
