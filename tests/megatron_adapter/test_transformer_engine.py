"""What a CPU does not run, by stand-ins with the real names and call shapes.

Transformer Engine's modules, grouped experts, context parallelism, the
all-gather dispatcher. Each whole tensor is cut as the ranks would hold it, and the parts that the
placements describe must add up to the fingerprint of the whole.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from upguard_plugin.capture.names import ParameterNames
from upguard_plugin.fingerprint import fingerprint
from upguard_plugin.integrations.megatron.placements import MegatronPlacements, Shard, find_rules
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.records import Axis, Layout

S, B, H, HEADS, TOKENS = 8, 3, 4, 4, 7


def _layout(rank, **sizes):
    """Two ranks that part along the axes named; all others have one rank."""
    experts = ("etp", "ep", "edp")
    axes = [
        Axis(name, size, rank if size > 1 else 0, (0, 1) if size > 1 else (rank,), mesh)
        for mesh, names in (("dense", ("tp", "cp", "dp", "pp")), ("expert", (*experts, "pp")))
        for name in names
        for size in (sizes.get(name, 1),)
    ]
    return Layout(tuple(axes))


def _rules(model, rank, sizes, config, shards=None):
    layout = _layout(rank, **sizes)
    names = ParameterNames((("", model),))
    found = find_rules(names, config, layout, None)
    rules = MegatronPlacements(found, None, layout, shards or {}, {})
    rules.set_batch_size(B)
    return rules


def _adds_up(model, boundary, role, slot, whole, parts, config=None, shards=None, **sizes):
    """Whether both ranks' parts of a tensor make it up, replicas counted once."""
    config = config or SimpleNamespace()
    held = {}
    for rank, part in enumerate(parts):
        rules = _rules(model, rank, sizes, config, shards and shards[rank])
        placed = rules.of(boundary, role, slot, part.shape)
        assert placed is not None, f"{boundary} {role} {slot} is not placed"
        held.setdefault(placed.pieces, (placed, fingerprint(part, placement=placed)))
    check_cover([placed for placed, _ in held.values()], boundary)
    total, *rest = [found for _, found in held.values()]
    for found in rest:
        total = total + found
    return (total.h, total.s) == (fingerprint(whole).h, fingerprint(whole).s)


def _tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _zigzag(whole, dim):
    one, two, three, four = whole.chunk(4, dim)
    return [torch.cat((one, four), dim), torch.cat((two, three), dim)]


class TELayerNormColumnParallelLinear(nn.Module):
    def __init__(self, sequence_parallel=False, gated=False):
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.config = SimpleNamespace(gated_linear_unit=gated)

    def forward(self, x):
        return x, None


class TEColumnParallelLinear(TELayerNormColumnParallelLinear):
    pass


class TERowParallelLinear(TELayerNormColumnParallelLinear):
    pass


class TELinear(TELayerNormColumnParallelLinear):
    pass


class TEDotProductAttention(nn.Module):
    config = SimpleNamespace(num_query_groups=HEADS, tensor_model_parallel_size=2)

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None):
        return query


def _model(**modules):
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


@pytest.mark.parametrize("cls", [TEColumnParallelLinear, TELayerNormColumnParallelLinear])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_parallel_layers_of_transformer_engine(cls, sequence_parallel):
    model = _model(linear_qkv=cls(sequence_parallel))
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    given, taken = _tensor(S, B, 12), _tensor(S, B, H)
    halves = taken.chunk(2, 0) if sequence_parallel else [taken, taken]

    assert _adds_up(model, "linear_qkv", "input", "args.0", taken, halves, config, tp=2)
    assert _adds_up(model, "linear_qkv", "output", "out.0", given, given.chunk(2, -1), tp=2)
    assert _adds_up(model, "linear_qkv", "grad_output", "out.0", given, given.chunk(2, -1), tp=2)


