"""How Megatron-Core splits its tensors: one rule for each standard module.

In:  a module, its name, and the model's config.
Out: placements of its parameters and of the tensors that enter and leave it, as text in the grammar
     of docs/placements.md. What no rule describes stays unknown; a user's own rules come first.

Letters: s sequence, b batch, h i o hidden sizes, v vocabulary, n heads, d size of a head, f the
half of a gated linear unit. `{S}` is the sequence between layers: split by context parallelism,
and with sequence parallel by tp too. `{C}` is the sequence inside a tensor-parallel region. `{B}`
is the batch: every data-parallel replica has its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "{S} {B} h"
ROTARY = "{C} x y d"  # angles of the positions, the same for all samples and heads


@dataclass(frozen=True, slots=True)
class Activations:
    """Placements of what a module takes and gives; gradients have those of their tensors."""

    inputs: Mapping[str, str] = field(default_factory=dict)  # by argument name
    outputs: tuple[str, ...] = ()  # of the output, or of the first parts of a tuple


def _column_parallel(name: str, module: Any) -> Activations:
    sequence = "{S}" if getattr(module, "sequence_parallel", False) else "{C}"
    is_gated = getattr(getattr(module, "config", None), "gated_linear_unit", False)
    halves = is_gated and name.rpartition(".")[2] == "linear_fc1"  # gate and up, each split
    part = "(2 f[tp])" if halves else "o[tp]"
    out = "o" if getattr(module, "gather_output", False) else part
    taken = f"{sequence} {{B}} i"
    # The second part is the bias, where adding it is left to the caller.
    return Activations({"input_": taken, "x": taken}, (f"{{C}} {{B}} {out}", part))


def _row_parallel(name: str, module: Any) -> Activations:
    sequence = "{S}" if getattr(module, "sequence_parallel", False) else "{C}"
    i = "i[tp]" if getattr(module, "input_is_parallel", True) else "i"
    taken = f"{{C}} {{B}} {i}"
    return Activations({"input_": taken, "x": taken}, (f"{sequence} {{B}} o", "o"))


def _vocabulary_embedding(name: str, module: Any) -> Activations:
    scattered = getattr(module, "reduce_scatter_embeddings", False)
    return Activations({"input_": "{B} {C}"}, (HIDDEN if scattered else "{B} {C} h",))


def _embedding(name: str, module: Any) -> Activations:
    scattered = getattr(module, "scatter_to_sequence_parallel", True)
    tokens = {"input_ids": "{B} {C}", "position_ids": "{B} {C}"}
    return Activations(tokens, (HIDDEN if scattered else "{C} {B} h",))


def _norm(name: str, module: Any) -> Activations:
    if name.rpartition(".")[2] in ("q_layernorm", "k_layernorm"):
        spec = "{C} {B} n[tp] d"
    else:
        spec = HIDDEN
    return Activations({"input": spec, "x": spec, "hidden_states": spec}, (spec,))


def _attention_core(name: str, module: Any) -> Activations:
    heads = dict.fromkeys(("query", "key", "value"), "{C} {B} n[tp] d")
    config = getattr(module, "config", None)
    groups = getattr(config, "num_query_groups", None)
    if groups is not None and groups < getattr(config, "tensor_model_parallel_size", 1):
        heads = {"query": heads["query"]}  # several ranks hold copies of one group
    return Activations(heads, ("{C} {B} h[tp]",))


def _scores(name: str, module: Any) -> Activations:
    return Activations({"input": "{B} n[tp] q k"}, ("{B} n[tp] q k",))


def _dropout(name: str, module: Any) -> Activations:
    if name.endswith("core_attention.attention_dropout"):
        return _scores(name, module)
    return Activations()


def _identity(name: str, module: Any) -> Activations:
    """What stands where a model has no norm or no attention to another sequence."""
    if name.endswith(("layernorm", "cross_attention")):
        spec = _norm(name, module).outputs[0]
        return Activations({"x": spec}, (spec,))
    return Activations()


def _hidden_to_hidden(name: str, module: Any) -> Activations:
    taken = {"hidden_states": HIDDEN, "rotary_pos_emb": ROTARY}
    return Activations(taken, (HIDDEN, "h"))  # the second part is a bias


def _rotary(name: str, module: Any) -> Activations:
    return Activations({}, (ROTARY,))


def _model(name: str, module: Any) -> Activations:
    tokens = {"input_ids": "{B} {C}", "position_ids": "{B} {C}", "labels": "{B} {C}"}
    return Activations(tokens)


# By the class of the module, or of one of its bases.
RULES: dict[str, Callable[[str, Any], Activations]] = {
    "ColumnParallelLinear": _column_parallel,
    "TEColumnParallelLinear": _column_parallel,
    "TELayerNormColumnParallelLinear": _column_parallel,
    "RowParallelLinear": _row_parallel,
    "TERowParallelLinear": _row_parallel,
    "VocabParallelEmbedding": _vocabulary_embedding,
    "LanguageModelEmbedding": _embedding,
    "LayerNorm": _norm,
    "RMSNorm": _norm,
    "FusedLayerNorm": _norm,
    "L2Norm": _norm,
    "RotaryEmbedding": _rotary,
    "DotProductAttention": _attention_core,
    "TEDotProductAttention": _attention_core,
    "FusedScaleMaskSoftmax": _scores,
    "Dropout": _dropout,
    "IdentityOp": _identity,
    "SelfAttention": _hidden_to_hidden,
    "MLP": _hidden_to_hidden,
    "MoELayer": _hidden_to_hidden,
    "TransformerLayer": _hidden_to_hidden,
    "TransformerBlock": _hidden_to_hidden,
    "GPTModel": _model,
}

# Inside these a split dim holds several tensors one after the other, each split by itself, or
# activations have shapes of their own: what is split there stays unknown.
UNDESCRIBED = ("MambaMixer", "GatedDeltaNet", "MLASelfAttention", "GroupedMLP")


def activations_of(name: str, module: Any) -> Activations:
    """The rule of a module; empty where there is none. name: in the whole model."""
    if getattr(module, "is_expert", False) or ".experts." in name:
        return Activations()  # its tokens are those that the router sent there
    for base in type(module).__mro__:
        if base.__name__ in RULES:
            return RULES[base.__name__](name, module)
    return Activations()


def parameter_spec(name: str, parameter: Any, config: Any, vocabulary_size: int | None) -> str:
    """The placement of a parameter, its gradient, master and optimizer state.

    vocabulary_size: tokens that are real, without the padding that makes them divisible.
    """
    is_expert = not getattr(parameter, "allreduce", True)
    mesh = " @expert" if is_expert else ""
    if not getattr(parameter, "tensor_model_parallel", False):
        return f"*{mesh}"
    axis = "etp" if is_expert else "tp"
    dims = list("oixyz")[: parameter.dim()]
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
