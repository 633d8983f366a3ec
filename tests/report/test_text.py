"""Whole reports against text."""

from __future__ import annotations

import pytest

from upguard_plugin.report.text import verdict_text
from upguard_plugin.verdict import Certified, Coverage, Divergence, RunSide, Tainted, Verdict
from upguard_plugin.verdict_parts import Change, Distance, EventRef, GroupRef, SourceRef, TensorSide

COUNTS = {"ranks": 8, "noise": 0, "never_fired": 1, "filtered": 0}
LAST = EventRef(
    step=3, rank=1, microbatch=1, phase="backward", boundary="decoder.final_layernorm",
    operator="LayerNorm", role="grad_output", slot="0", call=0,
)  # fmt: skip


def tensor(fingerprint: str) -> TensorSide:
    return TensorSide(dtype="bfloat16", shape=[4096, 1024], fingerprint=fingerprint)


def divergence(**changes) -> Divergence:
    fields = {
        "step": 3,
        "microbatch": 1,
        "phase": "backward",
        "kind": "backward",
        "boundary": "decoder.layers.11.mlp.linear_fc2",
        "operator": "aten.mm",
        "role": "grad_input",
        "slot": "0",
        "call": 2,
        "ranks": [1, 5],
        "iteration": 103,
        "moment": None,
        "inputs_equal": True,
        "group": None,
        "baseline": tensor("0d1f02ce88a041b3"),
        "target": tensor("0d1f02cf88a041b3"),
        "distance": Distance(relative_l2=0.00021, in_eps=0.027, estimated=True),
        "producer": None,
        "source": SourceRef(file="megatron/core/transformer/mlp.py", line=214),
        "explanation": "The grad_input 0 of decoder.layers.11.mlp.linear_fc2 differs although "
        "its inputs are equal.",
    }
    return Divergence(**(fields | changes))


def verdict(word: str, **changes) -> Verdict:
    side = {"run_id": "r", "layout": {"world_size": 8, "tp": 2}}
    fields = {
        "verdict": word,
        "baseline": RunSide(path="runs/a", **side),
        "target": RunSide(path="runs/b", **side),
        "first_divergence": None,
        "concurrent": [],
        "tainted": None,
        "per_rank": [],
        "certified": Certified(events=18204, last=LAST),
        "coverage": Coverage(
            compared=21121, differ=0, unmatched_baseline=0, unmatched_target=0, not_comparable=0,
            **COUNTS,
        ),
        "notes": [],
    }  # fmt: skip
    return Verdict(**(fields | changes))


def test_a_divergent_verdict():
    first = divergence()
    made = verdict(
        "divergent",
        first_divergence=first,
        concurrent=[divergence(boundary="head", ranks=[7], call=0)],
        per_rank=[divergence(ranks=[1]), divergence(ranks=[5]), divergence(ranks=[7])],
        coverage=Coverage(
            compared=21121, differ=2917, unmatched_baseline=0, unmatched_target=3,
            not_comparable=12, **COUNTS,
        ),
        notes=["environment: torch 2.13.0 against 2.12.1"],
    )  # fmt: skip

    assert verdict_text(made).splitlines() == [
        "DIVERGENT at step 3 (iteration 103), micro-batch 1, backward",
        "    boundary   decoder.layers.11.mlp.linear_fc2, operator aten.mm, call 2",
        "    tensor     grad_input 0, bfloat16 [4096, 1024]",
        "    ranks      1, 5 differ; 7 differs later; 5 others are equal",
        "    kind       backward: The grad_input 0 of decoder.layers.11.mlp.linear_fc2 differs "
        "although its inputs are equal.",
        "    inputs     equal, so this is the origin",
        "    baseline   0d1f02ce88a041b3 bfloat16 [4096, 1024]",
        "    target     0d1f02cf88a041b3 bfloat16 [4096, 1024]",
        "    distance   0.00021 of its norm, 0.027 epsilons (estimated)",
        "    source     megatron/core/transformer/mlp.py:214",
        "  also       step 3 (iteration 103), micro-batch 1, backward: head grad_input 0 "
        "(backward), rank 7",
        "  certified  18204 events before it are equal, bit by bit; the last is "
        "decoder.final_layernorm grad_output 0 (step 3, micro-batch 1, backward, rank 1)",
        "  coverage   21121 compared, 2917 differ, 3 unmatched (0 in the baseline, 3 in the "
        "target), 12 not comparable, 1 probe never fired",
        "  note       environment: torch 2.13.0 against 2.12.1",
    ]


