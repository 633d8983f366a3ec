"""Two layouts of TX agree bit for bit; a fault that is planted in one is named exactly."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.cases.case import first_is, seed_all, verdict_of
from tests.cases.recordings import Recordings
from tests.tx.mesh import AXES, Mesh
from tests.tx.training import Batch, Fault, train
from tests.tx.zero import FlatSlice
from upguard_plugin.report.text import verdict_text
from upguard_plugin.verdict import Verdict

Sizes = Mapping[str, Any]

ONE: Sizes = {}
TP2, SP2, DP2, PP2 = {"tp": 2}, {"tp": 2, "sp": True}, {"dp": 2}, {"pp": 2}
CP2, EP2 = {"cp": 2, "zigzag": True}, {"dp": 2, "ep": 2}
TP2_DP2 = {"tp": 2, "dp": 2}
TP2_PP2, SP2_DP2 = {"tp": 2, "pp": 2}, {"tp": 2, "sp": True, "dp": 2}
ETP2, ETP4 = {"dp": 2, "etp": 2}, {"tp": 2, "dp": 2, "etp": 4}  # experts cut, nothing else; wider
TP2_ETP1 = {"tp": 2, "sp": True, "etp": 1}  # whole experts, each rank with its part of the sequence
TP2_ETP1_EP2 = {"tp": 2, "etp": 1, "ep": 2}
SP2_DP2_EP2 = {"tp": 2, "sp": True, "dp": 2, "etp": 1, "ep": 2}
TP2_EP2, CP2_PP2 = {"tp": 2, "dp": 2, "ep": 2}, {"cp": 2, "zigzag": True, "pp": 2}

# Why events of a pair may be left out; anything else is a hole in the coverage.
OF_A_LAYOUT = {
    "collectives and operators are those of a layout",
    "random states are those of a layout",
    "partial sums over tp, recorded without sketches",
    "partial sums over etp, recorded without sketches",
    "gradients that the ranks have not summed yet",
    "gradients are added up over other micro-batches on each rank",
    "the runs put the same samples into other micro-batches",
    "ranks hold other values, and no placement says how they belong together",  # group sizes
}
UNKNOWN = "no placement is known (a rule for --place or for enable says it)"


def record(output: str, sizes: Sizes, fault: str, how: Mapping[str, Any]) -> None:
    """Train on this rank. how: `sketch`, and what `train` takes."""
    seed_all()
    sketch = {"sketch": how.get("sketch", False)}
    config = {"output_dir": output, "samples": True, "program": fault or "clean", **sketch}
    how = {name: value for name, value in how.items() if name != "sketch"}
    train(config, Mesh(**sizes), fault=FAULTS[fault] if fault else None, **how)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, recordings: Recordings) -> Any:
    """recorded(sizes, fault, **how): where that run is; it is trained once."""
    folder = tmp_path_factory.mktemp("tx")

    def run(sizes: Sizes = ONE, fault: str = "", **how: Any) -> Path:
        words = [f"{name}{value}" for name, value in {**sizes, **how}.items()]
        output = folder / "-".join([*words, fault.replace(" ", "_") or "clean"])
        if not output.exists():
            num_ranks = prod(sizes.get(axis, 1) for axis in AXES)
            recordings.on_ranks(num_ranks, record, str(output), dict(sizes), fault, how)
        return output

    return run


def exact_verdict(baseline: Path, target: Path) -> dict[str, Any]:
    """What `upguard compare --exact` says."""
    return verdict_of(baseline, target, "--exact")


def reasons_of(verdict: Mapping[str, Any]) -> dict[str, str]:
    """Why events were left out, with the boundaries."""
    notes = [note for note in verdict["notes"] if note.startswith("not compared: ")]
    notes = [note.replace(" (sketch: true)", "") for note in notes]
    parts = [note.removeprefix("not compared: ").split(" events, ", 1)[1] for note in notes]
    return {reason: where for reason, _, where in (part.partition(": ") for part in parts)}


# baseline, its micro-batches, target, its micro-batches, at least so many events compared
PAIRS = [
    (ONE, 1, ONE, 2, 1300),
    (ONE, 1, TP2, 1, 1200),
    (ONE, 1, SP2, 1, 1200),
    (ONE, 1, DP2, 1, 1300),
    (ONE, 2, DP2, 1, 1300),
    (ONE, 1, DP2, 2, 1300),
    (ONE, 2, DP2, 2, 1300),
    (ONE, 1, PP2, 1, 1300),
    (ONE, 2, PP2, 2, 1400),
    (ONE, 1, PP2, 2, 1280),
    (ONE, 1, CP2, 1, 1300),
    (ONE, 1, TP2_PP2, 1, 1150),
    (ONE, 1, TP2_PP2, 2, 1150),
    (ONE, 1, SP2_DP2, 1, 1150),
    (ONE, 1, CP2_PP2, 2, 1280),
    (TP2, 1, PP2, 2, 1150),
    (CP2, 1, SP2_DP2, 1, 1150),
]


def name_of(pair: Any) -> str | None:
    return str(pair).replace(" ", "") if isinstance(pair, Mapping) else None


@pytest.mark.parametrize(("baseline", "theirs", "target", "ours", "num_events"), PAIRS, ids=name_of)
def test_two_layouts_agree_on_everything(recorded, baseline, theirs, target, ours, num_events):
    runs = recorded(baseline, microbatches=theirs), recorded(target, microbatches=ours)

    there, back = exact_verdict(*runs), exact_verdict(*reversed(runs))

    for verdict in (there, back):
        assert verdict["verdict"] == "identical", verdict["first_divergence"]
        coverage = verdict["coverage"]
        assert (coverage["unmatched_baseline"], coverage["unmatched_target"]) == (0, 0)
        assert coverage["compared"] >= num_events
        check_reasons(reasons_of(verdict))


def check_reasons(reasons: Mapping[str, str]) -> None:
    """Nothing that can be compared was left out: the samples are compared one by one, say."""
    assert set(reasons) <= {*OF_A_LAYOUT, UNKNOWN}
    # It is a sum over the samples, of which a rank has some.
    assert reasons.get(UNKNOWN, "pos (grad_output)") == "pos (grad_output)"


MOE_PAIRS = [
    (ONE, 1, EP2, 1, 1550),
    (ONE, 1, TP2_EP2, 1, 1400),
    (TP2, 1, EP2, 1, 1400),
    (ONE, 1, ETP2, 1, 1400),
    (ONE, 1, ETP4, 1, 1400),
    (ONE, 1, TP2_ETP1, 1, 1400),
    (ONE, 1, TP2_ETP1_EP2, 1, 1400),
    (ONE, 1, SP2_DP2_EP2, 1, 1400),
    (ETP2, 1, TP2_ETP1, 1, 1400),
]


@pytest.mark.parametrize(
    ("baseline", "theirs", "target", "ours", "num_events"), MOE_PAIRS, ids=name_of
)
def test_experts_on_one_rank_and_on_two_agree(recorded, baseline, theirs, target, ours, num_events):
    runs = (
        recorded(baseline, microbatches=theirs, moe=True),
        recorded(target, microbatches=ours, moe=True),
    )

    for verdict in (exact_verdict(*runs), exact_verdict(*reversed(runs))):
        assert verdict["verdict"] == "identical", verdict["first_divergence"]
        assert verdict["coverage"]["compared"] >= num_events
        check_reasons(reasons_of(verdict))


ZERO_PAIRS = [("weights", DP2, 1, 1300), ("masters", DP2, 2, 1300), ("weights", TP2_DP2, 1, 1100)]


@pytest.mark.parametrize(("zero", "sizes", "microbatches", "num_events"), ZERO_PAIRS)
def test_flat_slices_of_an_optimizer_make_up_the_whole(
    recorded, zero, sizes, microbatches, num_events
):
    runs = recorded(), recorded(sizes, zero=zero, microbatches=microbatches)

    for verdict in (exact_verdict(*runs), exact_verdict(*reversed(runs))):
        assert verdict["verdict"] == "identical", verdict["first_divergence"]
        assert verdict["coverage"]["compared"] >= num_events
        reasons = reasons_of(verdict)
        copies = reasons.pop("the layouts keep other copies of weights and gradients", None)
        assert (copies is not None) == (zero == "masters")
        check_reasons(reasons)


def test_partial_sums_are_equal_to_a_sum_by_their_sketches(recorded):
    runs = recorded(sketch=True), recorded(SP2_DP2, sketch=True)

    for verdict in (exact_verdict(*runs), exact_verdict(*reversed(runs))):
        assert verdict["verdict"] == "identical", verdict["first_divergence"]
        assert verdict["coverage"]["compared"] >= 1350
        assert not any("partial sums" in reason for reason in reasons_of(verdict))
        assert (verdict["tainted"], verdict["coverage"]["tainted"]) == (None, 0)


def test_what_is_left_out_has_its_distance_where_sketches_tell(recorded):
    verdict = exact_verdict(recorded(sketch=True), recorded(SP2_DP2, sketch=True))

    left_out = {found["reason"]: found for found in verdict["left_out"]}
    grouped = left_out["the runs put the same samples into other micro-batches"]
    distances = {(b["boundary"], b["role"]): b["largest_in_eps"] for b in grouped["boundaries"]}
    assert distances["tokens", "data"] is None  # whole numbers have no sketch
    assert distances["pos", "output"] == distances["weights", "data"] == 0
    assert distances["head.weight", "grad"] == 0  # what both ranks have adds up to the whole
    assert (
        sum(found["events"] for found in left_out.values())
        == (verdict["coverage"]["not_comparable"])
    )
    text = verdict_text(Verdict.model_validate(verdict), verbose=True)
    assert "             head.weight (grad): 0 epsilons apart (estimated)\n" in text
    assert any("pos (output, 0 epsilons apart)" in note for note in verdict["notes"])


def returns_unreduced(name: str) -> Fault:
    """A tensor-parallel region keeps this rank's partial sum."""

    def plant(model: nn.Module, mesh: Mesh) -> None:
        if name in dict(model.named_modules()):
            model.get_submodule(name).forward = lambda x: x

    return Fault(model=plant)


