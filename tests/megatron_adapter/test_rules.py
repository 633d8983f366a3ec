"""Rules, names and versions, by stand-ins: parts of Megatron that a CPU does not run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from upguard_plugin.errors import UsageError
from upguard_plugin.integrations.megatron import versions
from upguard_plugin.integrations.megatron.names import GlobalNames
from upguard_plugin.integrations.megatron.parameter_rules import parameter_spec
from upguard_plugin.integrations.megatron.rules import activations_of
from upguard_plugin.integrations.megatron.versions import (
    PARAMETERS,
    PLACES,
    check_megatron,
    check_version,
)
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Axis, Layout

LAYOUT = Layout(
    (
        Axis("tp", 2, 1, (2, 3)),
        Axis("cp", 2, 0, (1, 3)),
        Axis("dp", 2, 0, (3, 7)),
        Axis("etp", 1, 0, (3,), "expert"),
        Axis("ep", 2, 1, (1, 3), "expert"),
    )
)
CONFIG = SimpleNamespace(gated_linear_unit=False)


def _parameter(shape, dim=None, stride=1, expert=False):
    parameter = nn.Parameter(torch.zeros(shape))
    if dim is not None:
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = dim, stride
    if expert:
        parameter.allreduce = False
    return parameter


GATED = SimpleNamespace(gated_linear_unit=True)


@pytest.mark.parametrize(
    ("name", "parameter", "config", "vocabulary", "spec", "logical"),
    [
        ("l.mlp.linear_fc1.weight", _parameter([6, 4], 0), CONFIG, None, "o[tp] i", (12, 4)),
        ("l.mlp.linear_fc1.weight", _parameter([6, 4], 0), GATED, None, "(2 f[tp]) i", (12, 4)),
        ("l.mlp.linear_fc1.bias", _parameter([6], 0), GATED, None, "(2 f[tp])", (12,)),
        ("l.mlp.linear_fc2.weight", _parameter([4, 6], 1), CONFIG, None, "o i[tp]", (4, 12)),
        ("l.mlp.linear_fc2.bias", _parameter([4]), CONFIG, None, "o", (4,)),
        ("a.linear_qkv.weight", _parameter([6, 4], 0), CONFIG, None, "(g[tp] qkv d) i", (12, 4)),
        ("x.proj.weight", _parameter([6, 4], 0, 3), CONFIG, None, "(3 o[tp]) i", (12, 4)),
        ("output_layer.weight", _parameter([6, 4], 0), CONFIG, 11, "v[tp]~11 i", (11, 4)),
        (
            "m.experts.local_experts.3.linear_fc1.weight",
            _parameter([6, 4], 0, expert=True), CONFIG, None, "o[etp] i @expert", (6, 4),
        ),
        ("m.router.weight", _parameter([4, 8]), CONFIG, None, "o i", (4, 8)),
    ],
)  # fmt: skip
def test_a_parameter_is_placed_as_megatron_marks_it(
    name, parameter, config, vocabulary, spec, logical
):
    is_expert = not getattr(parameter, "allreduce", True)
    found = parameter_spec(name, parameter, config, vocabulary, is_expert=is_expert)
    assert found == spec
    placed = resolve_placement(spec, tuple(parameter.shape), LAYOUT)
    assert placed.logical_shape == logical


class TEColumnParallelLinear(nn.Module):
    """Named as Transformer Engine's wrapper in Megatron is."""

    sequence_parallel = True


class TEDotProductAttention(nn.Module):
    """Likewise."""

    config = SimpleNamespace(num_query_groups=4, tensor_model_parallel_size=2)


def test_modules_of_transformer_engine_are_told_by_their_class():
    linear = activations_of("decoder.layers.0.mlp.linear_fc1", TEColumnParallelLinear())
    attention = activations_of("decoder.layers.0.self_attention.core", TEDotProductAttention())

    assert linear.inputs["x"] == "{S} {B} i"
    assert linear.outputs[0] == "{C} {B} o[tp]"
    assert attention.inputs == dict.fromkeys(("query", "key", "value"), "{C} {B} n[tp] d")


def test_keys_that_several_ranks_hold_copies_of_stay_unknown():
    module = TEDotProductAttention()
    module.config = SimpleNamespace(num_query_groups=1, tensor_model_parallel_size=2)

    assert set(activations_of("core_attention", module).inputs) == {"query"}


