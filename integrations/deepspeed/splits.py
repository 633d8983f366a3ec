"""Which part of a parameter this rank has before ZeRO cuts it: tensor parallelism and experts.

In:  the parameters of this rank, as AutoTP or a Megatron-style model has marked them.
Out: per parameter the placement's text; None where the marks do not say it.

Both mark a split parameter by `tensor_model_parallel`. Megatron's also have the dim that is split
into equal parts; AutoTP's describe themselves for universal checkpoints (DeepSpeed 0.19). What has
no mark is held whole by every rank: DeepSpeed itself relies on that when it adds up the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from upguard_plugin.records import Layout

_AUTOTP = "ds_autotp_universal_checkpoint_meta"
_MARKS = ("tensor_model_parallel", "model_parallel")


def parameter_specs(
    parameters: Mapping[str, Tensor], layout: Layout, experts: frozenset[str]
) -> dict[str, str | None]:
    """The placement's text of each parameter that is not merely whole on every dense rank."""
    tensor = layout.axis("tp")
    num_parts = 1 if tensor is None else tensor.size
    has_expert_mesh = layout.axis("edp", "expert") is not None
    specs: dict[str, str | None] = {}
    for name, parameter in parameters.items():
        if name in experts:
            specs[name] = "* @expert" if has_expert_mesh and num_parts == 1 else None
        elif num_parts > 1:
            specs[name] = _split_spec(parameter)
    return specs


def _split_spec(parameter: Any) -> str | None:
    described = getattr(parameter, _AUTOTP, None)
    if described is not None:
        return _described_spec(described)
    if not any(getattr(parameter, mark, False) for mark in _MARKS):
        return "*"
    dim = getattr(parameter, "partition_dim", None)
    if not isinstance(dim, int) or getattr(parameter, "partition_stride", 1) != 1:
        return None
    return _split_at(dim, _num_dims(parameter), "tp")


def _described_spec(described: Mapping[str, Any]) -> str | None:
    if described["replicated"]:
        return "*"
    dim, sizes = described["partition_dim"], described["partition_sizes"]
    shape = described["logical_shape"] or described["original_shape"]
    is_plain = described["sub_param_shard_widths"] is None
    if dim is None or not sizes or not shape or not is_plain:
        return None
    return _split_at(dim, len(shape), f"tp:{','.join(map(str, sizes))}")


def _split_at(dim: int, num_dims: int, split: str) -> str | None:
    if not 0 <= dim < num_dims:
        return None
    return " ".join(f"d{i}[{split}]" if i == dim else f"d{i}" for i in range(num_dims))


def _num_dims(parameter: Any) -> int:
    """ZeRO 3 leaves a parameter without its shape, and keeps that beside it."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