def swaps_weights(model: nn.Module, mesh: Mesh) -> None:
    """Each rank has the other one's part."""
    parts = [torch.empty_like(model.blocks["0"].mlp.fc1.weight) for _ in range(2)]
    dist.all_gather(parts, model.blocks["0"].mlp.fc1.weight.detach())
    model.blocks["0"].mlp.fc1.weight.data.copy_(parts[1 - mesh.index("tp")])


class InRankOrder(Mesh):
    """Takes rank r's tokens for chunk r of the sequence."""

    def part(self, whole: Tensor, dim: int, axis: str) -> Tensor:
        return whole.chunk(self.size(axis), dim)[self.index(axis)]


def takes_rows_in_rank_order(model: nn.Module, mesh: Mesh) -> None:
    model.blocks["1"].attn.core.mesh = InRankOrder(cp=2, zigzag=True)


def changes_a_token(batch: Batch, mesh: Mesh, microbatch: int) -> Batch:
    tokens, weights = batch
    if mesh.index("dp") == 1:
        tokens = tokens.clone()
        tokens[0, 3] = (tokens[0, 3] + 1) % 32
    return tokens, weights


def doubles_expert_gradients(model: nn.Module, mesh: Mesh) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.grad.mul_(2)


def feeds_the_last_stage_twice(model: nn.Module, mesh: Mesh) -> None:
    """The last stage works on the activations of micro-batch 0 again."""
    if mesh.index("pp") == 0:
        return
    forward, kept = model.forward, []

    def stale(x: Tensor) -> Tensor:
        kept.append(x.detach().clone())
        with torch.no_grad():
            x.copy_(kept[0])
        return forward(x)

    model.forward = stale


