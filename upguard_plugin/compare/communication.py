"""What only communication between ranks can have changed: the rules of kind `collective`.

In:  the origin of a divergence, with the steps around it.
Out: its kind and half a sentence that says why; None where no rule applies.
"""

from __future__ import annotations

from collections.abc import Sequence

from upguard_plugin.compare.evidence import (
    Scene,
    equal_producer,
    has_local_gradients,
    is_result_dropped,
    is_stale,
    lacking,
    pairs_of,
)
from upguard_plugin.compare.keys import is_collective
from upguard_plugin.records import EventKey, Stretch
from upguard_plugin.verdict import Kind

_MAX_NAMES = 3  # of the tensors in a buffer that a sentence has


def collective(scene: Scene) -> tuple[Kind, str] | None:
    """The kind of what a collective shows or should have made equal, and why; None: not of one."""
    key, finding = scene.key, scene.finding
    if not is_collective(key):
        return _unsynchronised(scene)
    if finding.what == "alone":
        held = f": its buffer holds {_names(key.holds)}" if key.holds else ""
        return "collective", f"{lacking(scene)}{held}"
    if finding.what == "order":
        return "collective", "in its place: the target runs it later, behind another of its group"
    if finding.what == "form":
        return "collective", _other_call(scene)
    if key.role == "output":
        return "collective", "in its result, with equal inputs on every rank that was compared"
    refilled = _held_otherwise(scene)
    if refilled is not None:
        return "collective", refilled
    launched = pairs_of(scene.pairing, key.boundary, (key.phase,), "input", "launch")
    if key.moment == "completion" and len(launched):
        return "collective", "at completion but not at launch: its input was overwritten in flight"
    if key.phase in ("grad_sync", "param_sync") and has_local_gradients(scene.pairing):
        return "collective", "on its way into the collective: the local gradients are equal"
    return None


def _held_otherwise(scene: Scene) -> str | None:
    """Whose elements a flat buffer holds in each run, where they are not the same tensors'."""
    finding, pairing = scene.finding, scene.pairing
    if finding.baseline_row is None or finding.target_row is None:
        return None
    ours = pairing.baseline.batch.key_of(finding.baseline_row).holds
    theirs = pairing.target.batch.key_of(finding.target_row).holds
    if not ours or not theirs or ours == theirs:
        return None
    # What the baseline put there was put there in the target too.
    verb = "was overwritten by" if equal_producer(scene) is not None else "holds"
    return (
        f"at {scene.key.moment}: its buffer holds {_names(ours)} in the baseline, and {verb} "
        f"{_names(theirs)} in the target"
    )


def _names(holds: Sequence[Stretch]) -> str:
    names = list(dict.fromkeys(stretch.name for stretch in holds))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _unsynchronised(scene: Scene) -> tuple[Kind, str] | None:
    """Gradients and weights that only communication can have changed."""
    key = scene.key
    summed = _summed_elsewhere(scene)
    if summed is not None:
        return "collective", summed
    if scene.finding.what == "form" or scene.world_size < 2:
        return None
    if is_result_dropped(scene):
        return "collective", "with equal inputs: the result of the collective in its call is unused"
    if key.phase == "grad_sync" and key.role in ("grad", "main_grad"):
        if len(pairs_of(scene.pairing, key.boundary, ("accumulate",), None)):
            return "collective", "after the gradients were synchronised, not before"
        if scene.across_layouts and len(pairs_of(scene.pairing, None, ("backward",), None)):
            # A rank has a share of it, which the other run does not have as such.
            return "collective", "after the gradients were synchronised; all that flows is equal"
        return None
    if key.phase == "param_sync":
        return "collective", "after the update was shared between ranks, not before"
    if key.phase != "forward" or key.role != "param":
        return None
    before = scene.steps.pairing(scene.step - 1)
    if before is not None and is_stale(scene, before):
        return "collective", "as it is used here, not as it stood at the start: a stale weight"
    return None


def _summed_elsewhere(scene: Scene) -> str | None:
    """What each run declares of a sum over ranks, where they do not agree."""
    finding, pairing = scene.finding, scene.pairing
    if finding.what != "form" or finding.baseline_row is None or finding.target_row is None:
        return None
    ours = pairing.baseline.batch.key_of(finding.baseline_row).placement
    theirs = pairing.target.batch.key_of(finding.target_row).placement
    if ours is None or theirs is None or ours.partial == theirs.partial:
        return None
    said = [
        f"a partial sum over {', '.join(placement.partial)}" if placement.partial else "complete"
        for placement in (ours, theirs)
    ]
    return f"in what it is declared to be: {said[0]} in the baseline, {said[1]} in the target"


def _other_call(scene: Scene) -> str:
    finding, pairing = scene.finding, scene.pairing
    assert finding.baseline_row is not None and finding.target_row is not None
    ours = pairing.baseline.batch.key_of(finding.baseline_row)
    theirs = pairing.target.batch.key_of(finding.target_row)
    parts = [
        f"{name} {mine} against {other}"
        for name, mine, other in (
            ("op", ours.op, theirs.op),
            ("operator", ours.operator, theirs.operator),
            ("ranks", _ranks(ours), _ranks(theirs)),
            ("dtype", ours.dtype, theirs.dtype),
            ("shape", list(ours.shape), list(theirs.shape)),
        )
        if mine != other
    ]
    return f"in the call: {', '.join(parts)}"


def _ranks(key: EventKey) -> list[int]:
    return [] if key.group is None else list(key.group.ranks)
