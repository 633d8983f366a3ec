"""Each invariant on a run in memory: a fault and its clean twin differ in one line.

Runs are written as in tests/memory_run.py; equal text means equal bits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.memory_run import MemoryRun, batch, edited, events
from upguard_plugin.compare.selection import Selection
from upguard_plugin.invariants.check import check_run
from upguard_plugin.records import Axis, Layout, Piece, Placement

TWO = (0, 1)


def layout(rank: int, *names: str, mesh: str = "dense") -> Layout:
    return Layout(tuple(Axis(name, 2, rank, TWO, mesh) for name in names))


def check(*ranks: list[str] | str, axes: tuple[str, ...] = ("dp",), **settings):
    """The report on a run; each argument is a rank's steps."""
    steps = [[one] if isinstance(one, str) else one for one in ranks]
    batches = {
        rank: [batch(i, events(text)) for i, text in enumerate(texts)]
        for rank, texts in enumerate(steps)
    }
    layouts = {rank: layout(rank, *axes) for rank in batches}
    return check_run(MemoryRun(batches, layouts=layouts, **settings), Selection())


def first(report) -> tuple:
    found = report.broken[0]
    return found.invariant, found.step, found.phase, found.boundary, found.role, found.ranks


REPLICA = """
    start     -  param   fc.weight/value   w     at=*
    backward  0  grad_output  fc/0         local at=*
    grad_sync -  grad    fc.weight/grad    g     at=*
    optimizer -  param   fc.weight/value   w1    at=*
"""


def test_a_gradient_that_differs_between_replicas_is_broken():
    report = check(REPLICA, edited(REPLICA, ("g     at", "g2    at"), ("local", "mine")))

    assert first(report) == ("replicas-agree", 0, "grad_sync", "fc.weight", "grad", [0, 1])
    assert report.exit_code == 1


def test_replicas_that_agree_are_not():
    report = check(REPLICA, edited(REPLICA, ("local", "mine")))

    assert (report.broken, report.suspects) == ([], [])
    assert report.checked["replicas-agree"] == 3
    assert report.exit_code == 0


def test_the_rank_that_stands_alone_is_named():
    ranks = [REPLICA, edited(REPLICA, ("g     at", "g2    at")), REPLICA]
    batches = {r: [batch(0, events(text))] for r, text in enumerate(ranks)}
    axes = {r: Layout((Axis("dp", 3, r, (0, 1, 2)),)) for r in batches}

    report = check_run(MemoryRun(batches, layouts=axes), Selection())

    assert report.broken[0].ranks == [1]
    assert report.broken[0].explanation == (
        "Gradient of fc.weight must be the same on ranks 0, 1, 2, but rank 1 has other bits than "
        "ranks 0, 2."
    )


@pytest.mark.parametrize(("axes", "broken"), [(("dp",), True), (("tp",), False), (("pp",), False)])
def test_state_without_a_rule_is_a_replica_over_dp_only(axes, broken):
    report = check(REPLICA, edited(REPLICA, ("g     at", "g2    at")), axes=axes)

    assert bool(report.broken) == broken


def test_state_without_any_placement_is_a_suspect():
    bare = REPLICA.replace("at=*", "")
    report = check(bare, edited(bare, ("/grad    g ", "/grad    g2 ")))

    assert [one.role for one in report.suspects] == ["grad"]
    assert report.broken == []


def test_a_replica_on_a_rank_without_gradient_is_broken():
    without = edited(REPLICA, ("g     at=*", "-  none"))
    batches = {
        0: [batch(0, events(REPLICA))],
        1: [batch(0, [replace(e, key=replace(e.key, dtype="none")) if e.value == "-" else e
                      for e in events(without.replace(" none", ""))])],
    }  # fmt: skip
    report = check_run(MemoryRun(batches, layouts={r: layout(r, "dp") for r in TWO}), Selection())

    assert first(report)[:2] == ("replicas-agree", 0)
    assert report.broken[0].explanation.endswith("but rank 1 has none.")