def doubles_its_share(model: nn.Module, mesh: Mesh) -> None:
    """Rank 1's part of a row-parallel layer counts twice."""
    if mesh.index("tp") == 1:
        layer = model.blocks["1"].mlp.fc2
        layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight)


def keeps_its_own_gradient(flat: FlatSlice) -> None:
    """Rank 1 does not get the sum."""
    if flat.mesh.index("dp") == 1:
        flat.own.grad.copy_(flat.padded(lambda p: p.grad).chunk(2)[1])


def shifts_its_slice(flat: FlatSlice) -> None:
    if flat.mesh.index("dp") == 1:
        flat.own.data.copy_(flat.own.data.roll(1))


FAULTS = {
    "expert unreduced": returns_unreduced("blocks.1.moe.experts.0.leave"),
    "expert gradients left out": Fault(summed=lambda name: ".experts." not in name),
    "share doubled": Fault(model=doubles_its_share),
    "slice of a gradient": Fault(slices=keeps_its_own_gradient),
    "slice of the weights": Fault(gathered=shifts_its_slice),
    "unreduced": returns_unreduced("blocks.1.mlp.leave"),
    "unreduced in stage 0": returns_unreduced("blocks.0.attn.leave"),
    "swapped": Fault(model=swaps_weights),
    "norm left out": Fault(summed=lambda name: name != "ln_f.weight"),
    "gradient left out": Fault(summed=lambda name: name != "blocks.0.ln2.weight"),
    "rows in rank order": Fault(model=takes_rows_in_rank_order),
    "other token": Fault(batch=changes_a_token),
    "expert gradients doubled": Fault(gradients=doubles_expert_gradients),
    "stale activations": Fault(model=feeds_the_last_stage_twice),
}

