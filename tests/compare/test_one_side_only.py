"""Events that one run has and the other has not, without a fault behind it."""

from __future__ import annotations

from tests.compare.streams import MLP, answer, behind, compared
from tests.memory_run import run
from upguard_plugin.compare.runs import compare_runs

OPS = """
forward 0 input  fc/args.0 x
forward 0 output fc/0#0 a aten.mul
forward 0 output fc/0#0 b aten.add
forward 0 output fc/0#1 c aten.mul
forward 0 output fc/0#0 d aten.sub
forward 0 output fc/0#2 e aten.mul
forward 0 output fc/out y Linear
"""


def test_one_extra_operator_shifts_nothing():
    extra = """
    forward 0 input  fc/args.0 x
    forward 0 output fc/0#0 a aten.mul
    forward 0 output fc/0#1 same aten.mul
    forward 0 output fc/0#0 b aten.add
    forward 0 output fc/0#2 c aten.mul
    forward 0 output fc/0#0 d aten.sub
    forward 0 output fc/0#3 e aten.mul
    forward 0 output fc/out y Linear
    """
    harmless = compared(OPS, extra)
    wrong = compared(OPS, behind(extra, "forward 0 output fc/0#3"))

    assert answer(harmless) == "0 0 forward fc output structure"
    assert harmless.first_divergence.operator == "aten.mul"
    assert (harmless.first_divergence.call, harmless.first_divergence.baseline) == (1, None)
    assert answer(wrong) == "0 0 forward fc output forward"
    assert (wrong.first_divergence.operator, wrong.first_divergence.call) == ("aten.mul", 2)
    assert wrong.coverage.unmatched_target == 1


def test_operators_of_one_side_only_are_not_missing_where_levels_differ():
    module = "\n".join(line for line in OPS.splitlines() if "aten" not in line)

    verdict = compare_runs(run(OPS, level="op"), run(module, name="target"))

    assert answer(verdict) == "identical"
    assert (verdict.coverage.compared, verdict.coverage.filtered) == (2, 5)
    assert "level: op against module; compared is what both record" in verdict.notes


def test_what_only_one_run_was_told_to_record_is_not_missing():
    outputs = "\n".join(line for line in MLP.splitlines() if " grad " not in line)
    told = {"config": {"roles": ["output"]}}

    verdict = compare_runs(run(MLP), run(outputs, name="target", **told))

    assert (answer(verdict), verdict.coverage.filtered) == ("identical", 1)
    assert "roles: None against ['output']; compared is what both record" in verdict.notes
    assert answer(compared(MLP, outputs)) == "0 0 accumulate fc1.weight grad structure"
