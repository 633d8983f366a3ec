"""What this rank keeps of each parameter: the stretches of DeepSpeed's flat tensors.

In:  an engine's optimizer, whichever of DeepSpeed's it is, and the names of the parameters.
Out: per parameter its `Shard`; per flat tensor the `Fragment`s in it; gradients as they are once
     they are reduced and not yet clipped.

ZeRO 1 and 2 (and BF16_Optimizer) cut the concatenation of a group's parameters, so a parameter may
lie on one rank, on several, or across a border. ZeRO 3 cuts every parameter into equal parts; the
last part may be padded with memory that nobody ever wrote, which is left out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.capture.parts import Fragment


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter that this rank keeps and updates."""

    start: int  # in elements of the flattened parameter
    size: int
    whole_shape: tuple[int, ...]
    is_expert: bool = False

    @property
    def end(self) -> int:
        """The element after the last."""
        return self.start + self.size


class Shards:
    """The shards of one engine."""

    def __init__(self, engine: Any, names: ParameterNames) -> None:
        self._optimizer = engine.optimizer
        self._names = names
        self.by_name: dict[str, Shard] = {}
        self._fragments: dict[int, list[Fragment]] = {}  # by the flat tensor's identity
        self._flats: list[Tensor] = []  # kept, so that no identity is used again
        for flat, parameters in _partitions(engine.optimizer):
            self._add(flat, parameters)
        for flat, group in _whole_groups(engine.optimizer):
            self._add_whole(flat, group)
        for name, parameter in names.parameters.items():
            if name not in self.by_name and hasattr(parameter, "ds_tensor"):  # frozen
                self.by_name[name] = _shard3(parameter)

    @property
    def is_stage3(self) -> bool:
        """Whether parameters themselves are partitioned."""
        return hasattr(self._optimizer, "fp32_partitioned_groups_flat") or any(
            hasattr(p, "ds_tensor") for p in self._names.parameters.values()
        )

    def fragments_of(self, flat: Tensor) -> Sequence[Fragment]:
        """The stretches of an optimizer's tensor; none where it is not one of DeepSpeed's."""
        return self._fragments.get(id(flat), ())

    def groups_at_rest(self, optimizer: Any) -> list[tuple[Mapping[str, Any], Sequence[Tensor]]]:
        """The inner optimizer's groups with the tensors that it steps on in their turn.

        ZeRO 3 hands it one tensor at a time and leaves its groups empty between steps.
        """
        groups = list(optimizer.param_groups)
        owners = getattr(self._optimizer, "sub_group_to_group_id", None)
        if owners is None:
            return [(group, list(group["params"])) for group in groups]
        flats = self._optimizer.fp32_partitioned_groups_flat
        return [
            (group, [flat for i, flat in enumerate(flats) if owners[i] == number])
            for number, group in enumerate(groups)
        ]

    def at_rest(self, name: str, parameter: Tensor) -> Tensor | None:
        """What is valid of a parameter between steps: with ZeRO 3 its shard, if it has one."""
        owned = getattr(parameter, "ds_tensor", None)
        if owned is None:
            return parameter
        size = self.by_name[name].size
        # Offloaded to a disk it is not here at all.
        return owned.detach().view(-1)[:size] if 0 < size <= owned.numel() else None

    def written(self) -> list[tuple[str, Tensor]]:
        """The parts of the model's parameters that this rank has just updated, ZeRO 1 and 2."""
        found = []
        for name, shard in self.by_name.items():
            flat = self._names.parameters[name].detach().view(-1)
            found.append((name, flat[shard.start : shard.end]))
        return found

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Reduced gradients: the partitions' parts, or BF16_Optimizer's whole fp32 ones."""
        found: list[tuple[str, Tensor]] = []
        for name, parameter in self._names.parameters.items():
            gradient = self._gradient(name, parameter)
            if gradient is not None:
                found.append((name, gradient))
        return found

    def _gradient(self, name: str, parameter: Tensor) -> Tensor | None:
        whole = getattr(parameter, "_hp_grad", None)
        if whole is not None:
            return whole.detach().view(parameter.shape)
        shard = self.by_name.get(name)
        if shard is None or not parameter.requires_grad or shard.size == 0:
            return None
        part: Tensor | None = None
        mapping = getattr(parameter, "_hp_mapping", None)
        if getattr(self._optimizer, "round_robin_gradients", False):
            part = _gradient_dealt(self._optimizer, parameter)
        elif mapping is not None:
            part = _gradient12(self._optimizer, mapping, parameter)
        elif hasattr(parameter, "ds_id") and hasattr(self._optimizer, "averaged_gradients"):
            part = self._optimizer.get_local_fp32_grad_for_param(parameter)
        return None if part is None else part.detach().reshape(-1)[: shard.size]

    def _add(self, flat: Tensor, parameters: Sequence[tuple[Tensor, int, Shard]]) -> None:
        fragments = self._fragments.setdefault(id(flat), [])
        self._flats.append(flat)
        for parameter, start, shard in parameters:
            name = self._names.of(parameter)
            if name is None:
                continue
            self.by_name[name] = shard
            if shard.size:
                fragments.append(Fragment(name, start, shard.size))

    def _add_whole(self, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        fragments = self._fragments.setdefault(id(flat), [])
        self._flats.append(flat)
        start = 0
        for parameter in parameters:
            name = self._names.of(parameter)
            if name is not None:
                fragments.append(Fragment(name, start, parameter.numel(), tuple(parameter.shape)))
            start += parameter.numel()


def _partitions(optimizer: Any) -> list[tuple[Tensor, list[tuple[Tensor, int, Shard]]]]:
    """(flat tensor, (parameter, where it begins there, its shard)) of a ZeRO optimizer."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return [
            (flat, _in_order3(group))
            for flat, group in zip(
                optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
            )
            if flat is not None
        ]
    if getattr(optimizer, "round_robin_gradients", False):
        flats = optimizer.single_partition_of_fp32_groups
        return [(flat, _dealt(optimizer, number)) for number, flat in enumerate(flats)]
    for flats, groups in (
        ("single_partition_of_fp32_groups", "bit16_groups"),
        ("fp32_groups_flat_partition", "bf16_groups"),
    ):
        if hasattr(optimizer, flats) and hasattr(optimizer, groups):
            pairs = zip(getattr(optimizer, flats), getattr(optimizer, groups), strict=True)
            return [(flat, _mapped(group)) for flat, group in pairs]
    return []


