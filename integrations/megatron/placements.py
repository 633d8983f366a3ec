"""Placements of everything in a Megatron model, worked out from the rules when a tensor is seen.

In:  the modules and parameters of this rank, the layout, the shards of a distributed optimizer.
Out: for a boundary's tensor its `Placement`, or None: unknown, never "replica".

What newcomers get wrong: one parameter has two shapes. Whole (as tensor parallelism left it) it is
used by the model; the distributed optimizer keeps a slice of it, flattened, on each replica.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.placements import STATE_ROLES, Placements
from upguard_plugin.errors import PlacementError
from upguard_plugin.integrations.megatron.rules import (
    UNDESCRIBED,
    activations_of,
    parameter_spec,
)
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Layout, Placement


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of a parameter that this rank's distributed optimizer updates."""

    start: int  # in elements of the flattened parameter
    end: int
    whole_shape: tuple[int, ...]  # of the parameter on this rank

    @property
    def size(self) -> int:
        """Elements in the slice."""
        return self.end - self.start


class MegatronPlacements(Placements):
    """The user's rules first, then Megatron's."""

    def __init__(
        self,
        rules: Mapping[str, Any],
        user_rules: Mapping[str, Any] | None,
        layout: Layout,
        shards: Mapping[str, Shard],
        partial: Mapping[str, tuple[str, ...]],
    ) -> None:
        """rules: those of `find_rules`. partial: parameter -> axes not summed before finalisation.

        Raises PlacementError or ConfigError for a user's rule that cannot be read.
        """
        super().__init__(rules, layout)
        self._replicas = False  # here every parameter has a rule, or is unknown
        self._user = Placements(user_rules, layout)
        self._user._replicas = False
        self._shards = shards
        self._partial = partial
        self.misfit: Callable[[str], None] = lambda sentence: None  # told of a rule that fails

    def unreduced(self, boundary: str) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is a partial sum while it is accumulated."""
        return ("dp", "cp", "edp", *self._partial.get(boundary, ()))

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        given = self._user._find(boundary, role, slot, shape)
        if given is not None:
            return given
        try:
            shard = self._shards.get(boundary)
            if shard is not None and _is_slice(role, shape, shard):
                return self._slice(boundary, shard, shape)
            return super()._find(boundary, role, slot, shape)
        except PlacementError as error:
            self.misfit(f"the placement of {boundary} is not known: {error.sentence}")
            return None

    def _slice(self, boundary: str, shard: Shard, shape: torch.Size) -> Placement | None:
        spec = self._spec(boundary, "master", "master")
        if spec is None:
            return None
        axes = ("edp",) if "@expert" in spec else ("dp", "cp")
        splits = [f"{axes[0]}@{shard.start}:{shard.end}"]
        splits += [f"{axis}@0:{shard.size}" for axis in axes[1:] if self._is_split(axis)]
        flat = f"{spec} | flat[{','.join(splits)}]"
        return resolve_placement(flat, tuple(shape), self._layout, whole_shape=shard.whole_shape)

    def _is_split(self, axis: str) -> bool:
        found = self._layout.axis(axis)
        return found is not None and found.size > 1


def _is_slice(role: str, shape: torch.Size, shard: Shard) -> bool:
    if len(shape) != 1 or shape[0] != shard.size or role not in STATE_ROLES:
        return False
    return role in ("master", "optimizer_state") or tuple(shape) != shard.whole_shape


def find_rules(
    names: ParameterNames, config: Any, layout: Layout, vocabulary_size: int | None
) -> dict[str, Any]:
    """Rules for all modules, parameters and batches: name -> spec, or role -> slot -> spec."""
    fill = _Fill(layout, sequence_parallel=getattr(config, "sequence_parallel", False))
    rules: dict[str, Any] = {}
    undescribed: list[str] = []
    for name, module in names.walk():
        bases = {base.__name__ for base in type(module).__mro__}
        if not bases.isdisjoint(UNDESCRIBED):
            undescribed.append(name)
        elif not any(name.startswith(f"{outer}.") for outer in undescribed):
            rule = _module_rule(name, module, fill)
            if rule:
                rules[name] = rule
    for name, parameter in names.parameters.items():
        split = getattr(parameter, "tensor_model_parallel", False)
        if split and any(name.startswith(f"{outer}.") for outer in undescribed):
            continue
        if _is_between_meshes(name, parameter, layout):
            continue
        rules[name] = parameter_spec(name, parameter, config, vocabulary_size)
    for batch in ("input_ids", "position_ids", "labels", "loss_mask", "tokens"):
        rules[batch] = fill("{B} {C}")
    return rules


def _is_between_meshes(name: str, parameter: Any, layout: Layout) -> bool:
    """Whether an expert is split over etp but its gradient summed as a dense one's."""
    tp, etp = layout.axis("tp"), layout.axis("etp", "expert")
    if ".experts." not in name or not getattr(parameter, "allreduce", True):
        return False
    return tp is not None and etp is not None and tp.ranks != etp.ranks


def partial_axes(
    names: ParameterNames, layout: Layout, tied: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Parameter -> axes beside the data-parallel ones over which its gradient is a partial sum."""
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in names.parameters.items():
        axes: tuple[str, ...] = ()
        # Norms of queries and keys see the heads of their rank only.
        per_head = ".q_layernorm." in name or ".k_layernorm." in name
        if getattr(parameter, "sequence_parallel", False) or per_head:
            axes += ("tp",)
        if name in tied:
            axes += ("pp",)
        if axes:
            found[name] = axes
    return found


def _module_rule(name: str, module: Any, fill: Callable[[str], str]) -> dict[str, Any]:
    activations = activations_of(name, module)
    signature = list(inspect.signature(module.forward).parameters)
    inputs: dict[str, str] = {}
    for argument, spec in activations.inputs.items():
        inputs[f"kwargs.{argument}"] = fill(spec)
        if argument in signature:
            inputs[f"args.{signature.index(argument)}"] = fill(spec)
    outputs: dict[str, str] = {}
    for index, spec in enumerate(activations.outputs):
        outputs[f"out.{index}"] = fill(spec)
        if index == 0:
            outputs["0"] = fill(spec)
    rule = {
        "input": inputs,
        "output": outputs,
        "grad_input": inputs,
        "grad_output": outputs,
    }
    return {role: slots for role, slots in rule.items() if slots}


class _Fill:
    """Puts this job's axes into a rule's text."""

    def __init__(self, layout: Layout, *, sequence_parallel: bool) -> None:
        cp = layout.axis("cp")
        over_cp = ["cp:zigzag"] if cp is not None and cp.size > 1 else []
        over_tp = ["tp"] if sequence_parallel else []
        self._dims = {
            "S": _dim("s", over_cp + over_tp),
            "C": _dim("s", over_cp),
            "B": _dim("b", ["dp"]),
        }

    def __call__(self, spec: str) -> str:
        return spec.format_map(self._dims)


def _dim(letter: str, splits: list[str]) -> str:
    return f"{letter}[{','.join(splits)}]" if splits else letter
