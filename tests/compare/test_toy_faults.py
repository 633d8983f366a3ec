from __future__ import annotations

import pytest

from tests.toy_training import flip, train
from upguard_plugin.compare.runs import compare_runs

# What goes wrong: where its value is made, and the answer:
# step, micro-batch, phase, boundary, role, kind.
FAULTS = {
    "weight init": (
        "-/-/init/embed.weight/param",
        "0 - start embed.weight param init",
    ),
    "master at start": (
        "0/-/start/embed.weight/master",
        "0 - start embed.weight master optimizer",
    ),
    "moment at start": (
        "2/-/start/ln_f.weight/optimizer_state",
        "2 - start ln_f.weight optimizer_state optimizer",
    ),
    "weight between steps": (
        "1/-/start/head.weight/param",
        "1 - start head.weight param optimizer",
    ),
    "one draw between steps": (
        "1/-/start/rng.torch_cpu/rng",
        "1 - start rng.torch_cpu rng rng",
    ),
    "token": (
        "1/1/data/input_ids/data",
        "1 1 data input_ids data data",
    ),
    "forward GEMM": (
        "1/0/forward/blocks.1.mlp.fc1/output",
        "1 0 forward blocks.1.mlp.fc1 output forward",
    ),
    "forward LayerNorm": (
        "1/0/forward/blocks.0.ln1/output",
        "1 0 forward blocks.0.ln1 output forward",
    ),
    "operation between": (
        "1/0/forward/blocks.1.residual/output",
        "1 0 forward blocks.1.ln2 input forward",
    ),
    "loss": (
        "0/1/loss/loss/output",
        "0 1 loss loss output forward",
    ),
    "backward GEMM": (
        "1/1/backward/blocks.1.mlp.fc1/grad_input",
        "1 1 backward blocks.1.mlp.fc1 grad_input backward",
    ),
    "backward of a block's first": (
        "1/0/backward/blocks.1.ln1/grad_input",
        "1 0 backward blocks.1.ln1 grad_input backward",
    ),
    "gradient of the loss": (
        "1/0/backward/loss/grad",
        "1 0 backward head grad_output backward",
    ),
    "weight gradient": (
        "0/1/accumulate/blocks.0.attn.qkv.weight/grad",
        "0 1 accumulate blocks.0.attn.qkv.weight grad backward",
    ),
    "grad norm": (
        "1/-/clip/grad_norm/scalar",
        "1 - clip grad_norm scalar optimizer",
    ),
    "moment in update": (
        "1/-/optimizer/ln_f.weight/optimizer_state",
        "1 - optimizer ln_f.weight optimizer_state optimizer",
    ),
    "weight after step": (
        "1/-/optimizer/ln_f.weight/param",
        "1 - optimizer ln_f.weight param optimizer",
    ),
    "learning rate": (
        "0/-/schedule/lr/scalar",
        "1 - start optimizer.group0.lr scalar optimizer",
    ),
}


def answer(found) -> str:
    microbatch = "-" if found.microbatch is None else found.microbatch
    return " ".join(
        map(str, (found.step, microbatch, found.phase, found.boundary, found.role, found.kind))
    )


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_named_at_its_place(name):
    place, expected = FAULTS[name]

    verdict = compare_runs(train(), train(fault=flip(place), name="faulty"))

    assert verdict.verdict == "divergent"
    assert answer(verdict.first_divergence) == expected
    assert verdict.concurrent == []


@pytest.mark.parametrize("settings", [{}, {"world": 2}, {"world": 2, "collectives": True}])
def test_the_same_run_twice_is_identical(settings):
    verdict = compare_runs(train(**settings), train(**settings))

    assert (verdict.verdict, verdict.first_divergence) == ("identical", None)
    assert verdict.coverage.compared > 0
    assert verdict.certified.events == verdict.coverage.compared


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_on_rank_1_is_named_on_rank_1_alone(name, collectives):
    place, expected = FAULTS[name]

    verdict = compare_runs(
        train(world=2, collectives=collectives),
        train(world=2, collectives=collectives, fault=flip(place, rank=1), name="faulty"),
    )

    assert answer(verdict.first_divergence) == expected
    assert verdict.first_divergence.ranks == [1]
    assert verdict.concurrent == []
