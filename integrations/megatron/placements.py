"""Placements of everything in a Megatron model, worked out from the rules when a tensor is seen.

In:  the modules and parameters of this rank, the layout, the shards of a distributed optimizer.
Out: for a boundary's tensor its `Placement`, or None: unknown, never "replica".

What newcomers get wrong: one parameter has two shapes. Whole (as tensor parallelism left it) it is
used by the model; the distributed optimizer keeps a slice of it, flattened, on each replica.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.placements import STATE_ROLES, Placements
from upguard_plugin.errors import PlacementError
from upguard_plugin.integrations.megatron.expert_rules import (
    expert_activations,
    is_inside_experts,
)
from upguard_plugin.integrations.megatron.parameter_rules import grouped_weights, parameter_spec
from upguard_plugin.integrations.megatron.rules import (
    UNDESCRIBED,
    Activations,
    activations_of,
    is_second_embedding,
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


@dataclass(frozen=True, slots=True)
class Rules:
    """What is known of a model's tensors."""

    specs: Mapping[str, Any]  # name -> spec, or role -> slot -> spec
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the memory, where
    # the spec of a parameter is for another shape than the parameter has


class MegatronPlacements(Placements):
    """The user's rules first, then Megatron's."""

    def __init__(
        self,
        rules: Rules,
        user_rules: Mapping[str, Any] | None,
        layout: Layout,
        shards: Mapping[str, Shard],
        partial: Mapping[str, tuple[str, ...]],
    ) -> None:
        """rules: those of `find_rules`. partial: parameter -> axes not summed before finalisation.

        Raises PlacementError or ConfigError for a user's rule that cannot be read.
        """
        super().__init__(rules.specs, layout)
        self._shapes = rules.shapes
        self._replicas = False  # here every parameter has a rule, or is unknown
        self._user = Placements(user_rules, layout)
        self._user._replicas = False
        self._shards = shards
        self._partial = partial
        self._dims: dict[str, int] = {}
        self.misfit: Callable[[str], None] = lambda sentence: None  # told of a rule that fails

    def unreduced(self, boundary: str) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is a partial sum while it is accumulated."""
        return ("dp", "cp", "edp", *self._partial.get(boundary, ()))

    def idle(self) -> list[str]:
        """The user's rules that no boundary was named by; Megatron's are for every model."""
        return self._user.idle()

    def set_batch_size(self, size: int) -> None:
        """Samples of a micro-batch on this rank, by which tokens in one dim are told apart."""
        if self._dims.get("b") != size:
            self._dims["b"] = size
            self._found.clear()

    def resolve(self, spec: str, boundary: str, shape: torch.Size) -> Placement:
        """As `Placements.resolve`. Fused dims of tokens have sizes that only the schedule knows."""
        dims = self._dims if "(" in spec else None
        return resolve_placement(spec, tuple(shape), self._layout, dims=dims)

    def _find(self, boundary: str, role: str, slot: str, shape: torch.Size) -> Placement | None:
        given = self._user._find(boundary, role, slot, shape)
        if given is not None:
            return given
        try:
            shard = self._shards.get(boundary)
            if shard is not None and _is_slice(role, shape, shard):
                return self._slice(boundary, shard, shape)
            if boundary in self._shapes and role in STATE_ROLES:
                shape = torch.Size(self._shapes[boundary])
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
        whole = self._shapes.get(boundary, shard.whole_shape)
        return resolve_placement(flat, tuple(shape), self._layout, whole_shape=whole)

    def _is_split(self, axis: str) -> bool:
        found = self._layout.axis(axis)
        return found is not None and found.size > 1


def _is_slice(role: str, shape: torch.Size, shard: Shard) -> bool:
    if len(shape) != 1 or shape[0] != shard.size or role not in STATE_ROLES:
        return False
    return role in ("master", "optimizer_state") or tuple(shape) != shard.whole_shape


def find_rules(
    names: ParameterNames, config: Any, layout: Layout, vocabulary_size: int | None
) -> Rules:
    """Rules for all modules, parameters and batches."""
    fill = _Fill(layout, sequence_parallel=getattr(config, "sequence_parallel", False))
    specs: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    undescribed = [name for name, module in names.walk() if _is_a(module, *UNDESCRIBED)]
    for name, module, parent in _described(names, undescribed):
        if is_inside_experts(name):
            activations = expert_activations(name, module, layout, config)
        else:
            activations = activations_of(name, module, parent)
        rule = _module_rule(module, activations, fill)
        if rule:
            specs[name] = rule
    for name, parameter in names.parameters.items():
        split = getattr(parameter, "tensor_model_parallel", False)
        if split and _is_inside(name, undescribed):
            continue
        is_expert = _is_of_experts(name, parameter, layout)
        specs[name] = parameter_spec(name, parameter, config, vocabulary_size, is_expert=is_expert)
    for name, module in names.walk():
        for weight in grouped_weights(name, module) if _is_a(module, "GroupedMLP") else ():
            if weight.name in specs:
                specs[weight.name], shapes[weight.name] = weight.spec, weight.shape
    for batch in ("input_ids", "position_ids", "labels", "loss_mask", "tokens"):
        specs[batch] = fill("{B} {C}")
    return Rules(specs, shapes)


def _described(names: ParameterNames, undescribed: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, parent) of all modules whose tensors have a partner on one rank."""
    left_out = list(undescribed)
    for name, module in names.walk():
        parent = names.modules.get(name.rpartition(".")[0] or names.roots[0])
        if is_second_embedding(module, parent):
            left_out.append(name)
        if not _is_inside(name, left_out):
            yield name, module, parent


