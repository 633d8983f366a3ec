"""The matrix of trainings: layouts, with and without recompute, in fp32 and bf16."""

from __future__ import annotations

from itertools import product

from tests.megatron_adapter.jobs import Job

SMALL = {"layers": 2, "num_microbatches": 2}
LAYOUTS = {
    "tp2": {"tp": 2, **SMALL},
    "pp2": {"pp": 2, "layers": 2},
    "vpp2": {"pp": 2, "vpp": 2},
    "dp2": SMALL,
    "distributed": {"distributed": True, **SMALL},
    "overlapped": {"distributed": True, "overlap": True, **SMALL},
    "sp": {"tp": 2, "sequence_parallel": True, "gated": True, "query_groups": 2, **SMALL},
    "ep2": {"ep": 2, "experts": 4, **SMALL},
}
ON_FOUR_RANKS = {"tp2-pp2": {"tp": 2, "pp": 2, "layers": 2}}
RECOMPUTE = ("", "full", "selective")
DTYPES = ("fp32", "bf16")


def whole_matrix(layouts: dict[str, dict]) -> list[Job]:
    """Every layout with every recompute in every dtype."""
    return [
        Job(
            f"{layout}-{recompute or 'none'}-{dtype}",
            recompute=recompute,
            dtype=dtype,
            **layouts[layout],
        )
        for layout, recompute, dtype in product(layouts, RECOMPUTE, DTYPES)
    ]


def pairwise(layouts: dict[str, dict]) -> list[str]:
    """Names of a few, among them each layout with each dtype, with and without recompute.

    And each recompute with each dtype.
    """
    wanted, chosen = {p for job in whole_matrix(layouts) for p in _pairs(job)}, []
    while wanted:
        best = max(whole_matrix(layouts), key=lambda job: len(wanted & _pairs(job)))
        chosen.append(best.name)
        wanted -= _pairs(best)
    return chosen


def _pairs(job: Job) -> set[tuple]:
    layout = job.name.split(f"-{job.recompute or 'none'}-")[0]
    return {
        (layout, bool(job.recompute)),
        (layout, job.dtype),
        (job.recompute, job.dtype),
    }