def test_gate_and_up_of_a_gated_layer_are_each_split():
    model = _model(linear_fc1=TELayerNormColumnParallelLinear(gated=True))
    whole = _tensor(S, B, 8)
    gate, up = (half.chunk(2, -1) for half in whole.chunk(2, -1))
    parts = [torch.cat((gate[k], up[k]), -1) for k in range(2)]

    assert _adds_up(model, "linear_fc1", "output", "out.0", whole, parts, tp=2)
    assert not _adds_up(model, "linear_fc1", "output", "out.0", whole, whole.chunk(2, -1), tp=2)


def test_row_parallel_and_duplicated_layers_of_transformer_engine():
    model = _model(linear_proj=TERowParallelLinear(True), linear_q_down_proj=TELinear(True))
    config = SimpleNamespace(sequence_parallel=True)
    taken, given = _tensor(S, B, 12), _tensor(S, B, H)

    assert _adds_up(model, "linear_proj", "input", "args.0", taken, taken.chunk(2, -1), tp=2)
    for name in ("linear_proj", "linear_q_down_proj"):
        assert _adds_up(model, name, "output", "out.0", given, given.chunk(2, 0), config, tp=2)


def test_attention_under_context_parallelism_is_placed_in_zigzag_order():
    model = _model(core_attention=TEDotProductAttention())
    heads, given = _tensor(S, B, HEADS, 2), _tensor(S, B, HEADS * 2)

    for slot in ("args.0", "args.1", "args.2"):
        parts = _zigzag(heads, 0)
        assert _adds_up(model, "core_attention", "input", slot, heads, parts, cp=2)
        assert _adds_up(model, "core_attention", "grad_input", slot, heads, parts, cp=2)
    assert _adds_up(model, "core_attention", "output", "0", given, _zigzag(given, 0), cp=2)
    assert not _adds_up(model, "core_attention", "output", "0", given, given.chunk(2, 0), cp=2)


@pytest.mark.megatron
def test_batches_are_placed_as_megatron_cuts_them_for_context_parallelism(monkeypatch):
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    whole, parts = torch.arange(B * S).view(B, S), []
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        parts.append(get_batch_on_this_cp_rank({"tokens": whole.clone()})["tokens"])

    assert _adds_up(_model(), "tokens", "data", "0", whole, parts, cp=2)


class Router(nn.Module):
    def forward(self, input, padding_mask=None):
        return input, input


def test_a_router_gives_its_rank_of_the_tokens():
    model = _model(router=Router())
    config = SimpleNamespace(sequence_parallel=True)
    whole = _tensor(S, B, HEADS)
    parts = [part.flatten(0, 1) for part in whole.chunk(2, 0)]
    replicas = [part.flatten(0, 1) for part in torch.cat((whole, whole + 1), 1).chunk(2, 1)]
    both = torch.cat((whole, whole + 1), 1).flatten(0, 1)

    for slot in ("out.0", "out.1"):
        flat = whole.flatten(0, 1)
        assert _adds_up(model, "router", "output", slot, flat, parts, config, tp=2)
        assert _adds_up(model, "router", "output", slot, both, replicas, dp=2)


class GroupedMLP(nn.Module):
    """All experts of a rank in two parameters."""

    def __init__(self, experts, ffn, gated, expert_parallel):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=H, gated_linear_unit=gated)
        self.num_local_experts = experts
        width = 2 * ffn if gated else ffn
        self.weight1 = nn.Parameter(torch.empty(H, experts * width))
        self.weight2 = nn.Parameter(torch.empty(experts * ffn, H))
        for weight, dim in ((self.weight1, 1), (self.weight2, 0)):
            weight.allreduce = not expert_parallel
            weight.tensor_model_parallel, weight.partition_dim = True, dim

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        return permuted_local_hidden_states, None


def _experts(module):
    return _model(mlp=_model(experts=module))


