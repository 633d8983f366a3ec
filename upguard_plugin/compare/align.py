"""Which event of the baseline is which of the target: order-preserving, never forced.

In:  two sequences of identities (equal number: may be the same event) and, per event, a hint (equal
     number: certainly looks the same; the fingerprint serves).
Out: places in both sequences that pair, in order. What has no partner is left out, and so is what
     could as well have another one: an ambiguous pair is no pair.

Equal sequences pair by position. Otherwise what both have exactly once are anchors, and the windows
between two anchors are matched by dynamic programming. Hints only break ties: they never pair
different identities and never stop equal ones from pairing. In a window that is too large for that,
what both have exactly once by identity and hint are anchors too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

# Cells of the largest window that is matched by dynamic programming: 2048 by 2048 events, 0.1 s.
# Windows between anchors of real traces have at most some 500 events.
MAX_CELLS = 1 << 22


Match = Callable[["Stretch", "Stretch"], tuple[Ints, Ints]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive events of one run."""

    identity: Ints
    hint: Words

    def __len__(self) -> int:
        return len(self.identity)

    def window(self, start: int, stop: int) -> Stretch:
        return Stretch(self.identity[start:stop], self.hint[start:stop])


def align(baseline: Stretch, target: Stretch) -> tuple[Ints, Ints]:
    """Pair two sequences. Returns the places of the pairs, both increasing, in each of them."""
    if np.array_equal(baseline.identity, target.identity):
        places = np.arange(len(baseline), dtype=np.int64)
        return places, places
    head = _same_head(baseline, target)
    tail = _same_tail(baseline, target, head)
    middle = (
        baseline.window(head, len(baseline) - tail),
        target.window(head, len(target) - tail),
    )
    pairs = [(np.arange(head), np.arange(head))]
    anchors = _anchors(middle[0].identity, middle[1].identity)
    pairs += [(b + head, t + head) for b, t in _between(*middle, *anchors, _match)]
    pairs += [
        (np.arange(len(baseline) - tail, len(baseline)), np.arange(len(target) - tail, len(target)))
    ]
    found_b = np.concatenate([b for b, _ in pairs]).astype(np.int64)
    found_t = np.concatenate([t for _, t in pairs]).astype(np.int64)
    sure = ~_disputed(baseline, target, found_b, found_t)
    return found_b[sure], found_t[sure]


def _disputed(baseline: Stretch, target: Stretch, found_b: Ints, found_t: Ints) -> Bools:
    """Which pairs look different although one of the two looks like an event elsewhere.

    That event has no partner, or one that looks different too: it moved, or another was inserted
    and one deleted. Pairs that only exchanged their looks among themselves are not disputed: there
    every event is in its place.
    """
    names_b, names_t = _numbered(baseline, target)
    pairs_b, pairs_t = names_b[found_b], names_t[found_t]
    other = pairs_b != pairs_t
    free_b, free_t = np.ones(len(baseline), np.bool_), np.ones(len(target), np.bool_)
    free_b[found_b[~other]] = free_t[found_t[~other]] = False
    met = np.isin(pairs_b, names_t[free_t]) | np.isin(pairs_t, names_b[free_b])
    disputed: Bools = other & met
    closed = disputed
    while True:
        inner = closed & np.isin(pairs_b, pairs_t[closed]) & np.isin(pairs_t, pairs_b[closed])
        if np.array_equal(inner, closed):
            return disputed & ~closed
        closed = inner


def _numbered(baseline: Stretch, target: Stretch) -> tuple[Ints, Ints]:
    """Equal numbers for equal identity and hint."""
    columns = [
        np.concatenate([baseline.identity, target.identity]).view(np.uint64),
        np.concatenate([baseline.hint, target.hint]),
    ]
    numbers = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return numbers[: len(baseline)], numbers[len(baseline) :]


def _same_head(baseline: Stretch, target: Stretch) -> int:
    """How many events at the start are equal, hint and all."""
    length = min(len(baseline), len(target))
    differs = (baseline.identity[:length] != target.identity[:length]) | (
        baseline.hint[:length] != target.hint[:length]
    )
    return int(differs.argmax()) if differs.any() else length


def _same_tail(baseline: Stretch, target: Stretch, head: int) -> int:
    """How many events at the end are equal, not counting the first `head`."""
    rest = min(len(baseline), len(target)) - head
    return _same_head(
        Stretch(baseline.identity[::-1][:rest], baseline.hint[::-1][:rest]),
        Stretch(target.identity[::-1][:rest], target.hint[::-1][:rest]),
    )


def _between(
    baseline: Stretch, target: Stretch, anchors_b: Ints, anchors_t: Ints, match: Match
) -> list[tuple[Ints, Ints]]:
    """The anchors, and what pairs in the windows between two of them."""
    stops_b = [*anchors_b.tolist(), len(baseline)]
    stops_t = [*anchors_t.tolist(), len(target)]
    pairs = []
    start_b = start_t = 0
    for stop_b, stop_t in zip(stops_b, stops_t, strict=True):
        if start_b < stop_b and start_t < stop_t:
            found_b, found_t = match(
                baseline.window(start_b, stop_b), target.window(start_t, stop_t)
            )
            pairs.append((found_b + start_b, found_t + start_t))
        if stop_b < len(baseline):
            pairs.append((np.array([stop_b]), np.array([stop_t])))
        start_b, start_t = stop_b + 1, stop_t + 1
    return pairs


