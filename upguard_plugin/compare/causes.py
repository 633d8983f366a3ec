"""Why a boundary differs: its kind, whether its inputs are equal, and who wrote it.

In:  the origin of a divergence, with the steps around it.
Out: a `Cause`. Its kind is the first rule of docs/comparing.md that matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from upguard_plugin.compare.chain import Chain
from upguard_plugin.compare.changes import draws_otherwise, writer_between
from upguard_plugin.compare.communication import collective
from upguard_plugin.compare.evidence import (
    Scene,
    baseline_draws,
    draws_of,
    inputs_equal_of,
    lacking,
    overwritten_producer,
    pairs_of,
    rng_parted,
)
from upguard_plugin.compare.findings import Finding
from upguard_plugin.compare.keys import PHASE_NUMBER, ROLE_NUMBER, called, is_collective
from upguard_plugin.records import EventKey
from upguard_plugin.verdict import Kind

# Modules and operators whose output depends on random draws.
_RANDOM = re.compile(
    r"drop(out|_?path|$)|stochastic|rrelu|bernoulli|multinomial|(^|[._])rand|normal_$|[._]normal"
    r"|uniform|exponential_|geometric_|cauchy_|gumbel",
    re.IGNORECASE,
)
# Modules that draw nothing, whatever else draws in the same step.
_NEVER_RANDOM = re.compile(r"linear|norm|embedding$|conv|gelu|silu|softmax|sigmoid|tanh", re.I)

_KIND_OF_PHASE: dict[str, Kind] = {
    "start": "data",  # of an operator: it runs before the batch is there
    "data": "data",
    "forward": "forward",
    "loss": "forward",
    "recompute": "forward",
    "eval": "forward",
    "backward": "backward",
    "accumulate": "backward",
    "grad_sync": "backward",
    "clip": "optimizer",
    "optimizer": "optimizer",
    "param_sync": "optimizer",
    "checkpoint": "optimizer",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """What is known of an origin."""

    kind: Kind
    inputs_equal: bool | None  # None: its inputs were not recorded
    producer: int | None  # baseline row of the event that wrote the storage last
    why: str  # half a sentence that follows "... differs"


def cause_of(scene: Scene) -> Cause:
    """Decide the kind of a divergence and say why."""
    chain = scene.finding.chain
    if chain is not None and chain.how is not None:
        return Cause(_kind_of_chain(scene, chain), chain.inputs_equal, None, "")
    inputs_equal = inputs_equal_of(scene)
    producer = overwritten_producer(scene)
    for rule in (_state_at_start, _batch, _random, collective, _structure):
        decided = rule(scene)
        if decided is not None:
            kind, why = decided
            return Cause(kind, inputs_equal, producer, why)
    kind = _KIND_OF_PHASE[scene.key.phase]
    why = _how_we_know(scene, inputs_equal, producer)
    if scene.same_program and inputs_equal is not False:
        return Cause(
            "nondeterminism", inputs_equal, producer, f"{why}, in one and the same program"
        )
    return Cause(kind, inputs_equal, producer, why)


def _kind_of_chain(scene: Scene, chain: Chain) -> Kind:
    """Of operators that only one run has: by where they run, at the start by what they wrote."""
    # What could draw (attention, say) has not done so in a step that leaves its generators alike.
    if draws_otherwise(scene.pairing, chain) and rng_parted(scene) is not False:
        return "rng"
    if is_collective(scene.key):
        return "collective"
    written = replace(scene, finding=Finding(scene.finding.place, *chain.reached, "value"))
    decided = _state_at_start(written)
    return decided[0] if decided is not None else _KIND_OF_PHASE[scene.key.phase]


def _state_at_start(scene: Scene) -> tuple[Kind, str] | None:
    key = scene.key
    if key.phase != "start" or scene.finding.what == "form":
        return None if key.phase != "start" else _state_form(scene)
    first = scene.steps.is_first_recorded(scene.step)
    missing = lacking(scene)
    if key.role == "rng":
        return "rng", missing or (
            "at the start, before anything was computed"
            if first
            else "at the start of the step: the step before drew other random numbers, "
            "or something was drawn in between"
        )
    if key.role in ("input", "output"):
        return None  # of an operator that ran since the last step
    if key.role in ("grad", "main_grad"):
        return "backward", missing or "at the start: it was left over from before"
    if key.role in ("optimizer_state", "master", "scalar"):
        return "optimizer", missing or (
            "at the start, before anything was computed" if first else _since_step_end(scene)
        )
    if first:
        return "init", missing or "at the start, before anything was computed"
    return _written_between(scene)


def _state_form(scene: Scene) -> tuple[Kind, str] | None:
    kinds: dict[str, Kind] = {"rng": "rng", "param": "init", "buffer": "init"}
    return kinds.get(scene.key.role, "optimizer"), "in dtype or shape at the start"


def _since_step_end(scene: Scene) -> str:
    return "at the start of the step, as the step before or something after it left it"


def _written_between(scene: Scene) -> tuple[Kind, str]:
    """Weights and buffers that differ at the start of a later step: who wrote them?"""
    key, before = scene.key, scene.steps.pairing(scene.step - 1)
    if before is None:
        return "optimizer", "at the start of the step, and the step before was not recorded"
    at_end = pairs_of(before, key.boundary, ("optimizer", "param_sync"), "param")
    if len(at_end) and before.differs[at_end[-1]]:
        return "optimizer", "as the step before left it"
    if key.role == "buffer":
        owner = key.boundary.rpartition(".")[0]
        if len(pairs_of(before, owner, ("forward",), "output")):
            return "forward", f"at the start of the step: the forward of {owner} wrote it"
    if len(at_end):
        return "optimizer", (
            f"at the start of the step, but was equal when step {scene.step - 1} ended: "
            f"{writer_between(scene, before)} wrote it in between"
        )
    return "optimizer", "at the start of the step: the update of the step before wrote it"


def _batch(scene: Scene) -> tuple[Kind, str] | None:
    key = scene.key
    if key.role in ("data", "sample"):
        return "data", lacking(scene) or "in the batch; nothing before it differs"
    side, row = scene.finding.seen_by(scene.pairing)
    if key.role != "input" or key.phase != "forward" or scene.finding.what != "value":
        return None
    batch = side.columns.role[side.key] == ROLE_NUMBER["data"]
    calls = np.flatnonzero(
        (side.columns.phase[side.key] == PHASE_NUMBER["forward"])
        & (side.columns.role[side.key] == ROLE_NUMBER["input"])
        & (side.batch.microbatch == side.batch.microbatch[row])
    )
    first = side.batch.key_of(int(calls[0]))
    enters = (first.boundary, called(first)) == (key.boundary, called(key))
    if batch.any() or not enters or is_collective(key):
        return None
    return "data", "where the batch enters the model (no batch was recorded before it)"


def _random(scene: Scene) -> tuple[Kind, str] | None:
    key = scene.key
    if key.role == "rng":
        return "rng", "although everything before it is equal"
    computed = key.phase in ("forward", "loss", "recompute", "eval")
    if not computed or key.role not in ("input", "output") or is_collective(key):
        return None
    if scene.finding.what != "value":
        return None
    draws = draws_of(scene)
    if draws == "other":
        return "rng", "and the random state, from which its call drew, differs"
    if draws == "one side":
        return "rng", "with equal inputs: only one run drew random numbers in its call"
    named = key.operator or key.boundary.rpartition(".")[2]
    parted = rng_parted(scene)
    if draws == "unknown" and key.role == "output" and _RANDOM.search(named):
        if scene.across_layouts:
            return "rng", "with equal inputs: a layout-dependent random op, ranks draw their own"
        other = parted is not False
        return ("rng", "with equal inputs: it drew other random numbers") if other else None
    if draws == "unknown" and parted and baseline_draws(scene) and not _is_quiet(key):
        return "rng", "and the random states, equal when the step began, differ when it ended"
    return None


def _is_quiet(key: EventKey) -> bool:
    """Whether it is the output of a module that draws nothing, whatever else does."""
    return key.role == "output" and bool(_NEVER_RANDOM.search(key.operator or ""))


def _structure(scene: Scene) -> tuple[Kind, str] | None:
    """What differs without a value behind it; a missing gradient or state is a value."""
    key, finding = scene.key, scene.finding
    if finding.what == "value":
        return None
    if finding.what == "alone" and key.role in ("grad", "main_grad") and key.phase == "clip":
        return "optimizer", f"{lacking(scene)}: there it was not clipped or unscaled here"
    if finding.what == "alone" and key.role in ("grad", "main_grad"):
        return "backward", f"{lacking(scene)}: there the gradient is None"
    if finding.what == "alone" and key.role in ("optimizer_state", "master"):
        return "optimizer", lacking(scene) or ""
    return None


def structure_of(scene: Scene) -> Cause:
    """The cause of a finding with no value difference anywhere behind it."""
    if scene.finding.what == "alone":
        why = f"{lacking(scene)}, and no value differs behind it"
    else:
        why = "in dtype, shape or slot, and no value differs behind it"
    return Cause("structure", None, None, why)


def _how_we_know(scene: Scene, inputs_equal: bool | None, producer: int | None) -> str:
    key = scene.key
    if producer is not None:
        made = scene.pairing.baseline.batch.key_of(producer)
        # Where another part of what was written may be read, the trace cannot tell it from a write.
        or_part = "" if made.shape == key.shape else ", or another part of it is read"
        return (
            f"although {made.boundary} {made.role} {made.slot}, which wrote it, is equal: "
            f"it was overwritten in between{or_part}"
        )
    if inputs_equal:
        return "although its inputs are equal"
    if scene.pairing.rounds.any():
        return "by more than rounding explains; what is recorded before it does not"
    if inputs_equal is False:
        return "and so do its inputs, which lie outside of what was asked for"
    if key.role in ("input", "grad_output"):
        return (
            "although every recorded event before it is equal: an operation that is no boundary "
            "made it"
        )
    return "although every recorded event before it is equal"
