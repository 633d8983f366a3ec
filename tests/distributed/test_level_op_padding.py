"""The padding of ZeRO 3 at level `op`: it is no value, and what lies beside it is."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_training import Training, block, make_engine, run_steps
from torch.utils._python_dispatch import TorchDispatchMode

from tests.memory_fill import FILLS, IS_GLIBC, fill_memory
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.verdict import Verdict

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.skipif(not IS_GLIBC, reason="only glibc's malloc fills memory"),
]
_SUMMED = "stage3_use_all_reduce_for_fetch_params"
_ODD = Training(zero={"overlap_comm": True, "reduce_bucket_size": 500})  # a model of odd sizes


class FlippedFirst(TorchDispatchMode):
    """Flips the last bit of element 0 of what an operator wrote, in its n-th call of that size."""

    def __init__(self, operator: str, size: int, nth: int) -> None:
        super().__init__()
        self._operator, self._size, self._left = operator, size, nth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(f"{self._operator}.") and result.numel() == self._size:
            if self._left == 0:
                result.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
            self._left -= 1
        return result


def train(training: Training, fill: int | None, flipped: tuple[str, int, int] | None) -> None:
    fill_memory(fill)
    mode = FlippedFirst(*(flipped or ("none", 0, 0)))
    with mode:  # below whoever watches
        engine = make_engine(training)
        try:
            run_steps(engine, training)
        finally:
            engine.destroy()
            fill_memory(None)


def verdict_of(
    ranks: Any, folder: Path, training: Training, flipped: tuple[str, int, int] | None = None
) -> Verdict:
    runs = [folder / "baseline", folder / "target"]
    for run, fill, flip in zip(runs, FILLS, (None, flipped), strict=True):
        upguard = block(run, level="op", program=run.name if flipped else "same")
        ranks.run(train, replace(training, upguard=upguard), fill, flip)
    return compare_runs(*(open_trace(run) for run in runs))


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulation", "zero"),
    [
        (3, "bf16", 2, {}),
        pytest.param(3, "fp32", 1, {}, marks=pytest.mark.long),
        pytest.param(3, "bf16", 1, {_SUMMED: True}, marks=pytest.mark.long),
        pytest.param(
            3, "bf16", 1, {"stage3_param_persistence_threshold": 8}, marks=pytest.mark.long
        ),
        pytest.param(3, "fp32", 1, {"sub_group_size": 10}, marks=pytest.mark.long),
        pytest.param(1, "bf16", 1, {}, marks=pytest.mark.long),
        pytest.param(2, "fp32", 2, {}, marks=pytest.mark.long),
    ],
)
def test_runs_that_differ_in_memory_that_nobody_wrote_are_identical(
    deepspeed_ranks, tmp_path, stage, dtype, accumulation, zero
):
    training = replace(
        _ODD, stage=stage, dtype=dtype, accumulation=accumulation, zero=_ODD.zero | zero
    )

    verdict = verdict_of(deepspeed_ranks, tmp_path, training)

    assert verdict.verdict == "identical", verdict.first_divergence


@pytest.mark.parametrize(
    ("flipped", "place"),
    [
        # Rank 1 keeps 35 elements of all weights, three of them padding; steps are 0 and 1.
        (("aten.addcdiv_", 35, 1), (1, "optimizer", "aten.addcdiv_", "optimizer")),
        pytest.param(
            ("aten.div_", 70, 0), (0, "backward", "aten.div_", "backward"), marks=pytest.mark.long
        ),
        pytest.param(
            ("aten.cat", 18, 0), (0, "forward", "aten.cat", "forward"), marks=pytest.mark.long
        ),
    ],
)
def test_a_flipped_bit_beside_the_padding_is_blamed_on_its_operator(
    deepspeed_ranks, tmp_path, flipped, place
):
    verdict = verdict_of(deepspeed_ranks, tmp_path, replace(_ODD, stage=3), flipped)

    first = verdict.first_divergence
    assert (first.step, first.phase, first.operator, first.kind) == place