@pytest.mark.parametrize(
    ("cls", "sharded", "why"),
    [
        ("LayerNorm", ("tp",), "cuts it over tp"),
        ("ColumnParallelLinear", (), "has it whole on every rank of tp"),
        ("LayerNorm", (), None),
        ("ColumnParallelLinear", ("tp",), None),
        ("Linear", ("tp",), None),
    ],
)
def test_a_mark_that_contradicts_the_modules_class_is_a_suspect(cls, sharded, why):
    found, called = events(f"""
        start   - param  fc.weight/value w
        forward 0 output fc/0            y {cls}
    """)
    placement = Placement("o i", (4, 8), (), sharded=sharded)
    found = replace(found, key=replace(found.key, placement=placement))
    run = MemoryRun({0: [batch(0, [found, called])]}, layouts={0: layout(0, "tp")})

    report = check_run(run, Selection())

    sentence = f"Parameter fc.weight belongs to a {cls}, but its placement {why}."
    assert [one.explanation for one in report.suspects] == ([sentence] if why else [])
    assert report.broken == []


RECOMPUTED = """
    forward   0  input   block/0      x      Block
    forward   0  input   drop/0       a      Dropout
    forward   0  output  drop/0       b      Dropout
    forward   0  output  drop/0       b      aten.native_dropout
    forward   0  output  block/0      y      Block
    recompute 0  input   block/0      x      Block
    recompute 0  input   drop/0       a      Dropout
    recompute 0  output  drop/0       b      aten.native_dropout#
"""


def test_a_recompute_that_differs_from_its_forward_is_broken():
    faulty = edited(RECOMPUTED, ("b      aten.native_dropout#", "b2     aten.native_dropout"))
    clean = edited(RECOMPUTED, ("dropout#", "dropout"))

    assert first(check(faulty)) == ("recompute-repeats", 0, "recompute", "drop", "output", [0])
    report = check(clean)
    assert (report.broken, report.checked["recompute-repeats"]) == ([], 3)


CONSUMED = """
    forward   0  output  fc/0         y      Linear
    forward   0  output  act/0        z      aten.relu  by=0
    forward   0  input   head/0       y      Linear     by=0
"""


def test_a_tensor_that_was_overwritten_out_of_sight_is_broken():
    faulty = edited(CONSUMED, ("head/0       y ", "head/0       y2 "))

    report = check(faulty, level="op")
    assert first(report) == ("consumed-as-produced", 0, "forward", "head", "input", [0])
    assert report.broken[0].producer.boundary == "fc"
    assert check(CONSUMED, level="op").broken == []
    assert check(faulty, level="module").broken == []


def test_a_write_in_place_that_was_seen_is_a_part_of_the_program():
    seen = edited(
        CONSUMED,
        ("head/0       y ", "head/0       y2 "),
        ("z      aten.relu ", "y2     aten.relu_  moment=after "),
    )
    assert check(seen, level="op").broken == []


STEP = """
    start     -  param   fc.weight/value   w
    forward   0  param   fc.weight/value   w
    grad_sync -  grad    fc.weight/grad    g
    optimizer -  scalar  optimizer.group0.lr/0  lr  float64 []
    optimizer -  param   fc.weight/value   w1
"""
NEXT = STEP.replace("w1", "w2").replace("  w\n", "  w1\n")


def test_weights_that_are_not_the_updated_ones_are_broken():
    use = "forward   0  param   fc.weight/value   w"
    stale = edited(NEXT, (f"{use}1", use))

    assert first(check([STEP, stale])) == (
        "weights-in-use",
        1,
        "forward",
        "fc.weight",
        "param",
        [0],
    )
    assert check([STEP, NEXT]).broken == []


def test_weights_that_came_from_other_ranks_may_differ_from_those_found():
    late = edited(
        NEXT,
        ("    forward   0  param   fc.weight/value   w1", """
    forward   -  output  all_gather[dp]/0  w9  op=all_gather group=0:0 moment=completion
    forward   0  param   fc.weight/value   w9"""),
    )  # fmt: skip
    assert check([STEP, late]).broken == []


