"""One training under several ZeRO stages: equal bit for bit up to where they may round otherwise.

Two CPU ranks, real DeepSpeed. What differs first is named, and each place has its reason here.
"""

from __future__ import annotations

import importlib.util

import pytest
from deepspeed_runs import answer, verdict
from deepspeed_training import Training, block, train, train_ddp

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

NORM = "clip grad_norm scalar"
# Of the norm's: ZeRO 3 adds it up in double precision, so the first equal numbers are gradients.
CLIPPED = "clip 0.weight main_grad"
# ZeRO 2 and 3 reduce every micro-batch and add up what they reduced; ZeRO 1 adds up and reduces.
REDUCED = "grad_sync 0.weight main_grad"
# FP16_UnfusedOptimizer steps once when it is made: weight decay and the step counter are ahead.
MASTERS = "start 0.weight master"

EXPECTED = {  # stage, stage, dtype, accumulation -> step and place of the first difference
    (1, 2, "fp32", 1): None,
    (1, 2, "bf16", 1): None,
    (1, 2, "fp32", 2): f"0 - {REDUCED}",
    (1, 2, "bf16", 2): f"0 - {REDUCED}",
    (2, 3, "fp32", 1): f"1 - {CLIPPED}",
    (2, 3, "bf16", 1): f"1 - {CLIPPED}",
    (2, 3, "fp32", 2): f"0 - {CLIPPED}",
    (2, 3, "bf16", 2): f"1 - {CLIPPED}",
    (1, 3, "fp32", 1): f"1 - {CLIPPED}",
    (1, 3, "bf16", 2): f"0 - {REDUCED}",
    (0, 1, "fp32", 1): f"1 - {NORM}",
    (0, 1, "fp32", 2): f"0 - {NORM}",
    (0, 2, "fp32", 1): f"1 - {NORM}",
    (0, 1, "bf16", 1): f"0 - {MASTERS}",
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
            training = Training(number, dtype, accumulation, upguard=block(path))
            deepspeed_ranks.run(function, training)
        return path

    return run


def place(found):
    """Where the first difference is: all of `answer` that comes before the kind."""
    return None if found is None else " ".join(answer(found).split()[: -1 - len(found.ranks)])


@pytest.mark.parametrize(
    "one, other, dtype, accumulation",
    [
        pytest.param(*key, marks=[] if key in EVERYDAY else pytest.mark.long)
        for key in EXPECTED
    ],
)  # fmt: skip
def test_two_stages_agree_up_to_where_they_may_differ(run_of, one, other, dtype, accumulation):
    baseline, target = (run_of(stage, dtype, accumulation) for stage in (one, other))

    found = verdict(baseline, target)

    expected = EXPECTED[one, other, dtype, accumulation]
    assert place(found.first_divergence) == expected
    assert found.verdict == ("identical" if expected is None else "divergent")
    if expected is not None and "start" not in expected:
        # Weights, batches, forward and backward of all micro-batches lie in the certified prefix.
        assert found.certified.events > 50 * accumulation
        assert found.certified.last.phase in ("backward", "accumulate", "grad_sync")


@pytest.mark.parametrize(
    "accumulation, expected",
    [
        (1, "1 - clip 0.weight grad"),
        pytest.param(2, "0 - clip 0.weight grad", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_ddp_by_hand_is_zero_0_up_to_clipping(run_of, accumulation, expected):
    """torch divides by the norm where DeepSpeed takes a reciprocal: the last bit may differ."""
    found = verdict(run_of("ddp", "fp32", accumulation), run_of(0, "fp32", accumulation))

    assert place(found.first_divergence) == expected
    assert found.certified.last.boundary == "grad_norm"
