"""Operators that only one run has: named where they explain the first value that differs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.memory_run import MemoryRun, batch, edited, events, run, written
from upguard_plugin.cli import upguard
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.report.text import verdict_text

# One layer at level op. `by=` is the row that wrote what is read; a row without it read a value
# that was there before.
LAYER = """
start     -  param   fc.weight/value     w
forward   0  input   layer/args.0        x                         Layer
forward   0  input   fc/args.0           x        aten.mm
forward   0  input   fc/args.1           wT       aten.mm
forward   0  output  fc/out              a        aten.mm
forward   0  input   layer/args.0        a        aten.gelu        by=4
forward   0  output  layer/out           b        aten.gelu
forward   0  input   layer/args.0        b        aten.add         by=6
forward   0  input   layer/args.1        x        aten.add
forward   0  output  layer/out           c        aten.add
forward   0  output  layer/0             c                         Layer  by=9
"""
GELU = "forward   0  input   layer/args.0        a        aten.gelu        by=4\n"
LAST = {"b'": "aten.gelu", "c'": "aten.add"}


def with_lines(text: str, before: str, *lines: str, by: int = 0) -> str:
    """The text with lines put before another one; producers behind them move along."""
    listed = text.strip().splitlines()
    place = next(i for i, line in enumerate(listed) if line.split() == before.split())
    moved = [_moved(line, place, len(lines) + by) for line in listed[place:]]
    return "\n".join([*listed[:place], *lines, *moved])


def _moved(line: str, place: int, by: int) -> str:
    words = line.split()
    return " ".join(
        f"by={int(word[3:]) + by}" if word.startswith("by=") and int(word[3:]) >= place else word
        for word in words
    )


def named(verdict) -> tuple:
    found = verdict.first_divergence
    how = None if found.change is None else found.change.how
    return (how, found.boundary, found.operator, found.role, found.inputs_equal)


def operators(listed) -> list[str]:
    return [event.operator for event in listed]


def compared(baseline: str, target: str, **options):
    return compare_runs(run(baseline), run(target, name="target"), **options)


EXTRA = edited(
    with_lines(
        LAYER, GELU,
        "forward 0 input layer/args.0 a aten.mul by=4",
        "forward 0 output layer/out a2 aten.mul",
    ),
    ("layer/args.0 a aten.gelu by=4", "layer/args.0 a2 aten.gelu by=6"),
    ("layer/out b aten.gelu", "layer/out b2 aten.gelu"),
    ("layer/args.0 b aten.add", "layer/args.0 b2 aten.add"),
    ("layer/out c aten.add", "layer/out c2 aten.add"),
    ("layer/0 c Layer", "layer/0 c2 Layer"),
)  # fmt: skip
REPLACED = edited(
    EXTRA,
    ("forward 0 input layer/args.0 a aten.mul by=4\n", ""),
    ("forward 0 output layer/out a2 aten.mul\n", ""),
    ("layer/args.0 a2 aten.gelu by=6", "layer/args.0 a aten.silu by=4"),
    ("layer/out b2 aten.gelu", "layer/out b2 aten.silu"),
    ("b2 aten.add by=8", "b2 aten.add by=6"),
    ("c2 Layer by=11", "c2 Layer by=9"),
)


def test_an_operator_that_only_the_target_runs_is_named_with_what_reads_it():
    verdict = compared(LAYER, EXTRA)

    assert named(verdict) == ("extra", "layer", "aten.mul", "output", True)
    found = verdict.first_divergence
    assert (found.baseline, found.kind, found.phase) == (None, "forward", "forward")
    assert (operators(found.change.baseline), operators(found.change.target)) == ([], ["aten.mul"])
    assert (found.change.reached.operator, found.change.reached.slot) == ("aten.gelu", "args.0")
    assert verdict.certified.last.boundary == "fc"
    assert found.explanation == (
        "Only the target runs aten.mul of layer: what it takes is equal, and it leads to the input "
        "args.0 of layer (aten.gelu), the first value that differs."
    )


def test_an_operator_that_only_the_baseline_runs_is_missing():
    verdict = compared(EXTRA, LAYER)

    assert named(verdict) == ("missing", "layer", "aten.mul", "output", True)
    assert verdict.first_divergence.target is None
    assert "Only the baseline runs aten.mul" in verdict.first_divergence.explanation


def test_an_operator_in_place_of_another_is_named_with_it():
    verdict = compared(LAYER, REPLACED)

    assert named(verdict) == ("replaced", "layer", "aten.gelu", "output", True)
    found = verdict.first_divergence
    assert operators(found.change.target) == ["aten.silu"]
    assert None not in (found.baseline, found.target)
    assert "runs aten.silu of layer where the baseline runs aten.gelu" in found.explanation


@pytest.mark.parametrize("pair", [(LAYER, LAYER), (EXTRA, EXTRA), (REPLACED, REPLACED)])
def test_the_same_operators_are_identical(pair):
    assert compared(*pair).verdict == "identical"


def test_operators_that_compute_what_the_other_run_has_too_are_structure_only():
    """One fused kernel against two; and a copy, which changes nothing."""
    fused = edited(
        with_lines(
            LAYER, GELU,
            "forward 0 input layer/args.0 a aten.erf by=4",
            "forward 0 output layer/out e aten.erf",
        ),
        ("layer/args.0 a aten.gelu by=4", "layer/args.0 e aten.mul by=6"),
        ("layer/out b aten.gelu", "layer/out b aten.mul"),
    )  # fmt: skip
    copied = edited(
        with_lines(
            LAYER, GELU,
            "forward 0 input layer/args.0 a aten.clone by=4",
            "forward 0 output layer/out a aten.clone",
        ),
        ("layer/args.0 a aten.gelu by=4", "layer/args.0 a aten.gelu by=6"),
    )  # fmt: skip

    for other in (fused, copied):
        found = compared(LAYER, other).first_divergence
        assert (found.kind, found.change) == ("structure", None)


def test_a_copy_on_the_way_to_the_operator_is_not_the_answer():
    target = edited(
        with_lines(
            EXTRA, "forward 0 input layer/args.0 a aten.mul by=4",
            "forward 0 input layer/args.0 a aten.clone by=4",
            "forward 0 output layer/out a aten.clone",
        ),
        ("layer/args.0 a aten.mul by=4", "layer/args.0 a aten.mul by=6"),
    )  # fmt: skip

    assert named(compared(LAYER, target)) == ("extra", "layer", "aten.mul", "output", True)


def test_of_several_operators_the_first_that_takes_an_equal_value_is_named():
    """A constant is made, then multiplied; or was there before, and only one run has it."""
    made = edited(
        with_lines(
            EXTRA, "forward 0 output layer/out a2 aten.mul",
            "forward 0 output layer/out two aten.full",
            "forward 0 input layer/args.1 two aten.mul by=6",
        ),
    )  # fmt: skip
    there = with_lines(
        EXTRA, "forward 0 output layer/out a2 aten.mul", "forward 0 input layer/args.1 two aten.mul"
    )

    assert named(compared(LAYER, made)) == ("extra", "layer", "aten.mul", "output", True)
    verdict = compared(LAYER, there)
    assert named(verdict) == ("extra", "layer", "aten.mul", "output", None)
    assert "what both runs give it is equal" in verdict.first_divergence.explanation
    assert "inputs     equal where both runs have them" in verdict_text(verdict)


COMMUTED = """
forward 0 input  layer/args.0 x {0} by=-1
forward 0 output layer/out    {1} {0}
forward 0 input  layer/args.0 {1} {2} by=1
forward 0 output layer/out    {3} {2}
forward 0 input  layer/args.0 {3} aten.relu by=3
forward 0 output layer/out    {4} aten.relu
"""


def test_operators_in_another_order_are_reordered():
    ours = COMMUTED.format("aten.mul", "m", "aten.add", "ma", "r")
    theirs = COMMUTED.format("aten.add", "a", "aten.mul", "am", "r2")

    verdict = compared(ours, theirs)

    assert named(verdict)[0] == "reordered"
    assert verdict.first_divergence.operator in ("aten.mul", "aten.add")
    assert compared(ours, ours).verdict == "identical"


def test_a_result_of_another_operator_is_rewired():
    """The residual is taken from the layer's output instead of its input; both are computed."""
    target = edited(
        LAYER,
        ("layer/args.1        x        aten.add\n", "layer/args.1 a aten.add by=4\n"),
        ("c        aten.add", "c2 aten.add"),
        ("layer/0             c ", "layer/0 c2 "),
    )
    baseline = edited(LAYER, ("layer/args.1        x        aten.add\n",
                              "layer/args.1 b aten.add by=6\n"))  # fmt: skip

    verdict = compared(baseline, target)

    assert named(verdict) == ("rewired", "layer", "aten.add", "input", None)
    change = verdict.first_divergence.change
    assert (operators(change.baseline), operators(change.target)) == (["aten.gelu"], ["aten.mm"])
    assert verdict.first_divergence.explanation == (
        "The input args.1 of layer (aten.add) is made by aten.gelu of layer in the baseline and by "
        "aten.mm of fc in the target."
    )