EVALUATED = STEP + "    eval -  output  head/0  y\n"
FOUND = "    start     -  param   fc.weight/value   w3\n"


def test_an_evaluation_that_changes_weights_is_broken():
    third = NEXT.replace("w2", "w3").replace("  w1\n", "  w2\n")
    evaluates = third + "    eval -  output  head/0  y\n"

    faulty = check([STEP, NEXT, evaluates, FOUND.replace("w3", "w9")])
    clean = check([STEP, NEXT, evaluates, FOUND])

    assert first(faulty) == ("eval-leaves-weights", 3, "start", "fc.weight", "param", [0])
    assert (clean.broken, clean.checked["eval-leaves-weights"]) == ([], 1)


def test_a_program_that_always_writes_its_weights_is_let_alone():
    always = [STEP, FOUND.replace("w3", "w7"), EVALUATED, FOUND.replace("w3", "w9")]

    assert check(always).broken == []


def with_rates(texts: list[str], rate: float) -> MemoryRun:
    """The same with a value for the learning rate."""
    batches = []
    for step, text in enumerate(texts):
        made = batch(step, events(text))
        rates = [rate if made.key_of(row).role == "scalar" else np.nan for row in range(len(made))]
        batches.append(replace(made, value=np.array(rates)))
    return MemoryRun({0: batches})


def test_a_weight_that_never_moves_is_broken():
    still = STEP.replace("w1", "w")

    report = check_run(with_rates([still, still], 0.1), Selection())
    assert first(report) == ("weights-move", 0, "optimizer", "fc.weight", "param", [0])
    assert check_run(with_rates([STEP, NEXT], 0.1), Selection()).broken == []
    assert check_run(with_rates([still, still], 0.0), Selection()).broken == []


def test_a_weight_in_bfloat16_that_never_moves_is_a_suspect():
    still = STEP.replace("w1", "w").replace("/value   w", "/value   w  bfloat16")

    report = check_run(with_rates([still, still], 0.1), Selection())
    assert report.broken == []
    assert [one.invariant for one in report.suspects] == ["weights-move"]


def test_a_frozen_weight_that_changes_is_a_suspect():
    found = "    start     -  param   frozen/value   w\n"

    report = check([found, found.replace("   w\n", "   w2\n")])
    assert [one.invariant for one in report.suspects] == ["frozen-stay"]
    assert check([found, found]).checked["frozen-stay"] == 1


MASTER = """
    start     -  param   fc.weight/value     w  bfloat16
    start     -  master  fc.weight/master    m
    start     -  master  fc.weight/rounded   w  bfloat16
"""


def test_a_master_that_does_not_round_to_its_weight_is_broken():
    stale = edited(MASTER, ("rounded   w ", "rounded   w0 "))

    assert first(check(stale)) == ("masters-round", 0, "start", "fc.weight", "master", [0])
    assert check(MASTER).checked["masters-round"] == 1


TIED = "    start     -  param   embed.weight/tied   e\n"


def test_a_tied_weight_that_differs_between_stages_is_broken():
    report = check(TIED, TIED.replace("  e\n", "  e2\n"), axes=("pp",))

    assert first(report) == ("tied-agree", 0, "start", "embed.weight", "param", [0, 1])
    assert check(TIED, TIED, axes=("pp",)).checked["tied-agree"] == 1


BATCH = "    data      0  data    tokens/0     t  int64\n"


def test_data_parallel_ranks_with_one_batch_are_broken():
    other = BATCH.replace(" t ", " t2 ")

    assert first(check(BATCH, BATCH)) == ("batches-differ", 0, "data", "tokens", "data", [0, 1])
    assert check(BATCH, other).checked["batches-differ"] == 2


def test_tensor_parallel_ranks_with_two_batches_are_broken():
    other = BATCH.replace(" t ", " t2 ")
    floats = (BATCH.replace("int64", "float32"), other.replace("int64", "float32"))

    report = check(BATCH, other, axes=("tp",))
    assert first(report) == ("batches-agree", 0, "data", "tokens", "data", [0, 1])
    assert check(BATCH, BATCH, axes=("tp",)).checked["batches-agree"] == 1
    assert check(*floats, axes=("tp",)).broken == []


