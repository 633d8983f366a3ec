"""A run against its continuation: matched steps, the state between them, and a repeat beside it."""

from __future__ import annotations

import pytest

from tests.compare.streams import answer
from tests.memory_run import MemoryRun, replace
from tests.toy_training import Toy, flip, train
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.trace.batch import RankEnd

NUM_STEPS = 6


def part(whole: MemoryRun, start: int, stop: int, name: str, *, iterations: bool) -> MemoryRun:
    """Some steps of a run, as a process of their own records them: its steps start at 0."""
    batches = {
        rank: [
            replace(made, step=step - start, iteration=100 + step if iterations else None)
            for step, made in listed.items()
            if start <= step < stop
        ]
        for rank, listed in whole.batches.items()
    }
    return MemoryRun(batches, name)


def told(verdict) -> tuple:
    found = verdict.first_divergence
    if found is None:
        return verdict.verdict, verdict.notes[0]
    return found.step, found.phase, found.boundary, found.role, found.kind


def resumed_at_3(fault=None, *, iterations: bool = True, **settings) -> tuple:
    """What was run until step 3, and what went on from there."""
    whole = train(NUM_STEPS, **settings)
    other = train(NUM_STEPS, **settings, **({} if fault is None else {"fault": fault}))
    return (
        part(whole, 0, 3, "saved", iterations=iterations),
        part(other, 3, NUM_STEPS, "resumed", iterations=iterations),
    )


LEFT = (
    "resumed: no step is in both runs; compared is the state that the baseline left with the one "
    "that the target found"
)


@pytest.mark.parametrize("iterations", [True, False])
def test_the_state_that_was_left_is_compared_with_the_one_that_was_found(iterations):
    saved, resumed = resumed_at_3(iterations=iterations)

    verdict = compare_runs(saved, resumed)

    assert told(verdict) == ("incomparable", LEFT)
    assert verdict.coverage.compared == verdict.certified.events == 3 * len(Toy().params)
    assert verdict.coverage.unmatched_baseline == verdict.coverage.unmatched_target == 0


@pytest.mark.parametrize(
    ("role", "kind"),
    [("param", "init"), ("master", "optimizer"), ("optimizer_state", "optimizer")],
)
def test_a_state_that_was_not_found_as_it_was_left_is_named(role, kind):
    saved, resumed = resumed_at_3(flip(f"3/-/start/blocks.0.ln1.weight/{role}"))

    verdict = compare_runs(saved, resumed)

    assert told(verdict) == (2, "start", "blocks.0.ln1.weight", role, kind)
    assert verdict.notes[0] == LEFT


def test_the_other_way_round_says_so():
    saved, resumed = resumed_at_3()

    verdict = compare_runs(resumed, saved)

    assert told(verdict) == ("incomparable", LEFT.replace("baseline", "x").replace(
        "target", "baseline").replace("the x", "the target"))  # fmt: skip


def test_an_optimizer_that_began_anew_is_named():
    saved, resumed = resumed_at_3()
    first = resumed.batches[0][0]
    states = [key.role == "optimizer_state" and key.phase == "start" for key in first.keys]
    kept = [row for row in range(len(first)) if not states[int(first.key[row])]]
    columns = ("key", "seq", "microbatch", "call", "h", "s", "producer")
    resumed.batches[0][0] = replace(first, **{n: getattr(first, n)[kept] for n in columns})

    verdict = compare_runs(saved, resumed)

    assert told(verdict) == (2, "start", "embed.weight", "optimizer_state", "optimizer")
    assert verdict.first_divergence.target is None


def test_runs_that_only_share_no_steps_are_no_continuation():
    whole = train(NUM_STEPS)
    early = part(whole, 0, 2, "early", iterations=True)
    late = part(whole, 3, NUM_STEPS, "late", iterations=True)

    verdict = compare_runs(early, late)

    assert told(verdict)[1].startswith("rank 0: the runs have no finished step in common")


def test_named_steps_are_compared_as_named():
    saved, resumed = resumed_at_3()

    verdict = compare_runs(saved, resumed, Selection.parse(steps="0"))

    assert verdict.exit_code == 3
    assert verdict.coverage.compared == 0


# Three runs: the baseline, a repeat of it, and one that was resumed


def three(fault) -> tuple[MemoryRun, MemoryRun, MemoryRun]:
    repeat = train(NUM_STEPS, fault=flip("2/0/loss/loss/output"))
    return (
        part(train(NUM_STEPS), 0, NUM_STEPS, "A", iterations=True),
        part(repeat, 0, NUM_STEPS, "A2", iterations=True),
        part(train(NUM_STEPS, fault=fault), 3, NUM_STEPS, "resumed", iterations=True),
    )


def test_what_a_repeat_differs_in_too_is_no_fault_of_the_resume():
    """Of the steps behind the first noise nothing is left: that is said, and nothing is blamed."""
    baseline, repeat, resumed = three(flip("4/0/loss/loss/output"))

    verdict = compare_runs(baseline, resumed, noise=[repeat])

    assert verdict.exit_code in (0, 3)
    assert verdict.first_divergence is None
    assert verdict.coverage.noise > 0


def test_what_only_the_resume_changed_is_found_beside_the_noise():
    """Values differ between repeats from step 2 on, but not the batches: the resume changed one."""
    baseline, repeat, resumed = three(flip("3/0/data/input_ids/data"))

    verdict = compare_runs(baseline, resumed, noise=[repeat])

    assert told(verdict) == (3, "data", "input_ids", "data", "data")
    assert any(
        note.startswith("resumed: step 3 of the baseline is step 0") for note in verdict.notes
    )