def test_an_operator_of_the_same_name_is_told_from_those_that_only_pass_it_on():
    """Three multiplications against two: which is which nothing tells but their place."""
    verdict = compared(multiplied("m", "mm"), multiplied("m2", "m3", "m4"))

    assert named(verdict)[0] == "extra"
    value = run(multiplied("m2", "m3", "m4")).read(0, 0).h[1]
    assert verdict.first_divergence.target.fingerprint == f"{int(value):016x}"


def test_of_operators_of_one_name_and_number_the_first_is_the_origin():
    verdict = compared(multiplied("m", "mm", "mmm"), multiplied("m2", "m3", "m4"))

    assert named(verdict) == (None, "layer", "aten.mul", "output", True)
    assert (verdict.first_divergence.call, verdict.certified.events) == (0, 1)


def multiplied(*values: str) -> str:
    """One multiplication after the other, then a ReLU."""
    lines = []
    for number, (given, made) in enumerate(zip(["x", *values], values, strict=False)):
        by = f"by={2 * number - 1}" if number else ""
        lines += [
            f"forward 0 input layer/args.0#{number} {given} aten.mul {by}",
            f"forward 0 output layer/out#{number} {made} aten.mul",
        ]
    last = f"forward 0 input layer/args.0 {values[-1]} aten.relu by={len(lines) - 1}"
    return "\n".join([*lines, last, f"forward 0 output layer/out r{values[-1]} aten.relu"])