def _mapped(group: Sequence[Tensor]) -> list[tuple[Tensor, int, Shard]]:
    """The parameters of a ZeRO 1 or 2 group of which this rank keeps a part."""
    found = []
    for parameter in group:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            shard = Shard(here.start, here.numel, tuple(parameter.shape), _is_expert(parameter))
            found.append((parameter, int(there.start), shard))
    return found


def _dealt(optimizer: Any, number: int) -> list[tuple[Tensor, int, Shard]]:
    """The parameters of a ZeRO group that is dealt out to the ranks in turn.

    The mapping that DeepSpeed hangs on each parameter knows nothing of that order.
    """
    group = optimizer.round_robin_bit16_groups[number]
    size = optimizer.partition_size[number]
    begin = size * torch.distributed.get_rank(optimizer.real_dp_process_group[number])
    offsets = getattr(optimizer, "round_robin_bit16_offsets", None)  # with gaps, in newer ones
    ends = [0, *accumulate(parameter.numel() for parameter in group)]
    found = []
    for parameter, offset in zip(group, ends if offsets is None else offsets[number], strict=False):
        start = max(begin, offset)
        length = min(begin + size, offset + parameter.numel()) - start
        if length > 0:
            shape = tuple(parameter.shape)
            shard = Shard(start - offset, length, shape, _is_expert(parameter))
            found.append((parameter, start - begin, shard))
    return found


def _in_order3(group: Sequence[Any]) -> list[tuple[Tensor, int, Shard]]:
    found = []
    start = 0
    for parameter in group:
        found.append((parameter, start, _shard3(parameter)))
        start += parameter.partition_numel()
    return found


def _shard3(parameter: Any) -> Shard:
    part, index = parameter.ds_tensor.ds_numel, _index3(parameter)
    start = min(part * index, parameter.ds_numel)
    size = min(part, parameter.ds_numel - start)
    return Shard(start, size, tuple(parameter.ds_shape), _is_expert(parameter))


def _index3(parameter: Any) -> int:
    group = getattr(parameter, "ds_process_group", None)
    return int(torch.distributed.get_rank(group))


def _is_expert(parameter: Any) -> bool:
    return not getattr(parameter, "allreduce", True)  # how DeepSpeed marks experts


def _whole_groups(optimizer: Any) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """(master, the parameters in it) of the optimizers that partition nothing.

    FP16_Optimizer has a flat master for each group, FP16_UnfusedOptimizer one for each parameter.
    """
    groups = getattr(optimizer, "fp16_groups", ())
    flats = getattr(optimizer, "fp32_groups_flat", None)
    if flats and groups:
        return list(zip(flats, groups, strict=True))
    masters = getattr(optimizer, "fp32_groups", None) or ()
    pairs = zip(chain.from_iterable(masters), chain.from_iterable(groups), strict=False)
    return [(master, [parameter]) for master, parameter in pairs if isinstance(master, Tensor)]


def _gradient12(optimizer: Any, mapping: Any, parameter: Any) -> Tensor | None:
    """The reduced gradient's part that ZeRO 1 and 2 keep; None where there is none now."""
    gradients = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict
    parts = gradients.get(mapping.param_group_index)
    if parts is None:
        return None
    part: Tensor = parts[parameter._index_in_param_group]
    return part


def _gradient_dealt(optimizer: Any, parameter: Tensor) -> Tensor | None:
    """The same where parameters are dealt out in turn."""
    for number, group in enumerate(optimizer.params_in_partition):
        for index, candidate in enumerate(group):
            if candidate is parameter:
                parts = optimizer.averaged_gradients.get(number) or ()
                parts = [part for part in parts if not hasattr(part, "_zero_padding")]
                return parts[index] if index < len(parts) else None
    return None