def _anchors(baseline: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Places of what both have exactly once, and what certainly keeps its order in both."""
    once_b, at_b = _once(baseline)
    once_t, at_t = _once(target)
    _, in_b, in_t = np.intersect1d(once_b, once_t, assume_unique=True, return_indices=True)
    by_place = np.argsort(at_b[in_b])
    places_b, places_t = at_b[in_b][by_place], at_t[in_t][by_place]
    chain = _in_every_longest_chain(places_t)
    return places_b[chain], places_t[chain]


def _once(identity: Ints) -> tuple[Ints, Ints]:
    values, first, counts = np.unique(identity, return_index=True, return_counts=True)
    return values[counts == 1], first[counts == 1]


def _in_every_longest_chain(places: Ints) -> Ints:
    """Indices that all longest increasing subsequences contain (patience sorting, both ways)."""
    if len(places) < 2 or bool((np.diff(places) > 0).all()):
        return np.arange(len(places), dtype=np.int64)
    ending = _chain_lengths(places.tolist())
    starting = _chain_lengths((-places[::-1]).tolist())[::-1]
    longest = int(ending.max())
    in_some = np.flatnonzero(ending + starting == longest + 1)
    rivals = np.bincount(ending[in_some], minlength=longest + 1)
    certain: Ints = in_some[rivals[ending[in_some]] == 1]
    return certain


def _chain_lengths(places: list[int]) -> Ints:
    """Length of the longest increasing subsequence that ends at each place."""
    ends: list[int] = []  # smallest last value of a chain of each length
    lengths = np.empty(len(places), dtype=np.int64)
    for index, place in enumerate(places):
        length = bisect_left(ends, place)
        ends[length : length + 1] = [place]
        lengths[index] = length + 1
    return lengths


def _is_too_large(baseline: Stretch, target: Stretch) -> bool:
    return (len(baseline) + 1) * (len(target) + 1) > MAX_CELLS


def _by_hints(baseline: Stretch, target: Stretch) -> tuple[Ints, Ints]:
    """A large window, with anchors that both have exactly once by identity and hint together."""
    none = np.empty(0, dtype=np.int64)
    anchors = _anchors(*_numbered(baseline, target))

    def match_small(left: Stretch, right: Stretch) -> tuple[Ints, Ints]:
        return (none, none) if _is_too_large(left, right) else _match(left, right)

    pairs = [(none, none), *_between(baseline, target, *anchors, match_small)]
    return np.concatenate([b for b, _ in pairs]), np.concatenate([t for _, t in pairs])


def _match(baseline: Stretch, target: Stretch) -> tuple[Ints, Ints]:
    """The pairs that every best match of a window contains.

    Best: the most pairs of equal identity, where three whose hints differ are worth as much as two
    whose hints are equal.
    """
    if np.array_equal(baseline.identity, target.identity):
        places = np.arange(len(baseline), dtype=np.int64)
        # Too large a window keeps its order: what is disputed in it is left out in the end.
        if _is_too_large(baseline, target) or not _disputed(baseline, target, places, places).any():
            return places, places
    if _is_too_large(baseline, target):
        return _by_hints(baseline, target)
    gain = _gains(baseline, target)
    upto = _best_upto(gain)
    beyond = _best_upto(gain[::-1, ::-1])[::-1, ::-1]
    best = upto[-1, -1]
    on_path = (gain > 0) & (upto[:-1, :-1] + gain + beyond[1:, 1:] == best)
    # An event that some best match leaves alone is not certain of its partner.
    idle_b = ((upto[:-1, :] + beyond[1:, :]) == best).any(axis=1)
    idle_t = ((upto[:, :-1] + beyond[:, 1:]) == best).any(axis=0)
    certain = on_path & ~idle_b[:, None] & ~idle_t[None, :]
    certain &= (on_path.sum(axis=1) == 1)[:, None] & (on_path.sum(axis=0) == 1)[None, :]
    found_b, found_t = np.nonzero(certain)
    return found_b.astype(np.int64), found_t.astype(np.int64)


def _gains(baseline: Stretch, target: Stretch) -> npt.NDArray[np.int32]:
    """What pairing each two events is worth: [baseline, target]."""
    same = baseline.identity[:, None] == target.identity[None, :]
    hinted = same & (baseline.hint[:, None] == target.hint[None, :])
    gains: npt.NDArray[np.int32] = same * np.int32(2) + hinted.astype(np.int32)
    return gains


def _best_upto(gain: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """best[i, j]: what the first i events of the baseline and j of the target are worth at most."""
    best = np.zeros((gain.shape[0] + 1, gain.shape[1] + 1), dtype=np.int32)
    for i in range(gain.shape[0]):
        diagonal = np.maximum(best[i, 1:], best[i, :-1] + gain[i])
        best[i + 1, 1:] = np.maximum.accumulate(diagonal)
    return best
