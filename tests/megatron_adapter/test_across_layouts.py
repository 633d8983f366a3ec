"""Real Megatron-Core on one rank against the same training in other layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bugs.training import compare, found
from tests.megatron_adapter.jobs import Job, train
from tests.megatron_adapter.merged import events, states, whole

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

PLAIN = Job("", layers=2, num_microbatches=2, sketch=True, dropout=False)
GATED = replace(PLAIN, gated=True, query_groups=2)

# Trainings by name, on one rank; each has twins in other layouts: "tp2-fp32-0".
ONE = {
    f"{dtype}-{seed}": replace(PLAIN, dtype=dtype, seed=seed)
    for dtype in ("fp32", "bf16")
    for seed in range(5)
}
ONE |= {f"gated-{dtype}": replace(GATED, dtype=dtype) for dtype in ("fp32", "bf16")}
ONE["deep-fp32"] = replace(PLAIN, layers=4)
ONE["long-fp32"] = replace(PLAIN, num_microbatches=4)
FOUR = replace(PLAIN, num_microbatches=4)
ONE |= {
    "sharded-fp32": FOUR,
    "experts": replace(FOUR, experts=4),
    "moe": replace(PLAIN, experts=4, layers=1, num_microbatches=1),
    "tied": replace(PLAIN, untied=False),
    "fp16": replace(PLAIN, dtype="fp16"),
    "recomputed": replace(PLAIN, recompute=True),
    "clipped": replace(FOUR, clip=0.01),
}
LAYOUTS = {
    "zero2": {"distributed": True},
    "ep2": {"ep": 2},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "vpp2": {"pp": 2, "vpp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "etp1": {"tp": 2, "etp": 1, "sequence_parallel": True},
    "marked": {"tp": 2, "etp": 1, "sequence_parallel": True, "marked": True},
    "dp2": {},  # as the two above: half of the micro-batches on each rank
}
OFTEN = [name for name in ONE if name not in ("experts", "moe", "sharded-fp32")]
SUMMED = [f"tp2-{name}" for name in OFTEN] + ["sp2-fp32-1", "sp2-bf16-1", "dp2-long-fp32"]
SUMMED += ["zero2-sharded-fp32", "ep2-experts", "pp2-tied", "pp2-clipped"]
SUMMED += ["tp2pp2-fp32-0", "tp2pp2-bf16-0"]
STAGED = [f"pp2-{name}" for name in OFTEN if name not in ("tied", "clipped")] + ["vpp2-deep-fp32"]
SHORT = ("tp2-fp32-0", "tp2-bf16-0", "pp2-fp32-0", "tp2-loaded", "pp2-loaded")

# Fault -> where it must be found: boundary, phase, role, kind.
_FC1, _FC2 = ("decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2")
FAULTS = {
    "vocabulary_offset": ("embedding.word_embeddings", "forward", "output", "forward"),
    "row_not_reduced": (_FC2, "forward", "output", "forward"),
    "bias_on_every_rank": (_FC2, "forward", "output", "forward"),
    "glu_cut_as_one": (f"{_FC1}.weight", "start", "param", "optimizer"),
}


def marked(names, short=SHORT):
    return [pytest.param(n, marks=() if n in short else pytest.mark.long) for n in names]


def job_of(name: str, folder) -> Job:
    """A training in another layout, or one with a fault: "row_not_reduced-bf16"."""
    first, _, rest = name.partition("-")
    if first in FAULTS:
        return replace(ONE[f"gated-{rest}"], name=name, tp=2, fault=first)
    base = ONE.get(rest, GATED)
    load = str(folder / "checkpoint") if rest == "loaded" else ""
    if first in ("dp2", "zero2", "ep2"):
        base = replace(base, num_microbatches=base.num_microbatches // 2)
    return replace(base, name=name, load=load, **LAYOUTS[first])


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The folder of the runs that the selected tests ask for, one rank's and two ranks'."""
    folder = tmp_path_factory.mktemp("across")
    items = [item for item in request.session.items if item.path == request.path]
    asked = {v for i in items if hasattr(i, "callspec") for v in i.callspec.params.values()}
    others = [job_of(name, folder) for name in sorted(asked)]
    bases = {baseline_of(job.name) for job in others}
    loaded = replace(GATED, save=str(folder / "checkpoint"))
    jobs = [replace(ONE.get(base, loaded), name=base) for base in sorted(bases)]
    parts = (
        ("one", jobs, 1),
        ("two", [job for job in others if num_ranks_of(job.name) == 2], 2),
        ("four", [job for job in others if num_ranks_of(job.name) == 4], 4),
    )
    for part, listed, num_ranks in parts:
        (folder / part).mkdir()
        if listed:
            train(listed, folder / part, num_ranks)
    return folder