def test_a_missing_collective():
    first = divergence(
        microbatch=None,
        phase="grad_sync",
        kind="collective",
        boundary="bucket0",
        operator="c10d.allreduce_",
        role="input",
        call=0,
        moment="launch",
        iteration=3,
        inputs_equal=None,
        group=GroupRef(name="dp", ranks=[0, 1], seq=12),
        target=None,
        distance=None,
        source=None,
        explanation="The all_reduce sum: input 0 of bucket0 is missing in the target.",
    )
    lines = verdict_text(verdict("divergent", first_divergence=first)).splitlines()

    assert lines[:9] == [
        "DIVERGENT at step 3, grad_sync",
        "    boundary   bucket0, operator c10d.allreduce_",
        "    tensor     input 0 at launch, bfloat16 [4096, 1024]",
        "    ranks      1, 5 differ; 6 others are equal",
        "    kind       collective: The all_reduce sum: input 0 of bucket0 is missing in the "
        "target.",
        "    inputs     not recorded as such; every recorded event before it is equal",
        "    group      dp (ranks 0, 1), collective 12 of it",
        "    baseline   0d1f02ce88a041b3 bfloat16 [4096, 1024]",
        "    target     no such event",
    ]


def test_an_operator_that_only_one_run_has():
    told = "Only the target runs aten.mul of fc: what both runs give it is equal, and it leads on."
    first = divergence(
        role="output", slot="out", boundary="fc", operator="aten.mul", call=0, iteration=3,
        microbatch=None, phase="forward", kind="forward", baseline=None, distance=None,
        explanation=told, inputs_equal=None,
        change=Change(how="extra", baseline=[], target=[LAST], reached=LAST),
    )  # fmt: skip
    made = verdict("divergent", first_divergence=first, per_rank=[first])

    assert verdict_text(made).splitlines()[:10] == [
        "DIVERGENT at step 3, forward",
        "    boundary   fc, operator aten.mul",
        "    tensor     output out, bfloat16 [4096, 1024]",
        "    ranks      1, 5 differ; 6 others are equal",
        f"    kind       forward: {told}",
        "    inputs     equal where both runs have them",
        "    baseline   no such event",
        "    target     0d1f02cf88a041b3 bfloat16 [4096, 1024]",
        "    reaches    decoder.final_layernorm grad_output 0 (step 3, micro-batch 1, backward, "
        "rank 1)",
        "    source     megatron/core/transformer/mlp.py:214",
    ]


def test_an_incomparable_verdict_says_why_in_its_first_line():
    made = verdict("incomparable", notes=["missing ranks: the target lacks 3", "level: op"])

    assert verdict_text(made).splitlines() == [
        "INCOMPARABLE: missing ranks: the target lacks 3",
        "  certified  18204 events are equal, bit by bit",
        "  coverage   21121 compared, 0 differ, 0 unmatched, 1 probe never fired",
        "  note       level: op",
    ]


@pytest.mark.parametrize(
    ("counts", "tainted", "expected"),
    [
        ({}, None, "IDENTICAL: 18204 events are equal, bit by bit"),
        (
            {"noise": 3},
            None,
            "IDENTICAL but for noise: 18204 events are equal, bit by bit; 3 are noise",
        ),
        (
            {"ignored": 1, "filtered": 5},
            None,
            "IDENTICAL but for what is ignored: 18204 events are equal, bit by bit; 1 is ignored",
        ),
        (
            {"noise": 1},
            Tainted(origin=LAST, boundaries=40, largest_in_eps=2.0),
            "IDENTICAL but for rounding and noise: 18204 events are equal, bit by bit; "
            "40 are not; 1 is noise",
        ),
    ],
)
def test_the_first_line_says_what_is_identical_by_exception_only(counts, tainted, expected):
    coverage = Coverage(
        compared=21121, differ=0, unmatched_baseline=0, unmatched_target=0, not_comparable=0,
        **(COUNTS | counts),
    )  # fmt: skip
    made = verdict("identical", coverage=coverage, tainted=tainted)

    assert verdict_text(made).splitlines()[0] == expected
    assert (made.verdict, made.exit_code) == ("identical", 0)


def test_long_lists_are_counted_unless_all_is_asked_for():
    made = verdict("identical", notes=[f"note {n}" for n in range(20)])
    short, long = verdict_text(made), verdict_text(made, verbose=True)

    assert short.splitlines()[-1] == "  note       and 8 more (--verbose)"
    assert len(long.splitlines()) == len(short.splitlines()) + 7
    others = [divergence(boundary=f"b{n}") for n in range(9)]
    many = verdict("divergent", first_divergence=divergence(), concurrent=others)
    assert "             and 4 more (--verbose)" in verdict_text(many).splitlines()
    assert "b8" in verdict_text(many, verbose=True)
