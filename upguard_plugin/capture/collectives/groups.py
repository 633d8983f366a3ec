"""Process groups: their names, members, and the numbers of what happens in them.

In:  the ProcessGroup that a collective runs in.
Out: its `Group`, one object per group, and sequence numbers that are the same on all members as
     long as they call the same collectives in the same order. Nothing is communicated.

A group's identity is its rank list: two groups with the same members count together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from upguard_plugin.records import Group

_MESH_PREFIX = "mesh_"  # how torch describes the group of a dim of a DeviceMesh


@dataclass(frozen=True, slots=True)
class Member:
    """This process in a group."""

    group: Group
    index: int  # its place in `group.ranks`
    size: int

    def global_rank(self, index: int) -> int:
        """The global rank of a member; its index where the members are not known."""
        return self.group.ranks[index] if 0 <= index < len(self.group.ranks) else index


class Groups:
    """All process groups that were seen."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], str] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        # Weak: a group that is destroyed must not live on here.
        self._members: WeakKeyDictionary[ProcessGroup, Member] = WeakKeyDictionary()
        self._collectives: Counter[tuple[int, ...]] = Counter()
        self._pairs: Counter[tuple[tuple[int, ...], int, int, int]] = Counter()

    def name(self, ranks: Sequence[int], name: str) -> None:
        """Give the group with these global ranks a name, such as "dp"; it comes before torch's."""
        self._names[tuple(ranks)] = name
        self._members.clear()

    def member(self, process_group: ProcessGroup) -> Member:
        """This process's place in a group."""
        member = self._members.get(process_group)
        if member is None:
            member = self._members[process_group] = self._find(process_group)
        return member

    def next_collective(self, group: Group) -> int:
        """Number a collective of the group, from 0."""
        self._collectives[group.ranks] += 1
        return self._collectives[group.ranks] - 1

    def next_message(self, group: Group, source: int, destination: int, tag: int) -> int:
        """Number a message from one rank to another with this tag, from 0."""
        pair = (group.ranks, source, destination, tag)
        self._pairs[pair] += 1
        return self._pairs[pair] - 1

    def _find(self, process_group: ProcessGroup) -> Member:
        try:
            ranks = tuple(dist.get_process_group_ranks(process_group))
        except (KeyError, RuntimeError, ValueError):
            ranks = ()  # made without torch.distributed's register: its members are not known
        key = (self._names.get(ranks) or _torch_name(process_group, ranks), ranks)
        group = self._groups.setdefault(key, Group(*key))
        return Member(group, process_group.rank(), process_group.size())


def _torch_name(process_group: ProcessGroup, ranks: tuple[int, ...]) -> str:
    description = process_group.group_desc
    if description.startswith(_MESH_PREFIX):
        return description.removeprefix(_MESH_PREFIX)
    if ranks and ranks == tuple(range(dist.get_world_size())):  # else there may be no world
        return "world"
    if description and description != "undefined":
        return description
    # torch numbers groups as they are made: one more in one of two runs would rename all others.
    return f"ranks {_in_short(ranks)}" if ranks else f"group {process_group.group_name}"


def _in_short(ranks: tuple[int, ...]) -> str:
    """ "0,2", "0-7", "0,8..120": many ranks by their first, the distance and the last."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and ranks == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{first},{ranks[1]}..{last}"