def baseline_of(name: str) -> str:
    first, _, rest = name.partition("-")
    return f"gated-{rest}" if first in FAULTS else rest


def num_ranks_of(name: str) -> int:
    return 4 if name.startswith("tp2pp2") else 2


def pair_of(runs, name: str):
    part = "four" if num_ranks_of(name) == 4 else "two"
    return runs / "one" / "runs" / baseline_of(name), runs / part / "runs" / name


def verdict_on(runs, name: str):
    return compare(*pair_of(runs, name))


@pytest.mark.parametrize("name", marked(SUMMED))
def test_sums_in_another_order_are_rounding(runs, name):
    verdict = verdict_on(runs, name)

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    place = tuple(verdict["tainted"]["from"][key] for key in ("step", "boundary", "role"))
    if name.startswith(("dp2", "zero2", "ep2")):
        assert place[::2] == (0, "main_grad")  # summed over micro-batches in another order
    elif name.startswith("pp2"):
        assert place[1] == {"pp2-clipped": "grad_norm"}.get(
            name, "embedding.word_embeddings.weight"
        )
    else:  # all before it is equal: weights, data, embeddings, the first column-parallel layer
        assert place == (0, "decoder.layers.0.self_attention.linear_proj", "output")
    assert verdict["coverage"]["tainted"] == verdict["tainted"]["boundaries"] > 200
    assert verdict["coverage"]["differ"] == 0
    assert verdict["tainted"]["largest_in_eps"] < (8 if "bf16" in name else 200)


@pytest.mark.parametrize("name", marked(STAGED))
def test_stages_compute_what_one_rank_computes(runs, name):
    verdict = verdict_on(runs, name)

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    assert verdict["coverage"]["unmatched_baseline"] == 0
    assert verdict["coverage"]["unmatched_target"] == 0
    # The squares of the gradients are added up stage by stage.
    tainted = verdict["tainted"]
    assert tainted is None or tainted["from"]["boundary"] == "grad_norm"
    assert verdict["coverage"]["tainted"] <= 2
    assert verdict["coverage"]["compared"] > 2000


@pytest.mark.parametrize(
    "name",
    marked(
        [
            f"{layout}-loaded"
            for layout in LAYOUTS
            if layout not in ("vpp2", "ep2", "etp1", "marked")
        ]
    ),
)
def test_one_checkpoint_gives_every_layout_the_same_weights_and_data(runs, name):
    folders = pair_of(runs, name)
    weights = [
        {n: whole(parts) for (kind, n), parts in states(folder, 0, "start").items()
         if kind == "param"}
        for folder in folders
    ]  # fmt: skip
    samples = [
        {(e.key.boundary, e.h) for e in events(folder) if e.key.role == "sample" and e.step == 0}
        for folder in folders
    ]

    assert weights[0] == weights[1]
    assert len(weights[0]) > 20
    assert samples[0] == samples[1]
    assert len(samples[0]) > 4


@pytest.mark.parametrize("name", marked(
    [f"{fault}-{dtype}" for fault in FAULTS for dtype in ("fp32", "bf16")],
    short=[f"{fault}-fp32" for fault in FAULTS],
))  # fmt: skip
def test_a_fault_of_the_layout_is_named_in_spite_of_rounding(runs, name):
    verdict = verdict_on(runs, name)

    place = (1, *FAULTS[name.partition("-")[0]])
    assert found(verdict, "step", "boundary", "phase", "role", "kind") == place
    assert verdict["tainted"]["boundaries"] > 200


@pytest.mark.parametrize("name", ["etp1-moe", "marked-moe"])
def test_experts_whose_gradients_megatron_does_not_sum_are_named(runs, name):
    """Whole experts on every tensor-parallel rank, without expert parallelism.

    Megatron-Core marks them as dense. So nobody sums their gradients over the ranks, which have
    other parts of the sequence. Marked as experts they are summed, and the pair is clean.
    """
    verdict = verdict_on(runs, name)

    if name.startswith("marked"):
        assert verdict["verdict"] == "identical", verdict["first_divergence"]
        assert verdict["tainted"]["boundaries"] > 100
        return
    expert = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    place = (0, expert, "grad_sync", "main_grad", "collective")
    assert found(verdict, "step", "boundary", "phase", "role", "kind") == place
    assert verdict["first_divergence"]["ranks"] == [0, 1]
