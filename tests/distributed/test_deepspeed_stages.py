"""One training under several ZeRO stages: equal bit for bit up to where they may round otherwise.

Two CPU ranks, real DeepSpeed. What differs first is named, and each place has its reason here.
"""

from __future__ import annotations

import importlib.util

import pytest
from deepspeed_runs import answer, verdict
from deepspeed_training import Training, block, train, train_ddp

from upguard_plugin.compare.ignoring import IgnoreRule
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

# Where the numbers may begin to differ by rounding, and why:
NORM = "clip grad_norm scalar"  # added up over whole gradients or over what each rank keeps
CLIPPED = "clip 0.weight main_grad"  # by a norm that ZeRO 3 adds up in double precision
# ZeRO 2 and 3 reduce every micro-batch and add up what they reduced; ZeRO 1 adds up and reduces.
REDUCED = "grad_sync 0.weight main_grad"

# What is no rounding:
DOUBLE = f"0 - {NORM} structure"  # ZeRO 3's norm is a float64
WIDER = "0 - grad_sync 0.weight main_grad structure"  # ZeRO 3's reduced gradients are fp32
WIDER_SUM = "0 - grad_sync 0.weight main_grad nondeterminism"  # so are its sums of micro-batches
NO_SCALE = "0 - start loss_scale scalar structure"  # ZeRO 0 in fp32 has none, and no masters
# FP16_UnfusedOptimizer steps once when it is made: weight decay and the step counter are ahead.
STEPPED = "0 - start 0.weight master optimizer"

EXPECTED = {  # stage, stage, dtype, accumulation -> first divergence; where rounding begins
    (1, 2, "fp32", 1): (None, None),
    (1, 2, "bf16", 1): (None, None),
    (1, 2, "fp32", 2): (None, f"0 {REDUCED}"),
    (1, 2, "bf16", 2): (None, f"0 {REDUCED}"),
    (2, 3, "fp32", 1): (DOUBLE, f"1 {CLIPPED}"),
    (2, 3, "bf16", 1): (WIDER, f"1 {CLIPPED}"),
    (2, 3, "fp32", 2): (DOUBLE, f"0 {CLIPPED}"),
    (1, 3, "fp32", 1): (DOUBLE, f"1 {CLIPPED}"),
    (1, 3, "bf16", 2): (WIDER_SUM, None),
    (0, 1, "fp32", 1): (NO_SCALE, f"1 {NORM}"),
    (0, 1, "fp32", 2): (NO_SCALE, f"0 {NORM}"),
    (0, 2, "fp32", 1): (NO_SCALE, f"1 {NORM}"),
    (0, 1, "bf16", 1): (STEPPED, None),
}
EVERYDAY = ((1, 2, "fp32", 1), (1, 2, "fp32", 2), (2, 3, "fp32", 1), (0, 1, "fp32", 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stages")


@pytest.fixture
def run_of(deepspeed_ranks, folder):
    """The run of a training, made where it is not there yet."""

    def run(stage, dtype, accumulation):
        path = folder / f"{stage}-{dtype}-{accumulation}"
        if not path.exists():
            function = train_ddp if stage == "ddp" else train
            number = 0 if stage == "ddp" else stage
            training = Training(number, dtype, accumulation, upguard=block(path, sketch=True))
            deepspeed_ranks.run(function, training)
        return path

    return run


def divergence(found):
    """Where the first one is, and its kind; not its ranks."""
    first = found.first_divergence
    return first and " ".join(answer(first).split()[: -len(first.ranks)])


def rounding(found):
    """Where numbers begin to differ by rounding."""
    region = found.tainted
    origin = region and region.origin
    return origin and f"{origin.step} {origin.phase} {origin.boundary} {origin.role}"


@pytest.mark.parametrize(
    "one, other, dtype, accumulation",
    [pytest.param(*key, marks=[] if key in EVERYDAY else pytest.mark.long) for key in EXPECTED],
)
def test_two_stages_agree_up_to_where_they_may_differ(run_of, one, other, dtype, accumulation):
    baseline, target = (run_of(stage, dtype, accumulation) for stage in (one, other))

    found = verdict(baseline, target)

    assert (divergence(found), rounding(found)) == EXPECTED[one, other, dtype, accumulation]
    differs = found.first_divergence is not None
    assert found.verdict == ("divergent" if differs else "identical")
    if found.tainted is not None:
        # Weights, batches, forward and backward up to there are among what is equal bit by bit.
        assert found.certified.events > 90 * accumulation
        assert found.tainted.largest_in_eps < 8


@pytest.mark.parametrize(
    "accumulation, expected",
    [
        (1, "1 clip 0.weight grad"),
        pytest.param(2, "0 clip 0.weight grad", marks=pytest.mark.long),
    ],
)
def test_ddp_by_hand_is_zero_0_up_to_clipping(run_of, accumulation, expected):
    """torch divides by the norm where DeepSpeed takes a reciprocal: the last bit may differ."""
    runs = [open_trace(run_of(stage, "fp32", accumulation)) for stage in ("ddp", 0)]
    of_an_engine = IgnoreRule(("global_samples", "clip_coefficient"), (), "DDP has no engine")

    found = compare_runs(*runs, Selection(ignore=(of_an_engine,)))

    assert (found.verdict, rounding(found)) == ("identical", expected)
