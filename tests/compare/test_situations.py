"""Known bugs as short event streams, each with its answer: see the case's name in the docstring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.memory_run import MemoryRun, batch, edited, events, run
from tests.toy_training import flip, train
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.trace.batch import RankEnd


def answer(verdict) -> str:
    found = verdict.first_divergence
    if found is None:
        return verdict.verdict
    microbatch = "-" if found.microbatch is None else found.microbatch
    return f"{found.step} {microbatch} {found.phase} {found.boundary} {found.role} {found.kind}"


def compared(baseline: str, target: str, **options):
    return compare_runs(run(baseline), run(target, name="target"), **options)


def two_ranks(*texts: str, name: str = "run", **manifest) -> MemoryRun:
    ranks = {rank: [batch(0, events(text))] for rank, text in enumerate(texts)}
    return MemoryRun(ranks, name, **manifest)


MLP = """
start     -  param   fc1.weight/value     w1
start     -  buffer  rotary.inv_freq/value f
start     -  rng     rng.torch_cpu/value  r0       uint8  [16]
data      0  data    input_ids/value      ids      int64
forward   0  input   fc1/args.0           x        Linear
forward   0  output  fc1/out              a        Linear
forward   0  input   core/args.0          a        Core
forward   0  input   core/kwargs.mask     m        Core
forward   0  output  core/out             b        Core
forward   0  input   drop/args.0          b        Dropout
forward   0  output  drop/out             c        Dropout
loss      0  output  loss/out             l
backward  0  grad_output  drop/out        gc
backward  0  grad_input   drop/args.0     gb
backward  0  grad_output  core/out        gb
backward  0  grad_input   core/args.0     ga
backward  0  grad_input   core/kwargs.mask gm
backward  0  grad_output  fc1/out         ga
accumulate 0 grad    fc1.weight/grad      gw
optimizer -  optimizer_state fc1.weight/exp_avg  m1
optimizer -  param   fc1.weight/value     w2
"""
NEXT = """
start     -  param   fc1.weight/value     w2
start     -  rng     rng.torch_cpu/value  r1       uint8  [16]
"""


def behind(text: str, first: str) -> str:
    """The text with every value changed from the line that starts with `first` on."""
    lines = text.strip().splitlines()
    place = next(i for i, line in enumerate(lines) if line.split()[:4] == first.split())
    changed = [line.split() for line in lines[place:]]
    return "\n".join(
        lines[:place] + [" ".join([*words[:4], f"{words[4]}'", *words[5:]]) for words in changed]
    )


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


# Several ranks

SYNC = """
start      - param  fc.weight/value  w
accumulate 0 grad   fc.weight/grad   {local}
grad_sync  - input  bucket/0         {local}  group=0,1:0  op=all_reduce_sum  moment=launch
grad_sync  - output bucket/0         {sum}    group=0,1:0  op=all_reduce_sum  moment=completion
grad_sync  - grad   fc.weight/grad   {sum}
optimizer  - param  fc.weight/value  new-{sum}
"""


def synced(total: str = "sum", edits=(), name: str = "run") -> MemoryRun:
    texts = [SYNC.format(local=f"g{rank}", sum=total) for rank in (0, 1)]
    return two_ranks(*(edited(text, *edits) for text in texts), name=name)


def test_a_result_that_differs_on_all_ranks_is_collective():
    """Partial sums rounded at every hop."""
    verdict = compare_runs(synced(), synced("rounded"))

    assert answer(verdict) == "0 - grad_sync bucket output collective"
    assert verdict.first_divergence.ranks == [0, 1]
    assert verdict.first_divergence.group.model_dump() == {"name": "dp", "ranks": [0, 1], "seq": 0}


def test_a_local_gradient_explains_the_result_on_the_other_rank():
    baseline = synced()
    target = two_ranks(
        SYNC.format(local="g0", sum="sum'"), SYNC.format(local="g1'", sum="sum'"), name="target"
    )

    verdict = compare_runs(baseline, target)

    assert answer(verdict) == "0 0 accumulate fc.weight grad backward"
    assert (verdict.first_divergence.ranks, verdict.concurrent) == ([1], [])


def test_a_missing_collective_is_collective():
    """The all-reduce over the ranks is not called."""
    texts = [
        "\n".join(x for x in SYNC.format(local=f"g{r}", sum=f"g{r}").splitlines() if "op=" not in x)
        for r in (0, 1)
    ]
    verdict = compare_runs(synced(), two_ranks(*texts, name="target"))

    assert answer(verdict) == "0 - grad_sync bucket input collective"
    assert (verdict.first_divergence.ranks, verdict.first_divergence.target) == ([0, 1], None)


def test_gradients_that_were_not_synchronised_are_collective_without_collective_events():
    """The same fault, recorded where collectives are not captured."""

    def recorded(total):
        texts = [SYNC.format(local=f"g{r}", sum=total or f"g{r}") for r in (0, 1)]
        kept = ("\n".join(x for x in text.splitlines() if "op=" not in x) for text in texts)
        return two_ranks(*kept, name=f"total {total}")

    verdict = compare_runs(recorded("sum"), recorded(None))

    assert answer(verdict) == "0 - grad_sync fc.weight grad collective"
    assert verdict.first_divergence.ranks == [0, 1]


def test_another_type_on_the_wire_is_collective():
    wire = ("op=all_reduce_sum  moment=launch", "op=all_reduce_sum moment=launch bfloat16")

    verdict = compare_runs(synced(), synced("rounded", [wire]))

    assert answer(verdict) == "0 - grad_sync bucket input collective"
    assert "dtype float32 against bfloat16" in verdict.first_divergence.explanation


def test_another_reduce_op_is_collective():
    texts = [SYNC.format(local=f"g{r}", sum="mean").replace("_sum", "_avg") for r in (0, 1)]

    verdict = compare_runs(synced(), two_ranks(*texts, name="target"))

    assert answer(verdict) == "0 - grad_sync bucket input collective"
    assert "op all_reduce sum against all_reduce avg" in verdict.first_divergence.explanation


def test_two_collectives_in_the_other_order_are_collective():
    """Embedding gradients are added over stages before they are reduced over ranks."""
    call = (
        "grad_sync - input {0}/0 {0} group=0,1:{1} op=all_reduce_sum\n"
        "grad_sync - output {0}/0 {0}s group=0,1:{1} op=all_reduce_sum\n"
    )
    first = "accumulate 0 grad w/grad g\n"

    def ordered(*names):
        return first + "".join(call.format(name, i) for i, name in enumerate(names))

    verdict = compare_runs(
        two_ranks(*[ordered("dp", "embed")] * 2), two_ranks(*[ordered("embed", "dp")] * 2, name="t")
    )

    assert answer(verdict).startswith("0 - grad_sync dp input collective")


def test_collectives_may_complete_earlier_or_later():
    call = "grad_sync - {0} all_reduce/0#{1} {2} group=0,1:{1} op=all_reduce_sum moment={3}\n"
    launches = [call.format("input", i, f"g{i}", "launch") for i in (0, 1)]
    results = [call.format("output", i, f"s{i}", "completion") for i in (0, 1)]
    late, early = [*launches, *results], [launches[0], results[0], launches[1], results[1]]
    first = "accumulate 0 grad w/grad g\n"

    verdict = compare_runs(
        two_ranks(*[first + "".join(late)] * 2), two_ranks(*[first + "".join(early)] * 2, name="t")
    )

    assert (answer(verdict), verdict.coverage.unmatched_target) == ("identical", 0)


def test_a_bucket_overwritten_in_flight_is_collective():
    """The next gradient was copied into the buffer that is still being reduced."""
    flight = "grad_sync - input bucket/0 {} group=0,1:0 op=all_reduce_sum moment=completion\n"
    result = "grad_sync  - output bucket"

    def recorded(value, total, name):
        texts = [SYNC.format(local=f"g{r}", sum=total) for r in (0, 1)]
        return two_ranks(
            *(text.replace(result, flight.format(value) + result) for text in texts), name=name
        )

    verdict = compare_runs(recorded("g", "sum", "a"), recorded("other", "sum'", "b"))

    assert answer(verdict) == "0 - grad_sync bucket input collective"
    assert verdict.first_divergence.moment == "completion"
    assert verdict.first_divergence.ranks == [0, 1]


def test_a_scaled_bucket_is_collective_when_local_gradients_are_equal():
    """The loss was multiplied by a group's size and nobody divides by it."""
    scaled = [SYNC.format(local=f"g{r}", sum="twice") for r in (0, 1)]
    scaled = [t.replace(f"bucket/0         g{r}", f"bucket/0 2g{r}") for r, t in enumerate(scaled)]

    verdict = compare_runs(synced(), two_ranks(*scaled, name="target"))

    assert answer(verdict) == "0 - grad_sync bucket input collective"