@pytest.mark.parametrize("gated", [False, True])
def test_fused_weights_of_experts_are_placed_by_expert(gated):
    """They are split over the ranks within each expert, as their memory is read."""
    config = SimpleNamespace(gated_linear_unit=gated)
    width = 12 if gated else 6
    whole1, whole2 = _tensor(2, H, width), _tensor(2, 6, H)
    model = _experts(GroupedMLP(2, 3, gated, expert_parallel=False))
    if gated:
        halves = [half.chunk(2, -1) for half in whole1.chunk(2, -1)]
        parts1 = [torch.cat((halves[0][k], halves[1][k]), -1) for k in range(2)]
    else:
        parts1 = whole1.chunk(2, -1)
    parts1 = [part.reshape(H, -1) for part in parts1]
    parts2 = [part.reshape(-1, H) for part in whole2.chunk(2, 1)]

    sizes = {"tp": 2, "etp": 2}
    for role in ("param", "main_grad", "master"):
        for name, whole, parts in (("weight1", whole1, parts1), ("weight2", whole2, parts2)):
            place = (model, f"mlp.experts.{name}", role, role, whole, parts, config)
            assert _adds_up(*place, **sizes)


def test_fused_weights_of_experts_on_several_ranks_and_their_slices():
    config = SimpleNamespace(gated_linear_unit=False)
    whole = _tensor(4, H, 3)
    model = _experts(GroupedMLP(2, 3, False, expert_parallel=True))
    parts = [part.reshape(H, -1) for part in whole.chunk(2, 0)]

    assert _adds_up(model, "mlp.experts.weight1", "param", "value", whole, parts, config, ep=2)

    flat, shape = whole[:2].reshape(-1), (H, 6)
    slices = [
        {"mlp.experts.weight1": Shard(0, 10, shape)},
        {"mlp.experts.weight1": Shard(10, 24, shape)},
    ]
    place = (model, "mlp.experts.weight1", "master", "master", whole[:2])
    assert _adds_up(*place, [flat[:10], flat[10:]], config, slices, edp=2)


class TEGroupedMLP(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.linear_fc1 = TEColumnParallelGroupedLinear(gated)
        self.linear_fc2 = TERowParallelGroupedLinear(gated)

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        return permuted_local_hidden_states, None


class TEColumnParallelGroupedLinear(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=gated)

    def forward(self, x, m_splits):
        return x, None


class TERowParallelGroupedLinear(TEColumnParallelGroupedLinear):
    pass


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_grouped_experts_have_their_tokens_placed(dispatcher):
    config = SimpleNamespace(moe_token_dispatcher_type=dispatcher)
    model, sizes = _experts(TEGroupedMLP(False)), {"tp": 2, "etp": 2}
    tokens, given = _tensor(TOKENS, H), _tensor(TOKENS, 6)
    inside = "mlp.experts"
    whole = (model, inside, "input", "args.0", tokens, [tokens, tokens], config)
    split = (model, f"{inside}.linear_fc1", "output", "out.0", given, given.chunk(2, -1), config)

    assert _adds_up(*whole, **sizes)
    assert _adds_up(*split, **sizes)
    rules = _rules(model, 0, sizes, config)
    for place in (
        (inside, "output", "out.0"), (inside, "grad_input", "args.0"),
        (f"{inside}.linear_fc2", "output", "out.0"),
        (f"{inside}.linear_fc1", "grad_input", "args.0"),
    ):  # fmt: skip
        assert rules.of(*place, tokens.shape).partial == ("etp",)
    assert rules.of(inside, "grad_output", "out.0", tokens.shape).partial == ()


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"dp": 2, "ep": 2}, {}),
        ({"cp": 2, "ep": 2}, {}),
        ({"tp": 2, "edp": 2}, {}),
        ({"tp": 2, "ep": 2}, {}),
        ({"tp": 2, "etp": 2}, {"moe_token_dispatcher_type": "flex"}),
        ({"tp": 2, "etp": 2}, {"moe_expert_capacity_factor": 1.0}),
    ],
)
def test_tokens_whose_order_or_number_is_another_on_one_rank_stay_unknown(sizes, config):
    model = _experts(TEGroupedMLP(False))

    rules = _rules(model, 0, sizes, SimpleNamespace(**config))

    assert rules.of("mlp.experts", "input", "args.0", torch.Size((TOKENS, H))) is None
    place = ("mlp.experts.linear_fc1", "output", "out.0", torch.Size((TOKENS, H)))
    assert rules.of(*place) is None
