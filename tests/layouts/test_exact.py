"""Two layouts of one exact model agree bit for bit; a planted fault is named across layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import upguard_plugin
from tests.cases.case import seed_all, verdict_of
from tests.layouts.exact_model import TP_PLACEMENTS, VOCABULARY, Exact, batches, loss_of

STEPS = 1  # with the update, the bit width outgrows float64 in the second step


def train(
    model: Exact,
    output: str,
    *,
    microbatches: int = 1,
    share: slice = slice(None),
    changed: int | None = None,
    **enable: Any,
) -> None:
    """One step of SGD; `share` are the samples of this rank, `changed` a token to change."""
    seed_all()
    dp = enable.get("layout", {}).get("dp", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    with upguard_plugin.enable(model, optimizer, {"output_dir": output}, **enable) as guard:
        for tokens, labels in batches(STEPS):
            optimizer.zero_grad()
            mine = zip(
                tokens[share].chunk(microbatches), labels[share].chunk(microbatches), strict=True
            )
            for k, (some, theirs) in enumerate(mine):
                guard.microbatch(k)
                if changed is not None:
                    some = some.clone()
                    some[0, changed] = (some[0, changed] + 1) % VOCABULARY
                loss = loss_of(model(some), theirs)
                guard.scalar("loss", loss)
                loss.backward()
            if dp > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            guard.step()


def on_rank(rank: int, job: str, output: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    if job.startswith("tp"):
        model = Exact(rank, 2)
        if job == "tp-unreduced":
            model.blocks[1].mlp.reduces = False
        if job == "tp-swapped":  # this rank's part is the other one's
            other = Exact(1 - rank, 2).blocks[0].mlp.fc1.weight
            model.blocks[0].mlp.fc1.weight.data.copy_(other.data)
        train(model, output, layout={"tp": 2}, placements=TP_PLACEMENTS)
    else:
        model = Exact()
        share = slice(2 * rank, 2 * rank + 2)
        changed = 3 if (job, rank) == ("dp-token", 1) else None
        train(model, output, share=share, layout={"dp": 2}, changed=changed)
    dist.destroy_process_group()


def two_ranks(job: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    output = folder / job
    mp.spawn(on_rank, (job, str(output), str(folder / f"{job}.store")), nprocs=2)
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def single(folder):
    train(Exact(), str(folder / "single"))
    return folder / "single"


@pytest.fixture(scope="module")
def single_by_two(folder):
    train(Exact(), str(folder / "by-two"), microbatches=2)
    return folder / "by-two"


def compared(verdict: dict[str, Any]) -> int:
    return verdict["coverage"]["compared"]


def test_one_rank_and_tensor_parallel_two_are_identical(single, folder):
    verdict = verdict_of(single, two_ranks("tp", folder))

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    assert verdict["coverage"]["unmatched_baseline"] == 0
    assert verdict["coverage"]["unmatched_target"] == 0
    assert compared(verdict) > 150


def test_one_rank_and_data_parallel_two_are_identical(single_by_two, folder):
    verdict = verdict_of(single_by_two, two_ranks("dp", folder))

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    assert compared(verdict) > 150


def test_other_micro_batches_of_the_same_samples_are_identical_as_far_as_they_compare(
    single, folder
):
    verdict = verdict_of(single, two_ranks("dp", folder / "other"))

    assert verdict["verdict"] == "identical", verdict["first_divergence"]
    assert any("other micro-batches" in note for note in verdict["notes"])


def test_a_changed_token_is_the_data_across_layouts(single_by_two, folder):
    verdict = verdict_of(single_by_two, two_ranks("dp-token", folder))

    first = verdict["first_divergence"]
    assert (first["step"], first["phase"], first["kind"]) == (0, "data", "data")


def test_a_missing_reduction_is_named(single, folder):
    verdict = verdict_of(single, two_ranks("tp-unreduced", folder))

    first = verdict["first_divergence"]
    assert (first["step"], first["phase"], first["boundary"], first["role"]) == (
        0, "forward", "blocks.1.mlp", "output",
    )  # fmt: skip
    assert first["ranks"] == [0, 1]


def test_swapped_parts_are_named_where_they_are_found(single, folder):
    verdict = verdict_of(single, two_ranks("tp-swapped", folder))

    first = verdict["first_divergence"]
    assert (first["step"], first["phase"], first["boundary"], first["kind"]) == (
        0, "start", "blocks.0.mlp.fc1.weight", "init",
    )  # fmt: skip