def test_a_stale_weight_in_use_is_collective():
    """A layer runs before its updated weights have arrived."""
    first = "start - param fc.weight/value w0\noptimizer - param fc.weight/value w1\n"
    used = (
        "start - param fc.weight/value w1\nforward 0 param fc.weight/value {}\n"
        "forward 0 input fc/args.0 x\nforward 0 output fc/out y-{}\n"
    )

    def two_steps(weight, name):
        texts = [first, used.format(weight, weight)]
        batches = [batch(i, events(text)) for i, text in enumerate(texts)]
        return MemoryRun({0: batches, 1: batches}, name)

    verdict = compare_runs(two_steps("w1", "a"), two_steps("w0", "b"))

    assert answer(verdict) == "1 0 forward fc.weight param collective"
    assert "stale" in verdict.first_divergence.explanation


def test_a_receive_explains_the_next_stage():
    def stage(rank, value):
        if rank == 0:
            return f"forward 0 output a/out {value}\nforward 0 input send/0 {value} pair=1:0\n"
        return f"forward 0 output recv/0 {value} pair=0:0\nforward 0 output b/out {value}b\n"

    verdict = compare_runs(
        two_ranks(stage(0, "x"), stage(1, "x")), two_ranks(stage(0, "y"), stage(1, "y"), name="t")
    )

    assert answer(verdict) == "0 0 forward a output forward"
    assert (verdict.first_divergence.ranks, verdict.concurrent) == ([0], [])


