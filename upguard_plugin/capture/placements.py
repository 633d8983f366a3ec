"""What the user, or an adapter, says of layouts and placements, looked up for every boundary.

In:  `layout={"tp": group, "dp": 4}` and `placements={"blocks.*.fc1.weight": "o[tp] i", ...}`.
Out: a `Layout`, and for a boundary's tensor its `Placement` or None (not known, never "replica").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from upguard_plugin.capture.arguments import expect
from upguard_plugin.errors import ConfigError, PlacementError
from upguard_plugin.placement import parse_placement, replicated, resolve_placement, without_dim
from upguard_plugin.records import ROLES, Axis, Layout, Placement

# Full replicas over an axis called `dp` where nothing else is said. Activations are not: each rank
# has its own samples.
STATE_ROLES = frozenset({"param", "grad", "main_grad", "master", "optimizer_state", "buffer"})
EXPERT_AXES = ("ep", "etp", "edp")  # of the mesh that experts are spread over
SAMPLES = "b"  # the name of a dim that counts samples
_GRADIENTS = frozenset({"grad_input", "grad_output"})
_OF_OPTIMIZERS = frozenset({"master", "optimizer_state"})


def layout_of(layout: Layout | Mapping[str, Any] | None, rank: int, world_size: int) -> Layout:
    """The layout a user means: per axis a torch ProcessGroup, or a size that spans the world.

    Raises ConfigError for a size that is not the world's, and a group without this rank.
    """
    if isinstance(layout, Layout):
        return layout
    expect("enable", "layout", layout, (Mapping, type(None)), "a dict of axes")
    axes = []
    for name, given in (layout or {}).items():
        if isinstance(given, int):
            if given not in (1, world_size):
                raise ConfigError(
                    f"cannot tell which ranks form axis {name!r}: its size is {given}, the world's "
                    f"is {world_size}",
                    remedy="give the torch ProcessGroup of this rank instead of a size",
                )
            ranks = tuple(range(world_size)) if given == world_size else (rank,)
        else:
            kinds = torch.distributed.ProcessGroup if torch.distributed.is_available() else ()
            expect("enable", f"axis {name!r} of layout", given, kinds, "a ProcessGroup or a size")
            ranks = tuple(torch.distributed.get_process_group_ranks(given))
        if rank not in ranks:
            raise ConfigError(
                f"the group of axis {name!r} does not hold this rank",
                evidence={"rank": rank, "group": list(ranks)},
            )
        mesh = "expert" if name in EXPERT_AXES else "dense"
        axes.append(Axis(name, len(ranks), ranks.index(rank), ranks, mesh))
    return Layout(tuple(axes))


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements of a parameter, flattened, that an optimizer keeps on this rank."""

    start: int
    end: int
    whole_shape: tuple[int, ...]  # of the parameter on this rank
    axis: str = "dp"  # its ranks keep the others

    def is_of(self, role: str, shape: torch.Size) -> bool:
        """Whether a tensor of that shape is the slice, and not the whole parameter."""
        if tuple(shape) != (self.end - self.start,):
            return False
        return role in _OF_OPTIMIZERS or tuple(shape) != self.whole_shape