@pytest.mark.parametrize(
    "doubt",
    [
        # What the operator takes was overwritten unseen: other bits than its writer left.
        ("layer/args.0 a aten.mul by=4", "layer/args.0 a9 aten.mul by=4"),
        # Who made it is not known, and the other run has no such value.
        ("layer/args.0 a aten.mul by=4", "layer/args.0 a9 aten.mul"),
    ],
)
def test_without_proof_the_first_value_that_differs_is_named(doubt):
    verdict = compared(LAYER, edited(EXTRA, doubt))

    assert named(verdict)[:3] == (None, "layer", "aten.gelu")


def test_inputs_that_were_not_recorded_or_asked_for_prove_nothing():
    def outputs(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if " input " not in f" {line} ")

    def without_writers(text: str) -> str:
        return " ".join(w for w in text.split(" ") if not w.startswith("by="))

    alone = compared(*(without_writers(outputs(text)) for text in (LAYER, EXTRA)))
    asked = compared(LAYER, EXTRA, selection=Selection.parse(modules="fc"))
    twin = compared(LAYER, EXTRA, selection=Selection.parse(roles="output"))

    assert named(alone)[:4] == (None, "layer", "aten.gelu", "output")
    assert asked.verdict == "identical"
    assert named(twin)[:4] == ("extra", "layer", "aten.mul", "output")  # inputs were recorded


def test_an_operator_that_draws_in_one_run_only_is_rng():
    target = with_lines(
        EXTRA, "forward 0 input layer/args.0 a aten.mul by=4",
        "forward 0 rng layer/generator r0 aten.mul",
    )  # fmt: skip
    verdict = compared(LAYER, target)

    assert named(verdict)[:3] == ("extra", "layer", "aten.mul")
    assert verdict.first_divergence.kind == "rng"


