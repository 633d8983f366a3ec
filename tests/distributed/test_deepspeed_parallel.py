"""Other ways to be parallel, real, on CPU ranks: experts, Ulysses, AutoTP, a Megatron-style mpu."""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
import torch
from deepspeed_parallel import train_case
from deepspeed_runs import broken, last_events, merged, verdict
from deepspeed_training import Training, block
from memory_trace import hash_of
from ranks import Pool

from upguard_plugin.trace.reader import open_trace

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


@pytest.fixture(scope="module")
def pool_of_four():
    pool = Pool(4, timeout_s=400)
    yield pool
    pool.close()


@pytest.fixture
def four_ranks(pool_of_four):
    return pool_of_four.get()


AXES = {
    "experts-2": {"dp": 2, "ep": 2, "edp": 1},
    "experts-1": {"dp": 2, "ep": 1, "edp": 2},
    "ulysses": {"dp": 1, "cp": 2},
    "mpu": {"dp": 1, "tp": 2},
    "autotp": {"dp": 1, "tp": 2},
    "recompute": {"dp": 2},
    "recompute-partitioned": {"dp": 1, "tp": 2},
}
HYBRID = {  # on four ranks
    "experts-2": {"dp": 4, "ep": 2, "edp": 2},
    "ulysses": {"dp": 2, "cp": 2},
    "mpu": {"dp": 2, "tp": 2},
}
# Weights that tensor parallelism cuts, by the end of their names -> the dim in which it does.
SPLITS = {
    "mpu": {"column": 0, "row": 1},
    "autotp": {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), 0),
        **dict.fromkeys(("gate_proj.weight", "up_proj.weight", "lm_head.weight"), 0),
        **dict.fromkeys(("o_proj.weight", "down_proj.weight"), 1),
    },
}
CONFIG = {"autotp": {"tensor_parallel": {"autotp_size": 2}}}
EVERYDAY = {
    ("experts-2", 2, "fp32"),
    ("experts-1", 1, "bf16"),
    ("ulysses", 1, "fp32"),
    ("mpu", 2, "fp32"),
    ("autotp", 1, "fp32"),
    ("recompute", 1, "fp32"),
    ("recompute-partitioned", 2, "fp32"),
}
MATRIX = [
    pytest.param(
        *one, marks=[] if one in EVERYDAY else pytest.mark.long, id="-".join(map(str, one))
    )
    for one in product(AXES, (0, 1, 2, 3), ("fp32", "bf16"))
    if not (one[0].startswith("experts") and one[1] == 3)  # DeepSpeed refuses that
]


def wholes(case, found):
    """What each rank has by its own names, put together: name in the whole model -> tensor."""
    whole = {}
    for name, first in found[0].items():
        ends = [dim for end, dim in SPLITS.get(case, {}).items() if name.endswith(end)]
        whole[name] = torch.cat([one[name] for one in found[:2]], ends[0]) if ends else first
    if case == "experts-2":  # the two experts of rank 1 are the third and the fourth
        for name, tensor in found[1].items():
            before, _, after = name.partition("deepspeed_experts.")
            if after:
                whole[f"{before}deepspeed_experts.{int(after[0]) + 2}{after[1:]}"] = tensor
    return whole


@pytest.mark.parametrize("case, stage, dtype", MATRIX)
def test_twins_are_identical_and_merged_parts_are_the_whole(
    parallel_ranks, tmp_path, case, stage, dtype
):
    check_twins(parallel_ranks, tmp_path, case, stage, dtype, AXES[case])
    keys = open_trace(tmp_path / "baseline").read(0, 0).keys
    recomputed = {key.boundary for key in keys if key.phase == "recompute"}
    assert recomputed == ({"first", "second"} if case.startswith("recompute") else set())


@pytest.mark.long
@pytest.mark.parametrize(
    "case, stage", [one for one in product(HYBRID, (1, 2, 3)) if one != ("experts-2", 3)]
)
def test_so_it_is_with_replicas_of_two_ranks_each(four_ranks, tmp_path, case, stage):
    check_twins(four_ranks, tmp_path, case, stage, "fp32", HYBRID[case])


def check_twins(ranks, tmp_path, case, stage, dtype, axes):
    def run(upguard=None):
        config = CONFIG.get(case, {})
        training = Training(stage, dtype, 2, config=config, upguard=upguard)
        return ranks.run(train_case, case, training)

    plain = run()
    runs = [tmp_path / "baseline", tmp_path / "target"]
    ends, _ = (run(block(folder)) for folder in runs)

    for without, with_capture in zip(plain, ends, strict=True):
        for name, weight in without["weights"].items():
            assert weight.equal(with_capture["weights"][name]), f"capture changed {name}"
    found = verdict(*runs)
    assert (found.verdict, found.coverage.not_comparable) == ("identical", 0), (
        found.notes,
        found.first_divergence,
    )
    assert broken(runs[0]) == []
    layout = open_trace(runs[0]).layout(1)
    assert {axis.name: axis.size for axis in layout.axes} == axes
    assert layout.zero_stage == stage

    weights = wholes(case, [end["weights"] for end in ends])
    phase = "optimizer" if stage in (0, 3) else "param_sync"
    assert_merged(last_events(runs[0], phase, "param", "value"), weights)
    if stage > 0:
        masters = wholes(case, [end["masters"] for end in ends])
        assert_merged(last_events(runs[0], "optimizer", "master", "master"), masters)
        for slot in ("exp_avg", "exp_avg_sq"):
            moments = [{n: t for (n, s), t in end["moments"].items() if s == slot} for end in ends]
            events = last_events(runs[0], "optimizer", "optimizer_state", slot)
            assert_merged(events, wholes(case, moments))


def assert_merged(events, whole):
    assert set(events) == set(whole)
    for name, parts in events.items():
        assert merged(parts).h == hash_of(whole[name]), name


@pytest.mark.long
def test_check_sees_that_a_mesh_leaves_sequences_unreduced(parallel_ranks, tmp_path):
    """DeepSpeed 0.19.8 itself: with `mesh_param` it reduces over the ranks of `dp` alone."""
    training = Training(1, upguard=block(tmp_path / "run"))
    ends = parallel_ranks.run(train_case, "ulysses-mesh", training)

    assert not ends[0]["weights"]["qkv.weight"].equal(ends[1]["weights"]["qkv.weight"])
    axes = open_trace(tmp_path / "run").layout(1).axes
    assert {axis.name: axis.size for axis in axes} == {"dp": 1, "cp": 2}
    first = broken(tmp_path / "run")[0]
    expected = "Main gradient of qkv.weight must be the same on ranks 0, 1, but ranks 0, 1 differ."
    assert first == expected