def test_what_was_received_wrong_starts_at_the_receive():
    def stage(rank, value):
        if rank == 0:
            return "forward 0 output a/out x\nforward 0 input send/0 x pair=1:0 op=send\n"
        return f"forward 0 output recv/0 {value} pair=0:0 op=recv\nforward 0 output b/out {value}\n"

    verdict = compare_runs(
        two_ranks(stage(0, "x"), stage(1, "x")), two_ranks(stage(0, "x"), stage(1, "y"), name="t")
    )

    assert answer(verdict) == "0 0 forward recv output collective"
    assert verdict.first_divergence.ranks == [1]


def test_independent_faults_on_two_ranks_are_both_listed():
    def fault(place, rank, value):
        wrong = {0: "0/0/forward/head/output", 1: "0/0/forward/embed/output"}
        return value ^ 1 if wrong[rank] == place else value

    verdict = compare_runs(train(world=2), train(world=2, fault=fault, name="target"))

    assert answer(verdict) == "0 0 forward embed output forward"
    assert [(d.boundary, d.ranks) for d in verdict.concurrent] == [("head", [0])]


# Operators

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


# What is not decided

ENDED = {0: RankEnd(False, "killed or still running")}


def test_an_incomplete_run_is_never_identical_but_may_be_divergent():
    equal = compare_runs(run(MLP, NEXT), run(MLP, name="target", ends=ENDED))
    wrong = behind(MLP, "forward 0 output core/out")
    divergent = compare_runs(run(MLP, NEXT), run(wrong, name="target", ends=ENDED))

    assert (equal.verdict, equal.exit_code) == ("incomparable", 3)
    assert equal.notes[0] == (
        "incomplete: rank 0 of the target ended early (killed or still running); "
        "what was compared ends after 1 step"
    )
    assert (answer(divergent), divergent.exit_code) == ("0 0 forward core output forward", 1)


def test_runs_of_different_length_are_equal_only_as_far_as_both_go():
    verdict = compare_runs(run(MLP, NEXT), run(MLP, name="target"))

    assert verdict.exit_code == 3
    assert verdict.notes[0] == (
        "rank 0: 2 steps in the baseline, 1 in the target; "
        "what was compared are the 1 that both have"
    )


def test_missing_ranks_are_not_decided_unless_ranks_are_named():
    whole = two_ranks(MLP, MLP)
    part = MemoryRun({0: [batch(0, events(MLP))]}, "target", missing=(1,))

    verdict = compare_runs(whole, part)

    assert verdict.exit_code == 3
    assert verdict.notes[0] == (
        "missing ranks: the target lacks 1 (found 0); copy the missing files, or name the ranks "
        "to compare: --ranks 0"
    )
    assert compare_runs(whole, part, Selection.parse(ranks="0")).exit_code == 0
    assert compare_runs(whole, part, Selection.parse(ranks="0-1")).exit_code == 3


def test_two_runs_with_nothing_in_common_are_incomparable():
    other = "start - param conv.weight/value q\nforward 0 output conv/out z\n"

    verdict = compared(MLP, other)

    assert verdict.exit_code == 3
    assert "nothing in common" in verdict.notes[0]


def test_other_placements_are_not_comparable():
    placed = edited(MLP, ("fc1.weight/value     w1", "fc1.weight/value w1-at-2 at=o[tp]"))
    equal = edited(MLP, ("fc1.weight/value     w1", "fc1.weight/value w1 at=o[tp]"))

    verdict = compared(MLP, placed)

    assert (verdict.exit_code, verdict.coverage.not_comparable) == (3, 1)
    assert verdict.notes[0] == (
        "1 event not comparable: the runs give these tensors other placements"
    )
    assert compared(MLP, equal).exit_code == 0


