"""The logical events of a step, without their values.

In:  the holdings of all ranks in a step, and the units of its micro-batches.
Out: a `MergePlan`: for each name its `About`, and which rows of the holdings' columns are added up.

parts.py says how the holdings of one name make a whole; merge.py does it with the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.layouts.held import WholePlan
from upguard_plugin.compare.layouts.holdings import (
    GRADIENTS,
    STATES,
    Holding,
    Ints,
    Seen,
    What,
)
from upguard_plugin.compare.layouts.parts import Assembly, assembly_of
from upguard_plugin.compare.layouts.samples import is_of_a_sample, slot_in_unit, why_not_whole
from upguard_plugin.compare.layouts.shares import is_share, shares_of
from upguard_plugin.compare.layouts.stages import Place as Stage
from upguard_plugin.compare.layouts.sums import Sizes
from upguard_plugin.compare.layouts.units import SideUnits, Units
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import NONE

Words = npt.NDArray[np.uint64]

_ENDS = {"input": min, "grad_input": min, "output": max, "grad_output": max}  # role -> its stage
_BACKWARD = ("backward", "recompute", "accumulate")
_OUTSIDE = ("start", "clip", "optimizer")  # phases that may lie outside of micro-batches

Name = tuple[What, int, int]  # and unit, call
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a logical event without its values."""

    name: Name
    key: EventKey  # with the logical shape, without a placement
    order: Order  # where it stands in a step of a run on one rank, but for the program order
    ranks: tuple[int, ...]  # that hold a part or a replica
    sums: Sizes  # sizes of the sums over ranks that went into it
    dims: tuple[str, ...] = ()  # their names in the placement
    num_shares: int = 1  # numbers that are added up


@dataclass(frozen=True, slots=True)
class Share:
    """A name whose numbers are added up."""

    event: int
    shares: Sequence[Sequence[int]]  # replicas of each
    as_tensor: About  # what it is where it has no number


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Holdings in groups, each in order of the ranks."""

    members: Ints  # group by group
    starts: Ints  # where each group begins among them

    @classmethod
    def made(cls, groups: Sequence[Sequence[int]]) -> Groups:
        sizes = np.array([len(group) for group in groups], np.int64)
        members = np.fromiter((one for group in groups for one in group), np.int64, sizes.sum())
        return cls(members, np.cumsum(sizes) - sizes)

    @property
    def lead(self) -> Ints:
        """The first of each group."""
        return self.members[self.starts]

    @property
    def number(self) -> Ints:
        """Of each member's group."""
        sizes = np.diff(self.starts, append=len(self.members))
        return np.repeat(np.arange(len(self.starts)), sizes)

    def of(self, group: int) -> list[int]:
        """The members of one group."""
        stop = self.starts[group + 1] if group + 1 < len(self.starts) else None
        listed: list[int] = self.members[self.starts[group] : stop].tolist()
        return listed


@dataclass(frozen=True, slots=True, eq=False)
class MergePlan:
    """One row per name in `abouts`, `first`, `starts` and `order`."""

    abouts: tuple[About, ...]
    order: Ints  # [names, 5]: `About.order`
    first: Ints  # the holding of each name that is first
    starts: Ints  # where the pieces of each name begin
    pieces: Groups  # the replicas of each piece
    factor: Words  # of each piece, so that summands cannot be exchanged
    shares: Sequence[Share]
    assemblies: Mapping[int, Assembly]  # of names that perhaps make up no whole
    early: Mapping[int, str]  # names that cannot be merged, whatever their parts make up
    accumulated: Groups  # the replicas of gradients that are being accumulated
    accumulating: Sequence[int]  # the name of each of these groups
    partial: frozenset[int]  # names of partial sums
    left_out: Mapping[Name, str]  # what is no part of a tensor


def merge_plan(whole: WholePlan, units: Units, side: int) -> MergePlan:
    """How the holdings of a run make up its logical events. side: 0 for the baseline, else 1."""
    own = units.sides[side]
    found: dict[Name, list[int]] = {}
    for number, holding in enumerate(whole.holdings):
        found.setdefault(_name(holding.seen, own), []).append(number)
    left_out = {_name(seen, own): reason for seen, reason in whole.left_out.items()}
    num_each = num_microbatches(own)
    planner = _Planner(whole.holdings, units, (num_each,) if num_each > 1 else ())
    for name, numbers in found.items():
        planner.add(name, numbers)
    return planner.planned(left_out)


def num_microbatches(units: SideUnits) -> int:
    """How many micro-batches each rank has."""
    return len({microbatch for _, microbatch in units.number if microbatch != NONE})


def _name(seen: Seen, units: SideUnits) -> Name:
    what, (_, microbatch) = seen.what, seen.place
    is_state = what[2] in STATES and what[0] != "accumulate"
    if is_state or (microbatch == NONE and what[0] in _OUTSIDE):
        return what, microbatch, seen.call
    slot = slot_in_unit(seen, units)
    if slot != what[3]:
        what = (*what[:3], slot, what[4])
    return what, units.number[seen.place], seen.call


