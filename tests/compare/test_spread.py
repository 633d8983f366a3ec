"""How a difference spreads: the chain behind the first divergence, rank by rank."""

from __future__ import annotations

import numpy as np

from tests.memory_run import MemoryRun, batch, events, replace
from tests.toy_training import flip, train
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.spread import MAX_LINKS
from upguard_plugin.report.text import verdict_text

STEP = """
forward  0 input  fc1/args.0  x
forward  0 output fc1/out     {a}
forward  0 input  act/args.0  {a}
forward  0 output act/out     {b}
loss     0 output loss/out    {c}
backward 0 grad_input fc1/args.0 {d}
"""
# (value of the first bucket, distance from the baseline's in parts of it)
SKETCHES = {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0, "x": 0.0, "a'": 0.5, "b'": 0.25, "c'": 0.125}


def places(spread) -> list[str]:
    return [f"{link.boundary} {link.role}" for link in spread.boundaries]


def sketched(text: str, name: str) -> MemoryRun:
    """A run whose events have sketches of two buckets."""
    listed = events(text)
    sketch = np.array([[1.0, SKETCHES[event.value]] for event in listed])
    return MemoryRun({0: [replace(batch(0, listed), sketch=sketch)]}, name)


def pair(other: str = "a' b' c' d") -> tuple[MemoryRun, MemoryRun]:
    values = [dict(zip("abcd", text.split(), strict=True)) for text in ("a b c d", other)]
    return tuple(
        sketched(STEP.format(**words), name)
        for words, name in zip(values, ("baseline", "target"), strict=True)
    )


def test_the_chain_has_each_value_once_in_the_order_of_the_step_with_its_distance():
    verdict = compare_runs(*pair())

    (spread,) = verdict.spread
    assert (spread.rank, spread.step) == (0, 0)
    assert places(spread) == ["fc1 output", "act output", "loss output"]
    distances = [link.distance.relative_l2 for link in spread.boundaries]
    assert distances == [0.5, 0.25, 0.125]
    assert spread.boundaries[0].distance == verdict.first_divergence.distance


def test_the_report_shows_what_the_difference_reached():
    lines = verdict_text(compare_runs(*pair())).splitlines()

    at = next(i for i, line in enumerate(lines) if "spread" in line)
    assert lines[at : at + 2] == [
        "    spread     act output out (forward, micro-batch 0): 0.25 of its norm, "
        "2.1e+06 epsilons (estimated)",
        "               loss output out (loss, micro-batch 0): 0.125 of its norm, "
        "1.05e+06 epsilons (estimated)",
    ]


def test_what_nothing_followed_has_a_chain_of_one():
    verdict = compare_runs(*pair("a' b c d"))

    assert [places(spread) for spread in verdict.spread] == [["fc1 output"]]
    assert "spread" not in verdict_text(verdict)


def test_equal_runs_have_no_chain():
    assert compare_runs(pair()[0], pair()[0]).spread == []


def test_the_chain_of_each_rank_begins_where_it_first_differs():
    settings = {"world": 2, "collectives": True}
    fault = flip("1/1/backward/blocks.1.mlp.fc1/grad_input", rank=1)

    verdict = compare_runs(train(**settings), train(**settings, fault=fault, name="target"))

    origin, other = verdict.spread
    assert (origin.rank, other.rank) == (1, 0)
    assert places(origin)[:3] == [
        "blocks.1.mlp.fc1 grad_input",
        "blocks.1.ln2.weight grad",
        "blocks.1.ln2 grad_input",
    ]
    assert places(other)[0] == "dp.all_reduce output"
    assert {len(spread.boundaries) for spread in verdict.spread} == {MAX_LINKS + 1}
    assert [spread.boundaries[0].boundary for spread in verdict.spread] == [
        found.boundary for found in (verdict.first_divergence, verdict.per_rank[0])
    ]


def test_what_was_not_asked_for_is_no_link():
    verdict = compare_runs(*pair(), Selection.parse(roles="output,input", modules="fc1,loss"))

    assert places(verdict.spread[0]) == ["fc1 output", "loss output"]


def test_a_missing_boundary_spreads_from_where_it_is_missing():
    gradient = "accumulate 0 grad w/grad g\nstart - param w/value w\n"
    values = "optimizer - param w/value {}\noptimizer - optimizer_state w/exp_avg m\n"
    baseline = MemoryRun({0: [batch(0, events(gradient + values.format("new")))]}, "baseline")
    other = "start - param w/value w\naccumulate 0 grad v/grad gv\n" + values.format("old")
    target = MemoryRun({0: [batch(0, events(other))]}, "target")

    verdict = compare_runs(baseline, target)

    assert (verdict.first_divergence.boundary, verdict.first_divergence.target) == ("w", None)
    assert places(verdict.spread[0]) == ["w grad", "w param"]


def test_what_was_only_multiplied_has_a_factor():
    times = {"a": (1.0, 3.0), "a'": (2.0, 6.0), "b'": (-0.5, -1.5), "c'": (2.0, 6.5)}

    def scaled(value: str, name: str) -> MemoryRun:
        listed = events(f"loss 0 output loss/out {value}")
        return MemoryRun({0: [replace(batch(0, listed), sketch=np.array([times[value]]))]}, name)

    found = {
        value: compare_runs(scaled("a", "baseline"), scaled(value, "target")).first_divergence
        for value in ("a'", "b'", "c'")
    }

    assert {value: one.distance.factor for value, one in found.items()} == {
        "a'": 2.0, "b'": -0.5, "c'": None,
    }  # fmt: skip
    assert found["a'"].explanation.startswith(
        "The output out of loss is 2 times the baseline's although"
    )


BRANCHES = """
forward 0 input  left/args.0  x   aten.mm
forward 0 output left/out     {a} aten.mm
forward 0 input  right/args.0 x   aten.sin
forward 0 output right/out    {b} aten.sin
forward 0 input  sum/args.0   {a} aten.add
forward 0 input  sum/args.1   {b} aten.add
forward 0 output sum/out      {c} aten.add
forward 0 input  list/args.0  x   aten._foreach_mul
forward 0 output list/out     {d} aten._foreach_mul
"""


def test_an_operator_behind_the_first_that_takes_equal_values_may_be_another_origin():
    runs = [
        MemoryRun({0: [batch(0, events(BRANCHES.format(a=a, b=b, c=c, d=d)))]}, name)
        for name, (a, b, c, d) in (("baseline", "abcd"), ("target", "ABCD"))
    ]

    verdict = compare_runs(*runs)

    (spread,) = verdict.spread
    assert [(link.boundary, link.inputs_equal) for link in spread.boundaries] == [
        ("left", True), ("right", True), ("sum", False), ("list", False),
    ]  # fmt: skip
    assert (
        "right output out (forward, micro-batch 0): its inputs are equal, it may be another origin"
        in verdict_text(verdict)
    )
