"""Whose each tensor of an optimizer is: a parameter of the model, its master, or parts of several.

In:  the model's parameters by name, the tensors that optimizers hold, and what an adapter knows.
Out: a name for each tensor, and `Part`s in the optimizers' order.

A parameter of an optimizer that no model has is a master: it takes the name of the parameter whose
`main_param` it is (Megatron), else of the one that stands at its place in order and has its shape.
Where one tensor of an optimizer holds parts of several parameters (ZeRO), an adapter says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from upguard_plugin.capture.gradients import NamedParameter
from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.parts import Fragment, Part


class Masters:
    """The names of what optimizers hold. Adapters set `known` and `fragments_of`."""

    def __init__(self, names: ParameterNames) -> None:
        # What an adapter knows of masters: names by the identity of the tensor;
        self.known: Callable[[], Mapping[int, str]] = dict
        # ... of the parameters whose parts one flat tensor of an optimizer holds.
        self.fragments_of: Callable[[Tensor], Sequence[Fragment]] = _no_fragments
        self._names = names
        self._masters: dict[int, str] = {}

    def find(self, held: Iterable[Tensor]) -> None:
        """Name the masters among all that the optimizers hold now."""
        names = self._names
        foreign: dict[int, Tensor] = {}
        owned: set[str] = set()
        for parameter in held:
            name = names.of(parameter)
            if name is not None:
                owned.add(name)
            elif not self.fragments_of(parameter):
                foreign[id(parameter)] = parameter
        self._masters = {}
        for key, name in self.known().items():
            if foreign.pop(key, None) is not None:
                self._masters[key] = name
                owned.add(name)
        for name, parameter in names.parameters.items():
            master = getattr(parameter, "main_param", None)
            if id(master) in foreign:
                self._masters[id(master)] = name
                owned.add(name)
                del foreign[id(master)]
        if foreign:
            free = [(n, p) for n, p in names.parameters.items() if n not in owned]
            matched = match_masters(list(foreign.values()), free)
            self._masters |= dict(zip(foreign, matched, strict=True))

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a model's parameter or of the one it is the master of."""
        return self._names.of(parameter) or self._masters.get(id(parameter))

    def names_of(self, parameter: Tensor) -> list[str]:
        """The names of all parameters that a tensor holds; "?" for one that nobody knows."""
        name = self.name_of(parameter)
        fragments = () if name is not None else self.fragments_of(parameter)
        return [fragment.name for fragment in fragments] or [name or "?"]

    def split(self, parameters: Sequence[Tensor]) -> tuple[list[Part], list[Part]]:
        """The optimizer's parameters in group order: (the model's own, masters)."""
        owned, masters = [], []
        for parameter in parameters:
            name = self._names.of(parameter)
            if name is not None:
                owned.append(Part(name, parameter))
            elif id(parameter) in self._masters:
                masters.append(Part(self._masters[id(parameter)], parameter))
            else:
                masters += [Part(f.name, parameter, f) for f in self.fragments_of(parameter)]
        return owned, masters

    def lies_in_weight(self, part: Part) -> bool:
        """Whether it is a stretch of its weight itself: no master of it."""
        weight = self._names.parameters.get(part.name)
        return weight is not None and part.lies_in(weight)


def match_masters(masters: Sequence[Tensor], parameters: Sequence[NamedParameter]) -> list[str]:
    """Name masters by the parameters of the same shapes in the same order, all or none.

    Where they cannot be told that way, they are numbered: "master0", "master1", ...
    """
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    shapes = [m.shape for m in masters]
    for candidates in (trainable, parameters):
        if [p.shape for _, p in candidates] == shapes:
            return [name for name, _ in candidates]
    return [f"master{i}" for i in range(len(masters))]


def _no_fragments(parameter: Tensor) -> Sequence[Fragment]:
    return ()
