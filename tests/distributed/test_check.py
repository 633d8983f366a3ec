"""`upguard check` on real runs of two gloo ranks: faults are found, clean twins are silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checked
import checked_faults
import pytest
import torch
from click.testing import CliRunner
from ranks import Ranks

from upguard_plugin.cli import upguard


def check(run: Path) -> dict[str, Any]:
    result = CliRunner().invoke(upguard, ["check", str(run), "--format", "json"])
    assert result.exit_code in (0, 1) and result.output, repr(result.exception)
    report = json.loads(result.output)
    assert result.exit_code == (1 if report["broken"] else 0)
    return report


@pytest.mark.parametrize("level", ["stage", "module", "op"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp named", "fsdp1", "fsdp1 flat"])
def test_nothing_is_broken_in_a_clean_run(
    two_ranks: Ranks, tmp_path: Path, kind: str, level: str
) -> None:
    two_ranks.run(checked.train, kind, str(tmp_path / "run"), level)
    report = check(tmp_path / "run")
    assert report["broken"] == []
    assert report["suspects"] == []
    assert report["checked"]["collectives-match"] > 0
    if kind == "fsdp1 flat" and level != "stage":
        assert report["checked"]["gathered-as-kept"] == 2 * 2 * checked.STEPS


def fields(broken: dict[str, Any]) -> tuple[Any, ...]:
    names = ("invariant", "step", "phase", "boundary", "role", "ranks")
    return tuple(broken[name] for name in names)


@pytest.mark.parametrize(
    ("fault", "step", "phase", "role"),
    [("gradient", 1, "grad_sync", "grad"), ("weight", 2, "start", "param")],
)
def test_replicas_that_drift_are_found_where_they_part(
    two_ranks: Ranks, tmp_path: Path, fault: str, step: int, phase: str, role: str
) -> None:
    two_ranks.run(checked.train, "ddp", str(tmp_path / "run"), "module", fault)

    first = check(tmp_path / "run")["broken"][0]

    assert fields(first) == ("replicas-agree", step, phase, "0.weight", role, [0, 1])


@pytest.mark.parametrize(
    ("kind", "invariant", "ranks"),
    [
        ("other op", "collectives-match", [0, 1]),
        ("all_reduce", "outputs-agree", [0, 1]),
        ("all_gather", "data-conserved", [1]),
        ("scatter", "data-conserved", [0, 1]),
        ("all_to_all", "data-conserved", [0, 1]),
        ("integer sum", "data-conserved", [1]),
        ("message", "received-is-sent", [1]),
    ],
)
def test_a_collective_that_goes_wrong_is_found(
    two_ranks: Ranks, tmp_path: Path, kind: str, invariant: str, ranks: list[int]
) -> None:
    two_ranks.run(checked_faults.collective, kind, str(tmp_path / "wrong"), True)
    two_ranks.run(checked_faults.collective, kind, str(tmp_path / "right"), False)

    broken = {one["invariant"]: one for one in check(tmp_path / "wrong")["broken"]}
    clean = check(tmp_path / "right")

    assert broken[invariant]["ranks"] == ranks
    assert clean["broken"] == [] and clean["checked"][invariant] > 0


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_send_is_looked_at_again_when_it_is_over(
    two_ranks: Ranks, tmp_path: Path, level: str
) -> None:
    two_ranks.run(checked_faults.message, str(tmp_path / "run"), level)

    checks = check(tmp_path / "run")["checked"]

    assert (checks["received-is-sent"], checks["inputs-unchanged"]) == (1, 1)


@pytest.mark.parametrize(("level", "per_step"), [("module", 1), ("stage", 2)])
def test_a_rank_without_inputs_goes_through_the_steps_of_the_others(
    two_ranks: Ranks, tmp_path: Path, level: str, per_step: int
) -> None:
    two_ranks.run(checked.uneven, str(tmp_path / "wrong"), level, True, per_step)
    two_ranks.run(checked.uneven, str(tmp_path / "right"), level, False, per_step)

    first, clean = check(tmp_path / "wrong")["broken"][0], check(tmp_path / "right")

    assert fields(first)[:4] == ("replicas-agree", 4, "start", "0.weight")
    assert clean["broken"] == clean["suspects"] == []
    assert clean["checked"]["replicas-agree"] > 10


# On the rank that keeps all of a parameter of FSDP1 its use looks like the part.
@pytest.mark.parametrize(("kind", "uses"), [("fsdp", 6 * 2), ("fsdp1", 6 * 2 - 4)])
def test_a_gathered_weight_that_its_shards_do_not_make_is_found(
    two_ranks: Ranks, tmp_path: Path, kind: str, uses: int
) -> None:
    two_ranks.run(checked.train, kind, str(tmp_path / "wrong"), "module", "gathered")
    two_ranks.run(checked.train, kind, str(tmp_path / "right"), "module")

    broken = {one["invariant"]: one for one in check(tmp_path / "wrong")["broken"]}
    clean = check(tmp_path / "right")

    place = (0, "forward", "3.weight", "param", [1])
    assert fields(broken["gathered-as-kept"])[1:] == place
    assert clean["broken"] == [] and clean["checked"]["gathered-as-kept"] == uses * checked.STEPS


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_distributed_checkpoint_that_is_read_wrong_is_found(
    two_ranks: Ranks, tmp_path: Path, kind: str, in_background: bool
) -> None:
    two_ranks.run(checked.checkpointed, kind, str(tmp_path / "wrong"), True, in_background)
    two_ranks.run(checked.checkpointed, kind, str(tmp_path / "right"), False, in_background)

    first, clean = check(tmp_path / "wrong")["broken"][0], check(tmp_path / "right")

    assert fields(first) == ("saved-is-loaded", 2, "checkpoint", "checkpoint", "output", [1])
    assert first["slot"] == "m.0.weight"
    assert clean["broken"] == [] and clean["checked"]["saved-is-loaded"] > 40


def test_a_collective_that_one_rank_never_calls_is_reported(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(checked_faults.left_alone, str(tmp_path / "wrong"), True)
    two_ranks.run(checked_faults.left_alone, str(tmp_path / "right"), False)

    broken = check(tmp_path / "wrong")["broken"]

    assert [(one["invariant"], one["ranks"], one["explanation"]) for one in broken] == [
        (
            "collectives-match",
            [0, 1],
            "all_reduce sum is number 1 of group world on rank 0, but rank 1 never called it.",
        )
    ]
    assert check(tmp_path / "right")["broken"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_that_is_lost_in_a_sum_is_found(
    two_ranks: Ranks, tmp_path: Path, dtype: torch.dtype
) -> None:
    two_ranks.run(checked_faults.lost_in_the_sum, dtype, str(tmp_path / "wrong"), True)
    two_ranks.run(checked_faults.lost_in_the_sum, dtype, str(tmp_path / "right"), False)

    broken = {one["boundary"] for one in check(tmp_path / "wrong")["broken"]}
    clean = check(tmp_path / "right")

    assert broken == {"all_reduce[world]", "reduce_scatter[world]"}
    assert (clean["broken"], clean["checked"]["sums-conserved"]) == ([], 2)


CASES = {
    checked_faults.overwritten_bucket: (
        "inputs-unchanged", 0, "grad_sync", "all_gather[world]", "input", [0],
    ),
    checked_faults.early_branch: (
        "replicas-agree", 0, "grad_sync", "branch.a.weight", "grad", [0, 1],
    ),
    checked_faults.forgotten_partial: (
        "replicas-agree", 0, "grad_sync", "gate.weight", "grad", [0, 1],
    ),
    checked_faults.stale_weights: (
        "replicas-agree", 1, "forward", "1.weight", "param", [0, 1],
    ),
    checked_faults.unreduced_amax: (
        "replicas-agree", 0, "backward", "qkv.input_amax", "buffer", [0, 1],
    ),
    checked_faults.averaged_alone: (
        "alone-unchanged", 0, "grad_sync", "reduce_scatter[dp1]", "output", [1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_public_bug_is_named_exactly_and_its_twin_is_silent(
    two_ranks: Ranks, tmp_path: Path, case: Any
) -> None:
    answer = CASES[case]
    two_ranks.run(case, str(tmp_path / "faulty"), True)
    two_ranks.run(case, str(tmp_path / "twin"), False)

    assert fields(check(tmp_path / "faulty")["broken"][0]) == answer
    twin = check(tmp_path / "twin")
    assert twin["broken"] == [] and twin["checked"][answer[0]] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_weight_that_is_declared_as_cut_is_a_suspect(
    two_ranks: Ranks, tmp_path: Path, dtype: torch.dtype
) -> None:
    two_ranks.run(checked.marked_as_cut, str(tmp_path / "wrong"), dtype, True)
    two_ranks.run(checked.marked_as_cut, str(tmp_path / "right"), dtype, False)

    wrong, right = check(tmp_path / "wrong"), check(tmp_path / "right")

    marked = [
        [one["boundary"] for one in report["suspects"] if one["invariant"] == "parts-differ"]
        for report in (wrong, right)
    ]
    assert marked == [["0.weight", "1.weight"], []]
    assert wrong["broken"] == right["broken"] == []
    assert right["checked"]["parts-differ"] == 2