def test_fingerprints_of_two_versions_are_refused():
    verdict = compare_runs(run(MLP), run(MLP, name="target", fingerprint_version=2))

    assert (verdict.exit_code, verdict.coverage.compared) == (3, 0)
    assert verdict.notes[0].startswith("fingerprints of version 1 and 2 cannot be compared")


def test_what_other_world_sizes_leave_uncompared_is_counted():
    verdict = compare_runs(run(MLP), two_ranks(MLP, MLP, name="target"))

    assert verdict.coverage.not_comparable > 0
    assert any(note.startswith("not compared: ") for note in verdict.notes)


def test_equal_digests_are_not_decoded():
    baseline, target = run(MLP, NEXT), run(MLP, edited(NEXT, ("r1", "r2")), name="target")

    compare_runs(baseline, target)

    assert (baseline.num_reads, target.num_reads) == (1, 1)


# Resumed runs


def resumed(whole: MemoryRun, at: int, name: str = "resumed", iterations=False) -> MemoryRun:
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
        whole = resumed(whole, 0, "whole")

    clean = compare_runs(whole, resumed(whole, 2, iterations=iterations))
    backwards = compare_runs(resumed(whole, 2, iterations=iterations), whole)

    assert (answer(clean), clean.coverage.compared) == ("identical", 2 * 277)
    assert clean.notes[0] == "program: 'whole' against 'resumed'".replace("whole", whole.path.name)
    assert "resumed: step 2 of the baseline is step 0 of the target, rank 0" in clean.notes
    assert answer(backwards) == "identical"


def test_a_state_that_was_loaded_wrong_is_found_at_the_resumed_step():
    """The optimizer's states were given to other parameters."""
    whole = train(num_steps=4)
    fault = flip("2/-/start/blocks.0.ln1.weight/optimizer_state")
    wrong = resumed(train(num_steps=4, fault=fault), 2)

    verdict = compare_runs(whole, wrong)

    assert answer(verdict) == "2 - start blocks.0.ln1.weight optimizer_state optimizer"
    assert "before anything was computed" in verdict.first_divergence.explanation


def test_the_wrong_batch_after_a_resume_is_data():
    """The loader is at the right place of the wrong shuffle."""
    wrong = resumed(train(num_steps=4, fault=flip("2/0/data/input_ids/data")), 2)

    assert answer(compare_runs(train(num_steps=4), wrong)) == "2 0 data input_ids data data"


def test_a_resumed_run_that_ends_early_is_not_decided():
    whole = train(num_steps=4)
    short = resumed(MemoryRun({0: list(whole.batches[0].values())[:3]}, "short"), 1)

    assert compare_runs(whole, short).exit_code == 3


def test_other_weights_from_the_start_are_no_resume():
    def reseeded(place, rank, value):
        return value ^ 1 if place.startswith("-/-/init/") else value

    verdict = compare_runs(train(), train(fault=reseeded, name="seed 2"))

    assert answer(verdict) == "0 - start embed.weight param init"
    assert len(verdict.concurrent) == 14


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


def test_what_is_none_in_one_run_and_not_there_in_the_other_is_told_and_no_divergence():
    bias = "forward   0  output  core/out             b        Core\n"
    empty = edited(MLP, (bias, bias + "forward 0 output core/out.1 - Core dtype=none\n"))
    full = edited(MLP, (bias, bias + "forward 0 output core/out.1 b1 Core\n"))

    for verdict, side, other in (
        (compared(empty, MLP), "baseline", "target"),
        (compared(MLP, empty), "target", "baseline"),
    ):
        assert answer(verdict) == "identical"
        assert (
            f"no data: core output out.1 is None in the {side} from step 0 on (rank 0), and the "
            f"{other} has no such output"
        ) in verdict.notes
    assert answer(compared(full, MLP)) == "0 0 forward core output structure"
    assert answer(compared(empty, full)) == "0 0 forward core output structure"


def test_a_module_of_another_class_may_pass_equal_tensors_in_another_way():
    keyword = edited(
        MLP, ("0  input   core/args.0          a        Core", "0 input core/kwargs.x a Plain")
    )
    wrong = edited(keyword, ("core/kwargs.x a Plain", "core/kwargs.x a2 Plain"))

    verdict = compared(MLP, keyword)

    assert answer(verdict) == "identical"
    assert (
        "other class: core is a Core in the baseline and a Plain in the target from step 0 on "
        "(rank 0), and equal tensors are passed in another way"
    ) in verdict.notes
    assert answer(compared(MLP, wrong)) == "0 0 forward core input forward"