def test_a_repeat_that_differs_nowhere_hides_nothing():
    baseline, _, resumed = three(flip("3/-/start/blocks.0.ln1.weight/master"))
    again = part(train(NUM_STEPS), 0, NUM_STEPS, "A2", iterations=True)

    verdict = compare_runs(baseline, resumed, noise=[again])

    assert told(verdict) == (3, "start", "blocks.0.ln1.weight", "master", "optimizer")


def test_an_iteration_that_was_run_again_counts_as_the_last_time():
    """The job died in iteration 103 and its restart ran it again, in the same trace."""
    whole = part(train(NUM_STEPS), 0, NUM_STEPS, "whole", iterations=True)
    listed = list(whole.batches[0].values())
    wrong = train(NUM_STEPS, fault=flip("3/0/forward/head/output")).batches[0][3]
    steps = [*listed[:3], replace(wrong, iteration=103), *listed[3:]]
    again = MemoryRun({0: [replace(b, step=i) for i, b in enumerate(steps)]}, "again")

    verdict = compare_runs(whole, again)

    assert verdict.first_divergence is None
    assert verdict.coverage.compared == sum(len(batch) for batch in listed)


def test_a_run_that_died_is_compared_as_far_as_it_went_and_never_identical():
    whole = part(train(NUM_STEPS), 0, NUM_STEPS, "whole", iterations=True)
    died = part(train(NUM_STEPS), 0, 4, "died", iterations=True)
    died._ends = {0: RankEnd(False, "still running or killed")}

    verdict = compare_runs(whole, died)

    assert (verdict.exit_code, verdict.coverage.compared) == (3, died_events(died))
    assert verdict.notes[0] == (
        "incomplete: rank 0 of the target ended early (still running or killed); "
        "what was compared ends after 4 steps"
    )


def died_events(run: MemoryRun) -> int:
    return sum(len(batch) for batch in run.batches[0].values())


def test_a_rank_that_died_earlier_than_the_others_is_named():
    whole, died = train(4, world=3), train(4, world=3)
    for step in (2, 3):
        del died.batches[1][step]
    died._ends = {1: RankEnd(False, "disk full")}

    verdict = compare_runs(whole, died)

    assert verdict.exit_code == 3
    assert verdict.notes[0].startswith("incomplete: rank 1 of the target ended early (disk full)")
    assert verdict.coverage.ranks == 3


def test_a_divergence_on_a_rank_that_is_there_is_proven_without_the_others():
    whole = train(3, world=3)
    wrong = train(3, world=3, fault=flip("1/0/forward/head/output", rank=2))
    partial = MemoryRun(
        {2: list(wrong.batches[2].values())}, "partial", world_size=3, missing=(0, 1)
    )
    clean = MemoryRun({2: list(whole.batches[2].values())}, "partial", world_size=3, missing=(0, 1))

    verdict = compare_runs(whole, partial)

    assert told(verdict) == (1, "forward", "head", "output", "forward")
    assert verdict.first_divergence.ranks == [2]
    assert compare_runs(whole, clean).exit_code == 3
    assert compare_runs(whole, clean, Selection.parse(ranks="2")).exit_code == 0


# One process that was resumed, beside a whole run


def resumed_at(whole: MemoryRun, at: int, name: str = "resumed", iterations=False) -> MemoryRun:
    """The steps of a run from `at` on, as another process records them: its steps start at 0."""
    batches = [
        replace(b, step=b.step - at, iteration=b.iteration if iterations else None)
        for b in whole.batches[0].values()
        if b.step >= at
    ]
    return MemoryRun({0: batches}, name)


@pytest.mark.parametrize("iterations", [False, True])
def test_a_resumed_run_is_compared_with_the_steps_it_repeats(iterations):
    whole = train(num_steps=4)
    for listed in whole.batches.values():
        for step, made in listed.items():
            listed[step] = replace(made, iteration=100 + step)
    if not iterations:
        whole = resumed_at(whole, 0, "whole")

    clean = compare_runs(whole, resumed_at(whole, 2, iterations=iterations))
    backwards = compare_runs(resumed_at(whole, 2, iterations=iterations), whole)

    assert (answer(clean), clean.coverage.compared) == ("identical", 2 * 277)
    assert clean.notes[0] == "program: 'whole' against 'resumed'".replace("whole", whole.path.name)
    assert "resumed: step 2 of the baseline is step 0 of the target, rank 0" in clean.notes
    assert answer(backwards) == "identical"


def test_a_state_that_was_loaded_wrong_is_found_at_the_resumed_step():
    """The optimizer's states were given to other parameters."""
    whole = train(num_steps=4)
    fault = flip("2/-/start/blocks.0.ln1.weight/optimizer_state")
    wrong = resumed_at(train(num_steps=4, fault=fault), 2)

    verdict = compare_runs(whole, wrong)

    assert answer(verdict) == "2 - start blocks.0.ln1.weight optimizer_state optimizer"
    assert "before anything was computed" in verdict.first_divergence.explanation


def test_the_wrong_batch_after_a_resume_is_data():
    """The loader is at the right place of the wrong shuffle."""
    wrong = resumed_at(train(num_steps=4, fault=flip("2/0/data/input_ids/data")), 2)

    assert answer(compare_runs(train(num_steps=4), wrong)) == "2 0 data input_ids data data"


def test_a_resumed_run_that_ends_early_is_not_decided():
    whole = train(num_steps=4)
    short = resumed_at(MemoryRun({0: list(whole.batches[0].values())[:3]}, "short"), 1)

    assert compare_runs(whole, short).exit_code == 3


def test_other_weights_from_the_start_are_no_resume():
    def reseeded(place, rank, value):
        return value ^ 1 if place.startswith("-/-/init/") else value

    verdict = compare_runs(train(), train(fault=reseeded, name="seed 2"))

    assert answer(verdict) == "0 - start embed.weight param init"
    assert len(verdict.concurrent) == 14