class Placements:
    """The rules in force: the first whose name or glob matches a boundary decides."""

    def __init__(self, rules: Mapping[str, Any] | None, layout: Layout) -> None:
        """rules: boundary name or glob -> spec, or {role: spec}, or {role: {slot: spec}}.

        A plain spec holds for every role except gradients of inputs and outputs, whose placement
        is often another (a replica's gradient may be a partial sum). Raises PlacementError or
        ConfigError for a rule that cannot be read.
        """
        kinds = (Mapping, type(None))
        expect("enable", "placements", rules, kinds, "a dict of boundaries and specs")
        self.parameters: Mapping[str, torch.Tensor] = {}  # those of the models, by name
        self._rules = dict(rules or {})
        self._used: set[str] = set()  # names of rules
        self._slices: dict[str, Slice] = {}
        self._layout = layout
        self._replicas = any(axis.name == "dp" for axis in layout.axes)
        self._samples: dict[tuple[str, str, str, torch.Size], tuple[int, Placement] | None] = {}
        self._found: dict[tuple[str, str, str, torch.Size], Placement | None] = {}
        for name, rule in self._rules.items():
            _check(name, rule)

    def of(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        """The placement of a tensor of that local shape; None where nothing is known.

        Raises PlacementError, with spec and shape, if the rule does not fit.
        """
        if not self._rules and not self._replicas and not self._slices:
            return None
        place = (boundary, role, slot, shape)
        if place not in self._found:
            self._found[place] = self._find(boundary, role, slot, shape)
        return self._found[place]

    def of_samples(
        self, boundary: str, role: str, slot: str, shape: torch.Size
    ) -> tuple[int, Placement] | None:
        """The dim that counts samples, and where each sample lies in its logical tensor.

        None where no placement is known, or it has no dim `b` or `b[dp]`.
        Raises PlacementError if the rule does not fit.
        """
        place = (boundary, role, slot, shape)
        if place not in self._samples:
            spec = self._spec(boundary, role, slot)
            cut = without_dim(spec, SAMPLES, "dp") if spec is not None and len(shape) else None
            self._samples[place] = None
            if cut is not None:
                dim = cut[0] % len(shape)
                one = torch.Size([*shape[:dim], *shape[dim + 1 :]])
                self._samples[place] = dim, self.resolve(cut[1], boundary, one)
        return self._samples[place]

    def unreduced(self, boundary: str) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is a partial sum while it is accumulated."""
        return ("dp", "cp")

    def add_slice(self, name: str, cut: Slice) -> None:
        """Say which elements of a parameter the optimizer's flat tensors hold on this rank."""
        self._slices[name] = cut
        self._found.clear()

    def idle(self) -> list[str]:
        """The user's rules that no boundary was named by, up to now."""
        return [name for name in self._rules if name not in self._used]

    def resolve(self, spec: str, boundary: str, shape: torch.Size) -> Placement:
        """A spec that was given with the tensor. Raises PlacementError if it does not fit.

        What a `|` flattens has the shape of the parameter of that name, if there is one.
        """
        parameter = self.parameters.get(boundary) if "|" in spec else None
        whole_shape = None if parameter is None else tuple(parameter.shape)
        return self._fitted(spec, boundary, shape, whole_shape)

    def _fitted(
        self, spec: str, boundary: str, shape: torch.Size, whole_shape: tuple[int, ...] | None
    ) -> Placement:
        try:
            return resolve_placement(spec, tuple(shape), self._layout, whole_shape=whole_shape)
        except PlacementError as error:
            raise PlacementError(
                f"the placement of {boundary} does not fit: {error.sentence}",
                evidence={"placement": spec, "shape": list(shape), **error.evidence},
                remedy=error.remedy,
            ) from None

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        cut = self._slices.get(boundary) if role in STATE_ROLES else None
        if cut is not None and cut.is_of(role, shape):
            return self._of_slice(boundary, cut, shape)
        spec = self._spec(boundary, role, slot)
        if spec is not None and (shape or role not in STATE_ROLES or not spec.strip()):
            return self.resolve(spec, boundary, shape)
        if self._replicas and role in STATE_ROLES:
            return replicated(shape)
        return None

    def _of_slice(self, boundary: str, cut: Slice, shape: torch.Size) -> Placement | None:
        spec = self._spec(boundary, "param", "value")
        if spec is None and not self._replicas:
            return None  # which part of the whole parameter this rank's is, nobody has said
        view, at, mesh = ("*" if spec is None else spec).partition("@")
        flat = f"{view.strip()} | flat[{cut.axis}@{cut.start}:{cut.end}] {at}{mesh}".strip()
        return self._fitted(flat, boundary, shape, cut.whole_shape)

    def rule_of(self, boundary: str) -> str | None:
        """The name or glob of the user's rule for a boundary, which is not idle then."""
        name = boundary if boundary in self._rules else None
        if name is None:
            name = next((glob for glob in self._rules if fnmatchcase(boundary, glob)), None)
        if name is not None:
            self._used.add(name)
        return name

    def _spec(self, boundary: str, role: str, slot: str) -> str | None:
        name = self.rule_of(boundary)
        if name is None:
            return None
        rule = self._rules[name]
        if isinstance(rule, str):
            return None if role in _GRADIENTS else rule
        rule = rule.get(role)
        return rule.get(slot) if isinstance(rule, Mapping) else rule


def _check(name: str, rule: object) -> None:
    if isinstance(rule, str):
        parse_placement(rule)
    elif isinstance(rule, Mapping):
        for role, specs in rule.items():
            if role not in ROLES:
                raise ConfigError(f"unknown role {role!r} in the placements of {name!r}")
            for spec in specs.values() if isinstance(specs, Mapping) else [specs]:
                _check(name, str(spec))
    else:
        raise ConfigError(f"cannot read the placement of {name!r}: {rule!r} is no text")