STREAM = "    start     -  rng     rng.moe.expert/state   s  uint8\n"


def test_random_streams_of_experts_that_are_equal_are_broken():
    report = check(STREAM, STREAM, axes=("ep",))

    assert first(report) == ("streams-differ", 0, "start", "rng.moe.expert", "rng", [0, 1])
    assert check(STREAM, STREAM.replace(" s ", " s2 "), axes=("ep",)).broken == []


SUMMED = """
    grad_sync -  input   all_reduce[dp]/0  {}   op=all_reduce_sum moment=launch     group=0,1:0
    grad_sync -  output  all_reduce[dp]/0  sum  op=all_reduce_sum moment=completion group=0,1:0
"""


def summed(output: float) -> MemoryRun:
    """Sketches of 1 and 2 go in, that of `output` comes out."""
    batches = {}
    for rank in TWO:
        made = batch(0, events(SUMMED.format(f"x{rank}")))
        sketch = np.array([[rank + 1.0] * 4, [output] * 4])
        batches[rank] = [replace(made, sketch=sketch, nonfinite=np.zeros(2, np.int64))]
    return MemoryRun(batches)


def test_a_sum_that_lost_a_rank_is_broken():
    report = check_run(summed(2.0), Selection())

    assert first(report)[0] == "sums-conserved"
    rounded = check_run(summed(3.0 * (1 + 2**-23)), Selection())
    assert (rounded.broken, rounded.checked["sums-conserved"]) == ([], 1)


def test_without_sketches_a_sum_is_not_checked():
    report = check(SUMMED.format("x0"), SUMMED.format("x1"))

    assert report.not_applied["sums-conserved"] == {"no sketch was recorded (sketch: true)": 1}


CALLED = (
    "    grad_sync -  input  all_reduce[dp]/0  {}  op=all_reduce_sum moment=launch group=0,1:{}\n"
)
TWICE = CALLED.format("x", 0) + CALLED.format("y", 1)
LAST = CALLED.format("z", 2)
OTHER = CALLED.format("y", 1).replace("all_reduce_sum", "all_reduce_avg")


@pytest.mark.parametrize(
    ("others", "ranks", "why"),
    [
        ([CALLED.format("x", 0)], [0, 1],
         "all_reduce sum is number 1 of group dp on rank 0, but rank 1 never called it."),
        ([CALLED.format("x", 0), OTHER], [0, 1],
         "Ranks call different operations as number 1 of group dp: all_reduce sum on rank 0, "
         "all_reduce avg on rank 1."),
    ],
)  # fmt: skip
def test_a_collective_that_a_member_leaves_out_is_broken(others, ranks, why):
    report = check([TWICE, ""], [*others, ""][:2])

    assert first(report)[:2] == ("collectives-match", 0)
    assert (report.broken[0].ranks, report.broken[0].explanation) == (ranks, why)


@pytest.mark.parametrize(
    "others",
    [
        [TWICE, LAST],
        [CALLED.format("x", 0), CALLED.format("y", 1) + LAST],  # a step later
        [CALLED.format("x", 0), LAST],  # called, and not recorded
    ],
)
def test_a_collective_that_a_member_calls_later_is_not(others):
    assert check([TWICE, LAST], others).broken == []


def test_a_rank_whose_trace_has_gaps_may_have_called_it():
    listed = events(CALLED.format("x", 0) + CALLED.format("y", 5) + CALLED.format("y", 1))
    gap = batch(0, listed)
    kept = {
        name: getattr(gap, name)[[0, 2]]
        for name in ("key", "seq", "microbatch", "call", "h", "s", "producer", "group_seq", "peer",
                     "pair_seq")
    }  # fmt: skip
    run = MemoryRun({0: [batch(0, events(TWICE + LAST))], 1: [replace(gap, **kept)]})

    report = check_run(run, Selection())

    assert report.broken == []
    assert report.not_applied["collectives-match"] == {"a member of the group was not recorded": 1}