def test_a_value_that_only_looks_overwritten_is_not_called_so():
    """Its writer is equal in both runs, but in the target another operator wrote it last."""
    unseen = edited(LAYER, ("layer/args.0        a        aten.gelu", "layer/args.0 a9 aten.gelu"))

    overwritten = compared(LAYER, unseen).first_divergence
    extra = compared(LAYER, EXTRA).first_divergence

    assert "overwritten in between" in overwritten.explanation
    assert overwritten.producer is not None
    assert "overwritten" not in extra.explanation
    assert extra.producer is None


def test_other_operands_of_a_call_are_not_called_equal():
    """A call whose inputs have partners in two other calls."""
    ours = """
    forward 0 input  layer/args.0 p aten.add
    forward 0 input  layer/args.1 q aten.add
    forward 0 output layer/out    s aten.add
    """
    theirs = """
    forward 0 input  layer/args.0 p aten.add
    forward 0 input  layer/args.1 t aten.add
    forward 0 output layer/out    s2 aten.add
    """
    found = compared(ours, theirs).first_divergence

    assert (found.role, found.slot) == ("input", "args.1")


def ranks_of(*texts: str, name: str) -> MemoryRun:
    return MemoryRun({rank: [batch(0, events(text))] for rank, text in enumerate(texts)}, name)


def test_an_operator_that_some_ranks_have_is_named_with_these_ranks():
    baseline = ranks_of(LAYER, LAYER, name="baseline")

    both = compare_runs(baseline, ranks_of(EXTRA, EXTRA, name="both"))
    one = compare_runs(baseline, ranks_of(LAYER, EXTRA, name="one"))

    for verdict, ranks in ((both, [0, 1]), (one, [1])):
        assert named(verdict) == ("extra", "layer", "aten.mul", "output", True)
        assert (verdict.first_divergence.ranks, verdict.concurrent) == (ranks, [])
    assert [event.rank for event in one.first_divergence.change.target] == [1]


def test_several_processes_name_the_same_operator(tmp_path):
    runs = [
        written(ranks_of(*texts, name=name), tmp_path / name)
        for texts, name in (((LAYER, LAYER), "baseline"), ((LAYER, EXTRA), "target"))
    ]
    command = ["compare", *map(str, runs), "--format", "json"]

    alone, two = (CliRunner().invoke(upguard, [*command, *more]) for more in ([], ["--jobs", "2"]))

    assert (alone.exit_code, two.output) == (1, alone.output)
    assert '"how": "extra"' in alone.output


def test_what_is_noise_explains_nothing():
    """The baseline's own repeat runs the operator too: nothing is left to be named."""
    verdict = compared(LAYER, EXTRA, noise=[run(EXTRA, name="repeat")])
    partly = compared(LAYER, EXTRA, noise=[run(REPLACED, name="repeat")])

    assert verdict.first_divergence is None
    assert partly.first_divergence is None or partly.first_divergence.change is None


def test_a_module_that_hands_on_a_result_is_looked_through():
    """What is read was written last by a module's output, which is no operator."""
    inside = edited(
        LAYER,
        ("layer/args.0        b        aten.add         by=6", "layer/args.0 b aten.add by=7"),
        ("c                         Layer  by=9", "c Layer by=10"),
    )
    baseline = with_lines(inside, "forward 0 input layer/args.0 b aten.add by=7",
                          "forward 0 output layer.act/out b GELU by=6", by=0)  # fmt: skip
    target = edited(
        baseline,
        ("layer/out           b        aten.gelu", "layer/out b2 aten.tanh"),
        ("layer/args.0        a        aten.gelu", "layer/args.0 a aten.tanh"),
        ("layer.act/out b GELU", "layer.other/out b2 Tanh"),
        ("layer/args.0 b aten.add", "layer/args.0 b2 aten.add"),
        ("layer/out c aten.add", "layer/out c2 aten.add"),
        ("layer/0 c Layer", "layer/0 c2 Layer"),
    )

    verdict = compared(baseline, target)

    assert named(verdict) == ("replaced", "layer", "aten.gelu", "output", True)
    assert operators(verdict.first_divergence.change.target) == ["aten.tanh"]
