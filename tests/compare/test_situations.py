"""Known bugs of one rank as short event streams, each with its answer: see the docstrings."""

from __future__ import annotations

import pytest

from tests.compare.streams import MLP, NEXT, answer, behind, compared
from tests.memory_run import edited, run
from tests.toy_training import flip, train
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection


def test_an_equal_run_is_identical():
    verdict = compared(MLP, MLP)

    assert answer(verdict) == "identical"
    assert (verdict.coverage.compared, verdict.certified.events) == (21, 21)


def test_a_rounded_buffer_is_found_at_start():
    """A rotary frequency buffer was cast to bfloat16 and back."""
    target = behind(MLP, "start - buffer rotary.inv_freq/value")

    verdict = compared(MLP, edited(target, ("rng.torch_cpu/value r0'", "rng.torch_cpu/value r0")))

    assert answer(verdict) == "0 - start rotary.inv_freq buffer init"


def test_recompute_with_other_draws_is_rng():
    """Activation recompute without the forward's random state."""
    recompute = "recompute 0 input drop/args.0 b Dropout\nrecompute 0 output drop/out {} Dropout\n"
    before, backward = MLP.split("backward  0  grad_output  core/out", 1)
    text = before + recompute + "backward 0 grad_output core/out" + backward

    verdict = compared(text.format("c"), behind(text.format("c"), "recompute 0 output drop/out"))

    assert answer(verdict) == "0 0 recompute drop output rng"
    assert verdict.first_divergence.inputs_equal is True


def test_atomic_adds_in_a_backward_are_nondeterminism():
    """dq is summed in an order that depends on the run; dk and dv are not."""
    target = edited(
        MLP,
        ("core/args.0     ga", "core/args.0     ga'"),
        ("fc1/out         ga", "fc1/out         ga'"),
        ("fc1.weight/grad      gw", "fc1.weight/grad gw'"),
    )

    same = compare_runs(run(MLP, program=""), run(target, program=""))
    other = compared(MLP, target)

    assert answer(same) == "0 0 backward core grad_input nondeterminism"
    assert answer(other) == "0 0 backward core grad_input backward"
    assert answer(compared(MLP, target, same_program=True)) == answer(same)


def test_same_program_needs_an_equal_environment():
    target = behind(MLP, "forward 0 output fc1/out")
    older = {"versions": {"torch": "2.12.1"}, "program": ""}

    verdict = compare_runs(run(MLP, program=""), run(target, **older))

    assert answer(verdict) == "0 0 forward fc1 output forward"
    assert "environment: torch 2.13.0 against 2.12.1" in verdict.notes


def test_a_flip_in_one_rank_of_one_program_is_nondeterminism_there():
    """Unstable hardware: one output on one rank, everything behind the all-reduce on both."""
    settings = {"world": 2, "num_steps": 4, "manifest": {"program": "", "world_size": 2}}
    fault = flip("3/0/forward/blocks.1.mlp.fc1/output", rank=1)

    verdict = compare_runs(train(**settings), train(**settings, fault=fault))

    assert answer(verdict) == "3 0 forward blocks.1.mlp.fc1 output nondeterminism"
    assert (verdict.first_divergence.ranks, verdict.concurrent) == ([1], [])
    assert [d.ranks for d in verdict.per_rank] == [[0], [1]]


def test_masters_that_were_not_refreshed_are_listed_from_the_first_on():
    """Weights were loaded in bfloat16, the fp32 masters are still the old ones."""

    def stale(place, rank, value):
        return value ^ 1 if place.startswith("0/-/start/") and "/master" in place else value

    verdict = compare_runs(train(), train(fault=stale, name="stale"))

    assert answer(verdict) == "0 - start embed.weight master optimizer"
    assert [d.boundary for d in verdict.concurrent][:2] == [
        "blocks.0.ln1.weight",
        "blocks.0.attn.qkv.weight",
    ]
    assert {d.kind for d in verdict.concurrent} == {"optimizer"}


@pytest.mark.parametrize("phase", ["loss", "optimizer"])
def test_a_logged_scalar_alone_is_no_divergence(phase):
    """The logger sums two losses; training itself is right."""
    logged = MLP + phase + " - scalar logged_loss/value {} float64 []\n"

    verdict = compared(logged.format("one"), logged.format("two"))

    assert answer(verdict) == "identical"
    assert verdict.notes[-1] == (
        "not used: logged_loss differs from step 0 on (rank 0), and nothing behind it does"
    )


def test_a_setting_of_the_optimizer_is_one_even_alone():
    setting = MLP + "optimizer - scalar optimizer1.group0.lr/value {} float64 []\n"

    verdict = compared(setting.format("1"), setting.format("2"))

    assert answer(verdict) == "0 - optimizer optimizer1.group0.lr scalar optimizer"


def test_a_scalar_with_differences_behind_it_is_one():
    logged = MLP.replace("backward  0  grad_output  drop", "loss 0 scalar scale/value s\n{}", 1)
    text = logged.format("backward  0  grad_output  drop")

    verdict = compared(text, behind(text, "loss 0 scalar scale/value"))

    assert answer(verdict) == "0 0 loss scale scalar forward"