def gathered(used: int, second: int = 7, dtype: str = "float32"):
    """Shards 5 and `second` at their places; `used` is what a module uses, on each of two ranks."""
    start, use = events(f"""
        start   - param fc.weight/value 0
        forward 0 param fc.weight/value 0 {dtype}
    """)
    batches = {}
    for rank, value in ((0, 5), (1, second)):
        piece = Piece((4, 4), 0, (4, 1), 4 * rank, (8, 1))
        placement = Placement("o i[dp]", (4, 8), (piece,), sharded=("dp",))
        made = batch(0, [replace(start, key=replace(start.key, placement=placement)), use])
        batches[rank] = [replace(made, h=np.array([value, used], np.uint64))]
    return batches


def test_a_gathered_weight_is_what_its_shards_make():
    def report(batches):
        return check_run(MemoryRun(batches, missing=()), Selection())

    assert first(report(gathered(13)))[0] == "gathered-as-kept"
    assert report(gathered(12)).checked["gathered-as-kept"] == 2
    assert report(gathered(13, dtype="bfloat16")).broken == []
    one = report({0: gathered(13)[0]})
    assert one.broken == [] and "gathered-as-kept" in one.not_applied


SENT = "    forward - input  send[pp]/0 x op=send moment=launch     group=0,1:-1 pair=1:{}\n"
GOT = "    forward - output recv[pp]/0 x op=recv moment=completion group=0,1:-1 pair=0:{}\n"


def test_a_message_that_nobody_receives_is_broken():
    sent = SENT.format(0) + SENT.format(1)
    got = GOT.format(0)

    report = check(sent, got)
    assert first(report)[:2] == ("received-is-sent", 0)
    assert report.broken[0].explanation == (
        "Rank 0 sends message 1 of group dp that rank 1 never receives."
    )
    late = check([sent, ""], [got, GOT.format(1)])
    assert (late.broken, late.checked["received-is-sent"]) == ([], 2)


def test_a_selection_limits_what_is_reported():
    faulty = edited(REPLICA, ("g     at", "g2    at"))
    batches = {0: [batch(0, events(REPLICA))], 1: [batch(0, events(faulty))]}
    run = MemoryRun(batches, layouts={rank: layout(rank, "dp") for rank in TWO})

    assert check_run(run, Selection.parse(roles="param")).broken == []
    assert check_run(run, Selection.parse(roles="grad")).broken != []


def test_a_run_with_nothing_to_check_is_undecided():
    report = check("    forward   0  output  fc/0   y\n")

    assert (report.answer, report.exit_code) == ("undecided", 3)
    assert report.notes[0].startswith("nothing to check")


def test_missing_ranks_leave_an_unbroken_run_undecided():
    report = check(REPLICA, REPLICA, missing=(2,))

    assert (report.answer, report.broken) == ("undecided", [])


def test_a_break_is_listed_once_where_it_comes_first():
    faulty = edited(REPLICA, ("g     at", "g2    at"))

    report = check([REPLICA, REPLICA], [faulty, faulty])

    assert [(one.step, one.later) for one in report.broken] == [(0, 1)]


def test_a_given_placement_is_a_replica_over_the_axes_it_does_not_name():
    (event,) = events("    forward   0  output  norm/0   y\n")
    split = Placement("s[tp] h", (8, 8), (), sharded=("tp",))
    whole = Placement("s h", (4, 8), ())
    found = {}
    for name, placement in (("split", split), ("whole", whole)):
        seen = {
            rank: replace(event, value=rank, key=replace(event.key, placement=placement))
            for rank in TWO
        }
        run = MemoryRun(
            {rank: [batch(0, [seen[rank]])] for rank in TWO},
            layouts={rank: layout(rank, "tp", "dp") for rank in TWO},
        )
        found[name] = [one.invariant for one in check_run(run, Selection()).broken]

    assert found == {"split": [], "whole": ["replicas-agree"]}