class _Planner:
    def __init__(self, holdings: Sequence[Holding], units: Units, summed: Sizes) -> None:
        """summed: how many micro-batches a gradient is the sum of, where there are several."""
        self._holdings, self._units, self._summed = holdings, units, summed
        self._abouts: list[About] = []
        self._first: list[int] = []
        self._starts: list[int] = []
        self._pieces: list[Sequence[int]] = []
        self._factor: list[int] = []
        self._shares: list[Share] = []
        self._assemblies: dict[int, Assembly] = {}
        self._early: dict[int, str] = {}
        self._accumulated: list[Sequence[int]] = []
        self._accumulating: list[int] = []
        self._partial: set[int] = set()

    def planned(self, left_out: Mapping[Name, str]) -> MergePlan:
        return MergePlan(
            tuple(self._abouts),
            np.array([about.order for about in self._abouts], np.int64).reshape(-1, 5),
            np.array(self._first, np.int64),
            np.array(self._starts, np.int64),
            Groups.made(self._pieces),
            np.array(self._factor, np.uint64),
            self._shares,
            self._assemblies,
            self._early,
            Groups.made(self._accumulated),
            self._accumulating,
            frozenset(self._partial),
            left_out,
        )

    def add(self, name: Name, found: Sequence[int]) -> None:
        event = len(self._abouts)
        self._look_early(event, name, found)
        found = self._at_its_end(name, found)
        assembly = assembly_of(found, self._holdings)
        if assembly.reason or assembly.unsketched or assembly.unequal:
            self._assemblies[event] = assembly
        self._first.append(found[0])
        self._starts.append(len(self._pieces))
        for summand, replicas in assembly.pieces:
            self._pieces.append(replicas)
            self._factor.append(2 * summand + 1)
        about = self._about(name, found, assembly)
        if is_share(self._holdings[found[0]].key):
            shares = shares_of(found, self._holdings)
            self._shares.append(Share(event, shares, about))
            about = self._about_sum(name, found, len(shares))
        self._abouts.append(about)

    def _look_early(self, event: int, name: Name, found: Sequence[int]) -> None:
        """What stands in the way before it is asked how the parts make a whole."""
        (phase, _, role, slot, _), unit, _ = name
        parts = [self._holdings[number] for number in found]
        if unit != NONE and not is_of_a_sample(role, slot) and not is_share(parts[0].key):
            reason = why_not_whole(parts, unit in self._units.joined, unit in self._units.in_line)
            if reason is not None:
                self._early[event] = reason
        if phase == "accumulate":
            self._look_at_replicas(event, found)

    def _look_at_replicas(self, event: int, found: Sequence[int]) -> None:
        pieces: dict[object, list[int]] = {}
        for number in found:
            placement = self._holdings[number].key.placement
            held = None if placement is None else placement.pieces
            pieces.setdefault(held, []).append(number)
        self._accumulated.extend(pieces.values())
        self._accumulating.extend([event] * len(pieces))
        placement = self._holdings[found[0]].key.placement
        if placement is not None and placement.partial:
            self._partial.add(event)

    def _at_its_end(self, name: Name, found: Sequence[int]) -> Sequence[int]:
        """What enters or leaves a module that is cut into stages, as the model or its decoder."""
        end = _ENDS.get(name[0][2])
        if end is None:
            return found
        stage = end(self._holdings[number].stage for number in found)
        return [number for number in found if self._holdings[number].stage == stage]

    def _about(self, name: Name, found: Sequence[int], assembly: Assembly) -> About:
        (phase, boundary, role, slot, _), unit, _ = name
        parts = [self._holdings[number] for number in found]
        sums = min(parts, key=lambda part: (-len(part.sums), part.sums_at)).sums
        if assembly.num_summands > 1:
            sums = (*sums, assembly.num_summands)
        if role in GRADIENTS and phase in ("grad_sync", "clip"):
            sums = (*sums, *self._summed)
        return About(
            name,
            _logical_key(parts[0].key, phase, boundary, slot, assembly.shape),
            _order(phase, unit, parts[0].stage),
            tuple(sorted({rank for part in parts for rank in part.ranks})),
            sums,
            assembly.dims,
        )

    def _about_sum(self, name: Name, found: Sequence[int], num_shares: int) -> About:
        """Of a number: it is complete, whatever shares ranks have of it."""
        shape = self._holdings[found[0]].key.shape
        about = self._about(name, found, Assembly(shape, (), ()))
        return replace(about, num_shares=num_shares)


@lru_cache(maxsize=1 << 16)
def _logical_key(
    key: EventKey, phase: str, boundary: str, slot: str, shape: tuple[int, ...]
) -> EventKey:
    return replace(
        key, phase=phase, boundary=boundary, slot=slot, shape=shape,
        placement=None, group=None, op=None,
    )  # fmt: skip


def _order(phase: str, unit: int, stage: Stage) -> Order:
    """Where the event stands in the step of a run on one rank: stages in line."""
    place = (stage.chunk, stage.stage)
    if phase == "start":
        return (0, 0, 0, *place)
    if unit != NONE or phase in ("forward", "eval"):
        if phase in _BACKWARD:
            place = (-place[0], -place[1])
        return (1, max(unit, 0), int(phase in _BACKWARD), *place)
    return (2, 0, 0, *place)