def _is_a(module: Any, *classes: str) -> bool:
    return not {base.__name__ for base in type(module).__mro__}.isdisjoint(classes)


def _is_inside(name: str, undescribed: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{outer}.") for outer in undescribed)


def _is_of_experts(name: str, parameter: Any, layout: Layout) -> bool:
    """Whether a parameter lies on the expert mesh, whatever its mark says.

    Without expert parallelism Megatron marks experts as dense, also where they are split otherwise.
    Their gradients are then summed over the wrong ranks, and replicas that do not agree show it.
    """
    if not getattr(parameter, "allreduce", True):
        return True
    tp, etp = layout.axis("tp"), layout.axis("etp", "expert")
    apart = tp is not None and etp is not None and tp.ranks != etp.ranks
    return apart and is_inside_experts(name)


def partial_axes(
    names: ParameterNames, layout: Layout, tied: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Parameter -> axes beside the data-parallel ones over which its gradient is a partial sum."""
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in names.parameters.items():
        axes: tuple[str, ...] = ()
        # Norms of queries and keys see the heads of their rank only.
        per_head = (".q_layernorm." in name or ".k_layernorm." in name) and not hasattr(
            names.modules.get(name.rsplit(".", 2)[0]), "linear_kv_down_proj"
        )
        averaged = getattr(parameter, "average_gradients_across_tp_domain", False)
        if getattr(parameter, "sequence_parallel", False) or per_head or averaged:
            axes += ("tp",)
        if name in tied:
            axes += ("pp",)
        if axes:
            found[name] = axes
    return found


def _module_rule(
    module: Any, activations: Activations, fill: Callable[[str], str]
) -> dict[str, Any]:
    signature = list(inspect.signature(module.forward).parameters)

    def inputs(specs: Mapping[str, str]) -> dict[str, str]:
        slots: dict[str, str] = {}
        for argument, spec in specs.items():
            slots[f"kwargs.{argument}"] = fill(spec)
            if argument in signature:
                slots[f"args.{signature.index(argument)}"] = fill(spec)
        return slots

    def outputs(specs: tuple[str, ...]) -> dict[str, str]:
        slots = {f"out.{index}": fill(spec) for index, spec in enumerate(specs)}
        return slots | {"0": slots["out.0"]} if slots else slots

    given, grad_given = activations.outputs, activations.grad_outputs
    taken, grad_taken = activations.inputs, activations.grad_inputs
    rule = {
        "input": inputs(taken),
        "output": outputs(given),
        "grad_input": inputs(taken if grad_taken is None else grad_taken),
        "grad_output": outputs(given if grad_given is None else grad_given),
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
        self._dims["T"] = f"({self._dims['S']} {self._dims['B']})"

    def __call__(self, spec: str) -> str:
        return spec.format_map(self._dims)


def _dim(letter: str, splits: list[str]) -> str:
    return f"{letter}[{','.join(splits)}]" if splits else letter
