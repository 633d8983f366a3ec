"""The exact-arithmetic helper: sums of its values have the same bits in any order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.models import TinyGPT, batches
from upguard_plugin.errors import PlacementError
from upguard_plugin.exact import (
    ExactnessError,
    bit_width,
    exact_data,
    exact_functions,
    exact_values,
    keep_exact,
    make_exact,
    watch_exact,
)
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Axis, Layout

TP2 = [Layout((Axis("tp", 2, index, (0, 1)),)) for index in range(2)]


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    with exact_functions():
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / 32


def gradients(model: nn.Module, shares: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    model.zero_grad()
    for tokens, labels in shares:
        loss_of(model, tokens, labels).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_an_exact_model_do_not_depend_on_the_order_of_the_samples(dtype):
    model = TinyGPT(core=Attention)
    make_exact(model, dtype=dtype)
    tokens, labels = batches(num=1)[0]

    at_once = gradients(model, [(tokens, labels)])
    one_by_one = gradients(model, [(tokens[i : i + 1], labels[i : i + 1]) for i in (2, 0, 3, 1)])

    assert all(map(torch.equal, at_once, one_by_one))
    assert sum(int(grad.count_nonzero()) for grad in at_once) > 2500  # there is something to see


def test_gradients_of_an_ordinary_model_do_depend_on_the_order_of_the_samples():
    torch.manual_seed(0)
    model = TinyGPT(core=Attention)
    tokens, labels = batches(num=1)[0]

    at_once = gradients(model, [(tokens, labels)])
    one_by_one = gradients(model, [(tokens[i : i + 1], labels[i : i + 1]) for i in (2, 0, 3, 1)])

    assert not all(map(torch.equal, at_once, one_by_one))


def test_an_exact_model_stays_exact_as_it_trains():
    model = TinyGPT(core=Attention, dropout=0.5)
    make_exact(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=64.0)
    keep_exact(optimizer)
    before = model.blocks[0].mlp.fc1.weight.detach().clone()

    for tokens, labels in batches(num=4):
        optimizer.zero_grad()
        with watch_exact(model) as widest:
            loss_of(model, tokens, labels).backward()
        optimizer.step()

    assert 10 < widest.bits < 30
    after = model.blocks[0].mlp.fc1.weight.detach()
    assert not torch.equal(before, after)
    assert bit_width(after) <= 2


def test_a_model_that_rounds_is_refused_with_the_widest_place():
    model = TinyGPT(core=Attention).double()
    tokens, labels = batches(num=1)[0]

    with pytest.raises(ExactnessError) as error, watch_exact(model):
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()

    assert error.value.sentence.startswith("the model is not exact")
    assert error.value.evidence["bits"] > error.value.evidence["at most"] == 50


def test_the_hooks_of_the_watch_are_gone_after_its_block():
    model = nn.Linear(4, 4)

    with watch_exact(model):
        pass

    assert not model._forward_hooks
    assert not model.weight._post_accumulate_grad_hooks


def test_two_halves_of_a_weight_have_the_values_of_the_whole():
    whole = exact_values("fc1.weight", (6, 4))
    halves = [
        exact_values("fc1.weight", (3, 4), placement=resolve_placement("o[tp] i", (3, 4), layout))
        for layout in TP2
    ]

    assert torch.equal(torch.cat(halves), whole)
    assert set(whole.unique().tolist()) == {-1.0, -0.5, 0.0, 0.5, 1.0}


def test_padding_has_no_value():
    held = [resolve_placement("v[tp]~5 h", (3, 4), layout) for layout in TP2]
    parts = [exact_values("embed.weight", (3, 4), placement=one) for one in held]

    assert torch.equal(torch.cat(parts)[:5], exact_values("embed.weight", (5, 4)))
    assert torch.equal(parts[1][2], torch.zeros(4, dtype=torch.float64))


def test_parameters_are_named_as_the_capture_names_them():
    plain, tied = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    make_exact(plain, rename=lambda name: f"layers.7.{name}")
    make_exact(tied, tied=[["layers.7.weight", "weight"]])

    assert torch.equal(plain.weight, exact_values("layers.7.weight", (4, 4)))
    assert torch.equal(tied.weight, plain.weight)
    assert not torch.equal(plain.weight, exact_values("weight", (4, 4)))
    assert not torch.equal(plain.weight, exact_values("layers.7.weight", (4, 4), seed=1))


def test_a_part_that_no_placement_describes_is_refused():
    with pytest.raises(PlacementError) as error:
        make_exact(nn.Linear(4, 2), layout=TP2[0])

    assert str(error.value) == (
        "cannot make weight exact: which part of it this rank holds is not known\n"
        "  shape  [2, 4]\n"
        "  axes   tp\n"
        "  try    say it: placements={'weight': '* o[tp]'}, or '*' for all of it"
    )


def test_parts_of_a_batch_are_parts_of_the_exact_batch():
    batch = {"x": torch.randn(4, 3), "labels": torch.arange(4)}

    exact = exact_data(batch)

    assert torch.equal(exact["x"][2:], exact_data(batch["x"][2:]))
    assert exact["x"].dtype == torch.float64
    assert bit_width(exact["x"]) <= 2
    assert exact["labels"] is batch["labels"]


@pytest.mark.parametrize(
    ("values", "bits"),
    [([0.0], 0), ([1.0, 4.0], 3), ([0.5, -3.0], 3), ([0.1], 52), ([float("nan")], 1 << 30)],
)
def test_the_width_of_a_tensor_is_that_of_integers_of_one_unit(values, bits):
    assert bit_width(torch.tensor(values, dtype=torch.float64)) == bits


ROWS = torch.tensor([[3.0, -1.0, 0.0], [0.25, 0.125, -0.25]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "twin"),
    [
        (F.gelu, [[3.0, 0.0, 0.0], [0.25, 0.125, 0.0]]),
        (torch.tanh, [[1.0, -1.0, 0.0], [0.25, 0.125, -0.25]]),
        (torch.sigmoid, [[1.0, 0.0, 0.0], [0.25, 0.125, 0.0]]),
        (lambda x: F.dropout(x, 0.9), ROWS.tolist()),
        (lambda x: F.layer_norm(x, (3,)), [[1.0, 0.0, 0.0], [0.5, 0.0, -0.5]]),
        (lambda x: F.rms_norm(x, (3,)), [[1.0, 0.0, 0.0], [0.5, 0.0, -0.5]]),
        (lambda x: x.softmax(-1), [[1.0, 0.0, 0.0], [0.5, 0.0, -0.5]]),
        (lambda x: torch.softmax(x, 0), [[1.0, -0.5, 0.0], [0.0, 0.0, -0.5]]),
        (nn.Hardtanh(), [[1.0, -1.0, 0.0], [0.25, 0.125, -0.25]]),
    ],
)
def test_a_function_that_rounds_has_an_exact_twin(function, twin):
    with exact_functions():
        assert function(ROWS).tolist() == twin
    assert function(ROWS).tolist() != twin or function.__class__ is nn.Hardtanh


def test_a_mask_hides_what_it_hides():
    q, k, v = (exact_values(name, (1, 2, 4, 4)) for name in "qkv")
    hidden = torch.ones(4, 4, dtype=torch.bool).tril()
    as_scores = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~hidden, float("-inf"))

    with exact_functions():
        outputs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, attn_mask=hidden),
            F.scaled_dot_product_attention(q, k, v, attn_mask=as_scores),
            (q @ k.transpose(-2, -1) + as_scores).softmax(-1) @ v,
        ]

    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert outputs[0].count_nonzero()


def test_a_norm_gives_twice_the_gradient_for_twice_the_loss():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 8, dtype=torch.float64)

    with exact_functions():
        (once,) = torch.autograd.grad((F.layer_norm(x, (8,)) * weights).sum(), x)
        (twice,) = torch.autograd.grad((F.layer_norm(x, (8,)) * weights * 2).sum(), x)

    assert torch.equal(twice, 2 * once)
    assert bit_width(once) <= 8


def test_a_function_of_the_users_own_gets_the_twin_that_it_is_given():
    class Squash(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x)

    model = Squash()
    make_exact(model, twins={torch.erf: lambda x: x.clamp(-1, 1)})

    assert model(torch.tensor([3.0, 0.5], dtype=torch.float64)).tolist() == [1.0, 0.5]


def test_labels_that_are_left_out_count_for_nothing():
    logits = exact_values("logits", (4, 6)).requires_grad_()
    labels = torch.tensor([1, -100, 5, 0])

    with exact_functions():
        losses = F.cross_entropy(logits, labels, reduction="none")
        mean = F.cross_entropy(logits, labels)

    assert losses[1] == 0
    assert mean == losses.sum() / 4  # the power of two above three labels
    mean.backward()
    assert torch.equal(logits.grad[1], torch.zeros(6, dtype=torch.float64))
    assert logits.grad[0].count_nonzero() >= 4
