"""Known bugs of several ranks as short event streams, each with its answer."""

from __future__ import annotations

from tests.compare.streams import answer, two_ranks
from tests.memory_run import MemoryRun, batch, edited, events
from tests.toy_training import train
from upguard_plugin.compare.runs import compare_runs

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