def test_an_input_overwritten_after_it_was_made_names_both_ends():
    """Cross entropy turns its logits into probabilities in place; entropy reads them later."""
    text = """
    forward 0 input  head/args.0  x
    forward 0 output head/out     logits   Linear
    loss    0 output logprob/out  p
    loss    0 input  entropy/args.0  logits  by=1
    loss    0 output entropy/out  e
    """
    verdict = compared(text, behind(text, "loss 0 input entropy/args.0"))

    assert answer(verdict) == "0 0 loss entropy input forward"
    found = verdict.first_divergence
    assert (found.producer.boundary, found.producer.role) == ("head", "output")
    assert "overwritten in between" in found.explanation


def test_draws_in_an_operation_without_a_name_are_rng():
    """Dropout as a function: the module's output differs and the random states part."""
    text = MLP.replace("Dropout", "Attention").replace("drop", "attn")
    target = behind(text, "forward 0 output attn/out")
    other_state = edited(NEXT, ("r1", "r1'"))

    parted = compare_runs(run(text, NEXT), run(target, other_state, name="target"))
    quiet = compare_runs(run(text, NEXT), run(target, NEXT, name="target"))
    linear = behind(text, "forward 0 output fc1/out")

    assert answer(parted) == "0 0 forward attn output rng"
    assert answer(quiet) == "0 0 forward attn output forward"
    # A linear layer draws nothing, whatever else does.
    assert (
        answer(compare_runs(run(text, NEXT), run(linear, other_state, name="target")))
        == "0 0 forward fc1 output forward"
    )


def test_generators_that_nobody_draws_from_may_differ():
    """Python's generator was not seeded, and nothing uses it."""
    text = "start - rng rng.python/state {0}\n" + MLP + "optimizer - rng rng.python/state {1}\n"
    quiet, other = text.format("p", "p"), text.format("q", "q")

    unused = compare_runs(run(quiet, quiet), run(other, other, name="target"))
    used = compare_runs(run(quiet, text.format("p", "p2")), run(other, text.format("q", "q2")))
    between = compare_runs(run(quiet, text.format("p2", "p2")), run(other, text.format("q2", "q2")))
    later = compare_runs(run(quiet, quiet), run(quiet, other, name="target"))

    assert answer(unused) == "identical"
    assert unused.notes[-1] == (
        "not used: rng.python differs from step 0 on (rank 0), and nobody draws from it"
    )
    assert {answer(verdict) for verdict in (used, between, later)} == {
        "1 - start rng.python rng rng"
    }


def test_what_a_call_drew_from_decides_for_rng():
    """Modules that draw are recorded with the random state that they found."""
    drew = "forward   0  rng drop/torch_cpu {}\n{}"
    output = "forward   0  output  drop/out"
    text = MLP.replace(output, drew.format("r0", output))
    wrong = behind(text, "forward 0 output drop/out")
    linear = behind(text, "forward 0 output fc1/out")
    only_target = behind(text, "forward 0 output drop/out")
    baseline = "\n".join(line for line in text.splitlines() if " rng drop" not in line)
    baseline += "\nforward 0 rng head/torch_cpu r0\n"

    other = compared(text, behind(text, "forward 0 rng drop/torch_cpu"))
    assert answer(other) == "0 0 forward drop output rng"
    assert "from which its call drew" in other.first_divergence.explanation
    assert answer(compared(text, wrong)) == "0 0 forward drop output forward"
    assert answer(compared(text, linear)) == "0 0 forward fc1 output forward"
    assert answer(compared(baseline, only_target)) == "0 0 forward drop output rng"


def test_dropout_with_equal_draws_is_not_rng():
    target = behind(MLP, "forward 0 output drop/out")

    unknown = compare_runs(run(MLP), run(target, name="target"))
    equal = compare_runs(run(MLP, NEXT), run(target, NEXT, name="target"))

    assert answer(unknown) == "0 0 forward drop output rng"
    assert answer(equal) == "0 0 forward drop output forward"


def test_a_missing_gradient_is_backward():
    """A parameter got no gradient: its .grad is None."""
    lines = [line for line in MLP.splitlines() if not line.startswith("accumulate")]
    target = "\n".join(lines) + "\naccumulate 0 grad other.weight/grad go\n"
    baseline = MLP + "accumulate 0 grad other.weight/grad go\n"

    verdict = compared(baseline, target)

    assert answer(verdict) == "0 0 accumulate fc1.weight grad backward"
    assert verdict.first_divergence.target is None
    assert "None" in verdict.first_divergence.explanation


def test_another_class_of_module_is_the_same_boundary():
    target = MLP.replace("Linear", "FusedLinear")

    assert answer(compared(MLP, target)) == "identical"
    assert (
        answer(compared(MLP, behind(target, "forward 0 output fc1/out")))
        == "0 0 forward fc1 output forward"
    )


def test_a_renamed_module_without_effect_is_structure():
    verdict = compared(MLP, MLP.replace("core/", "attention/"))

    assert answer(verdict) == "0 0 forward core input structure"
    assert (verdict.coverage.unmatched_baseline, verdict.coverage.unmatched_target) == (6, 6)
    assert verdict.exit_code == 1