# fault, layout, further arguments, what must be named
PLANTED: list[tuple[str, Sizes, dict[str, Any], dict[str, Any]]] = [
    (
        "unreduced", TP2, {},
        {"phase": "forward", "boundary": "blocks.1.mlp.leave", "role": "output", "ranks": [0, 1],
         "kind": "forward"},
    ),
    (
        "unreduced in stage 0", TP2_PP2, {"microbatches": 2},
        {"phase": "forward", "boundary": "blocks.0.attn.leave", "role": "output", "ranks": [0, 1],
         "kind": "forward"},
    ),
    (
        "swapped", TP2, {},
        {"phase": "start", "boundary": "blocks.0.mlp.fc1.weight", "kind": "init", "ranks": [0, 1]},
    ),
    (
        "norm left out", SP2, {},
        {"phase": "grad_sync", "boundary": "ln_f.weight", "role": "grad", "kind": "collective",
         "ranks": [0, 1]},
    ),
    (
        "gradient left out", DP2, {"microbatches": 2},
        {"phase": "grad_sync", "boundary": "blocks.0.ln2.weight", "role": "grad",
         "kind": "collective", "ranks": [0, 1]},
    ),
    (
        "rows in rank order", CP2, {},
        {"phase": "forward", "boundary": "blocks.1.attn.core", "role": "output", "ranks": [0, 1],
         "kind": "forward"},
    ),
    (
        "other token", DP2, {},
        {"phase": "data", "boundary": "tokens", "role": "sample", "ranks": [1], "kind": "data"},
    ),
    (
        "expert gradients doubled", EP2, {"moe": True},
        {"phase": "grad_sync", "boundary": "blocks.0.moe.experts.0.w1.weight", "role": "grad",
         "kind": "collective", "ranks": [0]},
    ),
    (
        "expert unreduced", ETP2, {"moe": True},
        {"phase": "forward", "boundary": "blocks.1.moe.experts.0.leave", "role": "output",
         "ranks": [0, 1], "kind": "forward"},
    ),
    (
        "expert gradients left out", TP2_ETP1, {"moe": True},
        {"phase": "grad_sync", "boundary": "blocks.0.moe.experts.0.w1.weight", "role": "grad",
         "kind": "collective", "ranks": [0, 1]},
    ),
    (
        "share doubled", TP2, {"sketch": True},
        {"phase": "forward", "boundary": "blocks.1.mlp.fc2", "role": "output", "ranks": [0, 1],
         "kind": "forward"},
    ),
    (
        "slice of a gradient", DP2, {"zero": "weights"},
        {"phase": "grad_sync", "boundary": "blocks.0.mlp.fc2.weight", "role": "grad",
         "kind": "collective", "ranks": [0, 1]},
    ),
    (
        "slice of the weights", DP2, {"zero": "weights"},
        {"phase": "optimizer", "boundary": "blocks.0.mlp.fc2.weight", "role": "param",
         "kind": "optimizer", "ranks": [0, 1]},
    ),
    (
        "stale activations", PP2, {"microbatches": 2},
        {"phase": "forward", "boundary": "blocks.1", "role": "input", "ranks": [1],
         "kind": "forward", "microbatch": 1},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "sizes", "how", "answer"), PLANTED, ids=[planted[0] for planted in PLANTED]
)
def test_a_fault_of_a_layout_is_named_exactly(recorded, fault, sizes, how, answer):
    microbatches = how.get("microbatches", 1) if "pp" in sizes else 1
    sketch = {"sketch": True} if how.get("sketch") else {}
    baseline = recorded(ONE, microbatches=microbatches, moe=how.get("moe", False), **sketch)

    verdict = exact_verdict(baseline, recorded(sizes, fault, **how))

    found = verdict["first_divergence"]
    assert first_is(verdict, {"step": 0, **answer}), found
