"""How Megatron-Core splits its parameters, told by the marks that it puts on them.

In:  a parameter, its name in the whole model, the model's config.
Out: its placement, as text in the grammar of docs/placements.md: that of its gradient, master and
     optimizer state too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def parameter_spec(
    name: str, parameter: Any, config: Any, vocabulary_size: int | None, *, is_expert: bool
) -> str:
    """The placement of a parameter, its gradient, master and optimizer state.

    vocabulary_size: tokens that are real, without the padding that makes them divisible. is_expert:
    it lies on the expert mesh.
    """
    mesh = " @expert" if is_expert else ""
    dims = list("oixyz")[: parameter.dim()]
    if not getattr(parameter, "tensor_model_parallel", False):
        return " ".join(dims) + mesh  # every rank has all of it: dims, because `*` is no claim
    axis = "etp" if is_expert else "tp"
    split = parameter.partition_dim
    stride = getattr(parameter, "partition_stride", 1)
    if "linear_fc1" in name and getattr(config, "gated_linear_unit", False):
        dims[split] = f"(2 f[{axis}])"  # gate and up are each split
    elif "linear_qkv" in name:
        dims[split] = f"(g[{axis}] qkv d)"  # by groups of queries with their key and value
    elif stride > 1:
        dims[split] = f"({stride} {dims[split]}[{axis}])"
    else:
        dims[split] = f"{dims[split]}[{axis}]"
    if vocabulary_size is not None and split == 0 and is_vocabulary(name):
        dims[0] = f"v[{axis}]~{vocabulary_size}"
    return " ".join(dims) + mesh


def is_vocabulary(name: str) -> bool:
    """Whether a parameter has a row for each token."""
    return name.startswith("output_layer.") or ".word_embeddings." in f".{name}"


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """The weights of several experts in one parameter.

    Its shape is `(hidden, experts * ffn)` or `(experts * ffn, hidden)`, its memory is read with the
    experts as the first dim.
    """

    name: str
    shape: tuple[int, ...]  # on this rank, as its memory is read
    spec: str


def grouped_weights(name: str, module: Any) -> list[GroupedWeight]:
    """Those of a `GroupedMLP`. name: of the module, in the whole model."""
    config, experts = module.config, module.num_local_experts
    out = "(2 o[{tp}])" if getattr(config, "gated_linear_unit", False) else "o[{tp}]"
    found = []
    for leaf, hidden_is_first, dims in (
        ("weight1", True, f"i {out}"),
        ("weight2", False, "i[{tp}] o"),
    ):
        weight = getattr(module, leaf)
        rest = weight.numel() // (experts * config.hidden_size)
        sizes = (config.hidden_size, rest) if hidden_is_first else (rest, config.hidden_size)
        is_expert = not getattr(weight, "allreduce", True)
        spec = f"e[ep] {dims} @expert" if is_expert else f"e {dims}"
        spec = spec.format(tp="etp" if is_expert else "tp")
        found.append(GroupedWeight(f"{name}.{leaf}", (experts, *sizes), spec))
    return found
