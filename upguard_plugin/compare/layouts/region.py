"""What compare asks of a pair of logical runs before and after it has looked at their steps."""

from __future__ import annotations

from upguard_plugin.compare.describe import event_ref
from upguard_plugin.compare.layouts.logical import LOGICAL_RANK, LogicalPair
from upguard_plugin.compare.noise import Repeat
from upguard_plugin.compare.steps import RankSteps, steps_behind
from upguard_plugin.verdict import Tainted, Verdict


def matched(pair: LogicalPair) -> Repeat:
    """Both runs of the pair as runs of one rank, step by step."""
    views = pair.views()
    lag = steps_behind(*views, LOGICAL_RANK)
    steps = RankSteps(*views, LOGICAL_RANK, lag)
    partners = ((step, steps.partner(step)) for step in map(int, steps.common))
    pair.match({step: other for step, other in partners if other is not None})
    return views


def tainted(pair: LogicalPair, verdict: Verdict) -> Tainted | None:
    """The region in which sums were taken in another order, if one begins before a divergence."""
    origin, farthest = pair.taint.origin, pair.taint.farthest
    num_events = verdict.coverage.tainted
    if origin is None or (verdict.verdict == "divergent" and not num_events):
        return None
    batch = pair.events(0, origin.step).batch
    found = {
        "from": event_ref(batch, origin.row, origin.event.ranks[0]),
        "boundaries": num_events,
        "largest_in_eps": farthest[0].in_eps if farthest else 0.0,
    }
    return Tainted.model_validate(found)  # "from" is no name for an argument
