"""From an origin and its cause to the words and numbers of a verdict."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.causes import Cause
from upguard_plugin.compare.changes import change_of, sentence_of
from upguard_plugin.compare.evidence import Scene
from upguard_plugin.compare.pairing import Pairing
from upguard_plugin.compare.ranks import Origin
from upguard_plugin.compare.references import event_ref, group_ref, or_none, source_ref
from upguard_plugin.compare.sides import Side
from upguard_plugin.fingerprint.sketch import EPSILON
from upguard_plugin.verdict import Divergence
from upguard_plugin.verdict_parts import Distance, ElementDiff, Held, TensorSide

Floats = npt.NDArray[np.float64]


def divergence(
    origin: Origin, scene: Scene, cause: Cause, elements: ElementDiff | None = None
) -> Divergence:
    """One divergence as the verdict gives it."""
    finding, pairing = scene.finding, scene.pairing
    side, row = finding.seen_by(pairing)
    key, batch = side.batch.key_of(row), side.batch
    return Divergence(
        step=origin.seen.step,
        microbatch=or_none(int(batch.microbatch[row])),
        phase=key.phase,
        kind=cause.kind,
        boundary=key.boundary,
        operator=key.operator,
        role=key.role,
        slot=key.slot,
        call=int(batch.call[row]),
        ranks=list(origin.ranks),
        iteration=batch.iteration,
        moment=key.moment,
        inputs_equal=cause.inputs_equal,
        group=group_ref(batch, row),
        baseline=_tensor(pairing.baseline, finding.baseline_row),
        target=_tensor(pairing.target, finding.target_row),
        distance=_distance(scene),
        elements=elements,
        producer=None
        if cause.producer is None
        else event_ref(pairing.baseline.batch, cause.producer, origin.seen.rank),
        source=source_ref(key),
        change=change_of(scene, origin.seen.rank),
        explanation=_explanation(scene, cause),
    )


def _tensor(side: Side, row: int | None) -> TensorSide | None:
    if row is None:
        return None
    key = side.batch.key_of(row)
    value = None if side.batch.value is None else float(side.batch.value[row])
    return TensorSide(
        dtype=key.dtype,
        shape=list(key.shape),
        fingerprint=f"{int(side.batch.h[row]):016x}",
        value=None if value is None or np.isnan(value) else value,
        holds=[Held.of(stretch) for stretch in key.holds],
    )


def _distance(scene: Scene) -> Distance | None:
    row_b, row_t = scene.finding.baseline_row, scene.finding.target_row
    if row_b is None or row_t is None or scene.finding.what != "value":
        return None
    return distance_between(scene.pairing, row_b, row_t)


def distance_between(pairing: Pairing, row_b: int, row_t: int) -> Distance | None:
    """From both sketches, which are linear: the sketch of a difference is their difference."""
    sketch_b, sketch_t = pairing.baseline.batch.sketch, pairing.target.batch.sketch
    if sketch_b is None or sketch_t is None or sketch_b.shape[1] != sketch_t.shape[1]:
        return None
    size = float(np.linalg.norm(sketch_b[row_b]))
    apart = float(np.linalg.norm(sketch_b[row_b] - sketch_t[row_t]))
    if not np.isfinite(apart) or not size > 0:
        return None
    epsilon = EPSILON.get(pairing.baseline.batch.key_of(row_b).dtype)
    relative = apart / size
    return Distance(
        relative_l2=relative,
        in_eps=None if epsilon is None else relative / epsilon,
        estimated=True,
        factor=_factor(sketch_b[row_b], sketch_t[row_t], epsilon),
    )


def _factor(baseline: Floats, target: Floats, epsilon: float | None) -> float | None:
    """The number by which all elements were multiplied, if that is all that happened to them."""
    factor = float(baseline @ target) / float(baseline @ baseline)
    rest = float(np.linalg.norm(target - factor * baseline))
    if epsilon is None or factor == 1 or not rest <= epsilon * float(np.linalg.norm(target)):
        return None
    return float(f"{factor:.6g}") if factor else None


def _explanation(scene: Scene, cause: Cause) -> str:
    """One sentence: what differs, and how we know that it starts there."""
    key, chain = scene.key, scene.finding.chain
    if chain is not None and chain.how is not None:
        return sentence_of(scene, chain)
    what = {
        "param": "weight",
        "buffer": "buffer",
        "grad": "gradient of",
        "main_grad": "main gradient of",
        "master": "master weight of",
        "optimizer_state": f"optimizer state {key.slot} of",
        "rng": "random state" if key.boundary.startswith("rng.") else f"random state {key.slot} of",
        "data": "batch",
        "sample": f"sample {key.slot} of",
        "scalar": "scalar",
    }.get(key.role, f"{key.role} {key.slot} of")
    if key.op is not None:
        what = f"{key.op}: {what}"
    verb = "" if scene.finding.what == "alone" else "differs "
    distance = _distance(scene)
    if distance is not None and distance.factor is not None:
        verb = f"is {distance.factor:g} times the baseline's "
    return f"The {what} {key.boundary} {verb}{cause.why}."
