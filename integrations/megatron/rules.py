"""How Megatron-Core splits its tensors: one rule for each standard module.

In:  a module, its name, and the module that it is a part of.
Out: placements of the tensors that enter and leave it, as text in the grammar of
     docs/placements.md. What no rule describes stays unknown; a user's own rules come first.

Letters: s sequence, b batch, h i o hidden sizes, v vocabulary, n heads, d size of a head, f the
half of a gated linear unit. `{S}` is the sequence between layers: split by context parallelism,
and with sequence parallel by tp too. `{C}` is the sequence inside a tensor-parallel region. `{B}`
is the batch: every data-parallel replica has its own samples. `{T}` are a layer's tokens, sequence
and batch in one dim. Experts have rules of their own (`expert_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "{S} {B} h"
ROTARY = "{C} x y d"  # angles of the positions, the same for all samples and heads


@dataclass(frozen=True, slots=True)
class Activations:
    """Placements of what a module takes and gives, and of the gradients of both."""

    inputs: Mapping[str, str] = field(default_factory=dict)  # by argument name
    outputs: tuple[str, ...] = ()  # of the output, or of the first parts of a tuple
    # Where a gradient is placed unlike its tensor: what one of them shows in part, as a sum that
    # has not been added up over the ranks, the other shows whole.
    grad_inputs: Mapping[str, str] | None = None
    grad_outputs: tuple[str, ...] | None = None


def _column_parallel(name: str, module: Any, parent: Any) -> Activations:
    sequence = "{S}" if getattr(module, "sequence_parallel", False) else "{C}"
    taken = f"{sequence} {{B}} i"
    if getattr(module, "gather_output", False):
        out = bias = "o"
    else:
        out = bias = "(2 o[tp])" if is_gated(name, module) else "o[tp]"
    # The second part is the bias, where adding it is left to the caller.
    return Activations({"input_": taken, "x": taken}, (f"{{C}} {{B}} {out}", bias))


def is_gated(name: str, module: Any) -> bool:
    """Whether a linear layer gives two halves, gate and up, each split over the ranks."""
    config = getattr(module, "config", None)
    return name.endswith("linear_fc1") and bool(getattr(config, "gated_linear_unit", False))


def _row_parallel(name: str, module: Any, parent: Any) -> Activations:
    sequence = "{S}" if getattr(module, "sequence_parallel", False) else "{C}"
    i = "i[tp]" if getattr(module, "input_is_parallel", True) else "i"
    taken = f"{{C}} {{B}} {i}"
    return Activations({"input_": taken, "x": taken}, (f"{sequence} {{B}} o", "o"))


def _duplicated(name: str, module: Any, parent: Any) -> Activations:
    """A linear layer that every rank has whole."""
    return Activations({"x": "{S} {B} i"}, ("{S} {B} o", "o"))


def _vocabulary_embedding(name: str, module: Any, parent: Any) -> Activations:
    scattered = getattr(module, "reduce_scatter_embeddings", False)
    return Activations({"input_": "{B} {C}"}, (HIDDEN if scattered else "{B} {C} h",))


def _embedding(name: str, module: Any, parent: Any) -> Activations:
    tokens = {"input_ids": "{B} {C}", "position_ids": "{B} {C}"}
    return Activations(tokens, (_embedded(module),))


def _embedded(embedding: Any) -> str:
    scattered = getattr(embedding, "scatter_to_sequence_parallel", True)
    return HIDDEN if scattered else "{C} {B} h"


def _rotary(name: str, module: Any, parent: Any) -> Activations:
    return Activations({}, (ROTARY,))


def _norm(name: str, module: Any, parent: Any) -> Activations:
    # Latent attention has norms of these names before the heads are made.
    is_latent = hasattr(parent, "linear_kv_down_proj")
    if name.rpartition(".")[2] in ("q_layernorm", "k_layernorm") and not is_latent:
        spec = "{C} {B} n[tp] d"
    else:
        spec = HIDDEN
    return Activations({"input": spec, "x": spec, "hidden_states": spec}, (spec,))


def _attention_core(name: str, module: Any, parent: Any) -> Activations:
    heads = dict.fromkeys(("query", "key", "value"), "{C} {B} n[tp] d")
    config = getattr(module, "config", None)
    groups = getattr(config, "num_query_groups", None)
    if groups is not None and groups < getattr(config, "tensor_model_parallel_size", 1):
        heads = {"query": heads["query"]}  # several ranks hold copies of one group
    return Activations(heads, ("{C} {B} h[tp]",))


def _scores(name: str, module: Any, parent: Any) -> Activations:
    return Activations({"input": "{B} n[tp] q k"}, ("{B} n[tp] q k",))


def _dropout(name: str, module: Any, parent: Any) -> Activations:
    if name.endswith("core_attention.attention_dropout"):
        return _scores(name, module, parent)
    if name.endswith("embedding.embedding_dropout"):
        return Activations({"input": _embedded(parent)}, (_embedded(parent),))
    return Activations()


def _identity(name: str, module: Any, parent: Any) -> Activations:
    """What stands where a model has no norm or no attention to another sequence."""
    if name.endswith(("layernorm", "cross_attention")):
        spec = _norm(name, module, parent).outputs[0]
        return Activations({"x": spec}, (spec,))
    return Activations()


def _hidden_to_hidden(name: str, module: Any, parent: Any) -> Activations:
    taken = {"hidden_states": HIDDEN, "rotary_pos_emb": ROTARY}
    return Activations(taken, (HIDDEN, "h"))  # the second part is a bias


def _layers(name: str, module: Any, parent: Any) -> Activations:
    """All layers of a pipeline stage: between stages there is no boundary on one rank."""
    taken = {"hidden_states": HIDDEN} if getattr(module, "pre_process", True) else {}
    given = (HIDDEN,) if getattr(module, "post_process", True) else ()
    return Activations(taken | {"rotary_pos_emb": ROTARY}, given)


def _router(name: str, module: Any, parent: Any) -> Activations:
    # Probabilities, and the map of who takes which token.
    return Activations({"input": HIDDEN}, ("{T} e", "{T} e"))


def _further_token(name: str, module: Any, parent: Any) -> Activations:
    tokens = {"input_ids": "{B} {C}", "position_ids": "{B} {C}", "hidden_states": HIDDEN}
    given = (HIDDEN, tokens["input_ids"], tokens["position_ids"])
    return Activations(tokens | {"rotary_pos_emb": ROTARY}, given)


def _further_tokens(name: str, module: Any, parent: Any) -> Activations:
    # The hidden states of all depths, one after the other.
    depths = 1 + len(getattr(module, "layers", ()))
    tokens = _further_token(name, module, parent).inputs
    return Activations(tokens, (f"({depths} {{S}}) {{B}} h",))


def _model(name: str, module: Any, parent: Any) -> Activations:
    tokens = {"input_ids": "{B} {C}", "position_ids": "{B} {C}", "labels": "{B} {C}"}
    # The last stage gives the loss of each token, as training has it.
    return Activations(tokens, ("{B} {C}",) if getattr(module, "post_process", True) else ())


# By the class of the module, or of one of its bases.
RULES: dict[str, Callable[[str, Any, Any], Activations]] = {
    "ColumnParallelLinear": _column_parallel,
    "TEColumnParallelLinear": _column_parallel,
    "TELayerNormColumnParallelLinear": _column_parallel,
    "RowParallelLinear": _row_parallel,
    "TERowParallelLinear": _row_parallel,
    "TELinear": _duplicated,
    "VocabParallelEmbedding": _vocabulary_embedding,
    "LanguageModelEmbedding": _embedding,
    "RotaryEmbedding": _rotary,
    "LayerNorm": _norm,
    "RMSNorm": _norm,
    "FusedLayerNorm": _norm,
    "L2Norm": _norm,
    "DotProductAttention": _attention_core,
    "TEDotProductAttention": _attention_core,
    "FusedScaleMaskSoftmax": _scores,
    "Dropout": _dropout,
    "IdentityOp": _identity,
    "SelfAttention": _hidden_to_hidden,
    "MultiLatentAttention": _hidden_to_hidden,
    "MLP": _hidden_to_hidden,
    "MoELayer": _hidden_to_hidden,
    "Router": _router,
    "TransformerLayer": _hidden_to_hidden,
    "TransformerBlock": _layers,
    "MultiTokenPredictionLayer": _further_token,
    "MultiTokenPredictionBlock": _further_tokens,
    "GPTModel": _model,
}

# Inside these a split dim holds several tensors one after the other, each split by itself, or
# activations have shapes of their own: what is split there stays unknown.
UNDESCRIBED = ("MambaMixer", "GatedDeltaNet")


def is_second_embedding(module: Any, parent: Any) -> bool:
    """Whether an embedding serves further tokens only: what goes in is no first stage's batch."""
    is_embedding = any(base.__name__ == "LanguageModelEmbedding" for base in type(module).__mro__)
    return is_embedding and not getattr(parent, "pre_process", True)


def activations_of(name: str, module: Any, parent: Any = None) -> Activations:
    """The rule of a module; empty where there is none. name: in the whole model."""
    for base in type(module).__mro__:
        if base.__name__ in RULES:
            return RULES[base.__name__](name, module, parent)
    return Activations()