def test_another_dtype_without_effect_is_structure_and_with_effect_forward():
    target = edited(MLP, ("core/kwargs.mask     m        Core", "core/kwargs.mask m8 Core uint8"))

    assert answer(compared(MLP, target)) == "0 0 forward core input structure"
    assert (
        answer(compared(MLP, behind(target, "forward 0 output core/out")))
        == "0 0 forward core input forward"
    )
    # Harmless in one step, it is not blamed in another for what starts elsewhere.
    later = behind(target, "backward 0 grad_input core/args.0")
    harmless = compare_runs(run(MLP, MLP), run(target, later, name="target"))
    assert answer(harmless) == "1 0 backward core grad_input backward"


def test_a_batch_that_was_not_recorded_is_data_where_it_enters_the_model():
    text = "\n".join(line for line in MLP.splitlines() if not line.startswith("data"))

    verdict = compared(text, behind(text, "forward 0 input fc1/args.0"))

    assert answer(verdict) == "0 0 forward fc1 input data"


def test_other_ids_are_data_and_samples_say_nothing_more():
    text = MLP.replace("int64", "int64\ndata 0 sample input_ids/0 s0\ndata 0 sample input_ids/1 s1")

    verdict = compared(text, behind(text, "data 0 data input_ids/value"))

    assert answer(verdict) == "0 0 data input_ids data data"
    assert verdict.concurrent == []


def test_swapped_microbatches_are_data_of_the_first():
    steps = [MLP, *[MLP.replace(" 0 ", " 1 ").replace("  x ", "  x1 ")]]
    forwards = [s.replace("ids ", f"ids{i} ") for i, s in enumerate(steps)]
    swapped = [s.replace("ids ", f"ids{1 - i} ") for i, s in enumerate(steps)]

    verdict = compared("".join(forwards), "".join(swapped))

    assert answer(verdict) == "0 0 data input_ids data data"


def test_weights_that_differed_when_the_step_before_ended_are_optimizer():
    ended = edited(MLP, ("fc1.weight/value     w2", "fc1.weight/value w2'"))
    started = edited(NEXT, ("w2", "w2'"))
    verdict = compare_runs(
        run(MLP, NEXT), run(ended, started, name="target"), Selection.parse(steps="1")
    )
    between = compare_runs(run(MLP, NEXT), run(MLP, started, name="target"))

    assert answer(verdict) == "1 - start fc1.weight param optimizer"
    assert "as the step before left it" in verdict.first_divergence.explanation
    assert answer(between) == "1 - start fc1.weight param optimizer"
    assert "in between" in between.first_divergence.explanation


def test_a_buffer_written_in_forward_is_forward():
    stats = "start - buffer fc1.running/value {}\n"

    verdict = compare_runs(
        run(MLP, stats.format("v1") + NEXT), run(MLP, stats.format("v2") + NEXT, name="target")
    )

    assert answer(verdict) == "1 - start fc1.running buffer forward"


def test_another_implementation_of_the_optimizer_counts_only_if_its_weights_differ():
    switch = "start - scalar optimizer.group0.foreach/value {} bool []\n"
    on, off = switch.format("on") + MLP, switch.format("off") + MLP

    harmless = compared(on, off)
    elsewhere = compared(on, behind(off, "forward 0 output fc1/out"))
    wrong = compared(on, behind(off, "optimizer - param fc1.weight/value"))

    assert answer(harmless) == "0 - start optimizer.group0.foreach scalar structure"
    assert answer(elsewhere) == "0 0 forward fc1 output forward"
    assert answer(wrong) == "0 - start optimizer.group0.foreach scalar optimizer"


def test_an_argument_passed_by_keyword_is_the_same_argument_and_structure():
    """So it is with the first of several outputs, where the baseline has one."""
    keyword = edited(MLP, ("0  input   core/args.0", "0 input core/kwargs.x"))
    one, several = (
        edited(MLP, ("0  output  fc1/out ", f"0 output fc1/{s} ")) for s in ("0", "out.0")
    )

    verdict = compared(MLP, keyword)

    assert answer(verdict) == "0 0 forward core input structure"
    assert (verdict.coverage.unmatched_baseline, verdict.coverage.unmatched_target) == (0, 0)
    assert answer(compared(one, several)) == "0 0 forward fc1 output structure"
    assert (
        answer(compared(MLP, behind(keyword, "forward 0 output core/out")))
        == "0 0 forward core output forward"
    )


def test_another_argument_of_a_call_is_no_partner():
    """Two masks by other keywords are two arguments, whatever their values."""
    other = edited(MLP, ("core/kwargs.mask     m ", "core/kwargs.bias n "))
    other = edited(other, ("core/kwargs.mask gm", "core/kwargs.bias gn"))

    verdict = compared(MLP, other)

    assert answer(verdict) == "0 0 forward core input structure"
    assert (verdict.coverage.unmatched_baseline, verdict.coverage.unmatched_target) == (2, 2)