@pytest.mark.parametrize(
    ("parent", "spec"),
    [(nn.Module(), "{C} {B} n[tp] d"), (SimpleNamespace(linear_kv_down_proj=None), "{S} {B} h")],
)
def test_a_norm_of_queries_is_over_heads_but_in_latent_attention(parent, spec):
    norm = nn.LayerNorm(2)

    assert activations_of("self_attention.q_layernorm", norm, parent).outputs == (spec,)


def test_layers_between_pipeline_stages_are_placed_at_the_ends_of_the_model_only():
    class TransformerBlock(nn.Module):
        pre_process, post_process = True, False

    block = activations_of("decoder", TransformerBlock())

    assert "hidden_states" in block.inputs
    assert block.outputs == ()


@pytest.mark.parametrize(("index", "held"), [(0, {0, 3}), (1, {1, 2})])
def test_context_parallel_ranks_hold_chunks_in_zigzag_order(index, held):
    layout = Layout((Axis("cp", 2, index, (0, 1)),))

    placed = resolve_placement("s[cp:zigzag]", (2,), layout)

    places = {
        piece.logical_start + k * piece.logical_strides[0]
        for piece in placed.pieces
        for k in range(piece.sizes[0])
    }
    assert places == held


class Layer(nn.Module):
    """A transformer layer that knows its number in the whole model."""

    def __init__(self, number, experts=None):
        super().__init__()
        self.layer_number = number
        self.mlp = experts or nn.Linear(2, 2)


class Grouped(nn.Module):
    """Experts of Transformer Engine: one weight each, in one module."""

    def __init__(self, indices):
        super().__init__()
        self.local_expert_indices = indices
        self.experts = nn.Module()
        self.experts.linear_fc1 = nn.Module()
        for local in range(len(indices)):
            weight = nn.Parameter(torch.zeros(1))
            self.experts.linear_fc1.register_parameter(f"weight{local}", weight)


def _chunk(*layers):
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(layers)
    return model


def test_layers_of_chunks_get_their_numbers_in_the_whole_model():
    rename = GlobalNames((("model0.", _chunk(Layer(3))), ("model1.", _chunk(Layer(7), Layer(8)))))

    assert rename("model0.decoder.layers.0.mlp.weight") == "decoder.layers.2.mlp.weight"
    assert rename("model1.decoder.layers.1") == "decoder.layers.7"
    assert rename("model1") == "model1"
    assert rename("model0.tokens") == "tokens"


def test_experts_of_one_module_get_their_numbers_in_the_whole_model():
    rename = GlobalNames((("", _chunk(Layer(1, Grouped([4, 5])))),))
    place = "decoder.layers.0.mlp.experts.linear_fc1"

    assert rename(f"{place}.weight0") == f"{place}.weight4"
    assert rename(f"{place}.weight1") == f"{place}.weight5"


def test_an_old_megatron_is_refused_in_one_sentence():
    with pytest.raises(UsageError, match=r"cannot record megatron-core 0\.13\.1: UpGuard needs"):
        check_version("0.13.1")
    assert check_version("0.14.0") == check_version("0.16.1") == ""


def test_a_megatron_that_nobody_tried_is_recorded_and_said_so():
    said = "is newer than 0.16.1, the newest that was tried"

    assert check_version("0.17.0rc0") == f"megatron-core 0.17.0rc0 {said}"
    assert check_version("1.0") == f"megatron-core 1.0 {said}"


@pytest.mark.megatron
def test_the_installed_megatron_is_held_against_what_was_tried(monkeypatch):
    pytest.importorskip("megatron.core")
    assert check_megatron() == ""
    monkeypatch.setattr(versions, "TESTED", "0.13.0")

    assert check_megatron().endswith("is newer than 0.13.0, the newest that was tried")


@pytest.mark.megatron
def test_every_place_that_the_adapter_relies_on_is_there():
    pytest.importorskip("megatron.core")
    assert PLACES
    check_megatron()


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("table", "module", "entry", "said"),
    [
        (PLACES, "megatron.core.timers", ("Timers", "Clock"), "megatron.core.timers has no Clock"),
        (
            PARAMETERS,
            "megatron.core.pipeline_parallel.schedules",
            {"backward_step": ("output_tensor", "microbatch")},
            "schedules.backward_step takes no microbatch",
        ),
    ],
)
def test_a_place_that_has_moved_is_named(monkeypatch, table, module, entry, said):
    pytest.importorskip("megatron.core")
    monkeypatch.setitem(table, module, entry)

    with pytest.raises(UsageError) as raised:
        check_megatron()

    assert raised.value.sentence.startswith("cannot record Megatron 0.")
    assert said in raised.value.sentence
