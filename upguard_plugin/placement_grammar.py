"""The text of a placement and what it says, before any tensor is known.

In:  "(2 f[tp]) h +cp", the grammar of docs/placements.md.
Out: a `PlacementSpec`: views of dims, each with the axes that split it. No sizes are checked here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from upguard_plugin.errors import PlacementError

RANK_ORDER = "rank"
ZIGZAG = "zigzag"  # rank r of n holds chunks r and 2n-1-r of 2n: causal attention, evenly loaded


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis that splits a dim."""

    axis: str
    order: str = RANK_ORDER
    sizes: tuple[int, ...] | None = None  # of each rank's part; None: equal parts
    range: tuple[int, int] | None = None  # this rank's start and end, where it is said outright


@dataclass(frozen=True, slots=True)
class DimSpec:
    """A dim of the logical tensor, or one of several that are fused into it."""

    name: str
    size: int | None = None  # where it is written as a number
    splits: tuple[Split, ...] = ()  # outer first
    real: int | None = None  # less than the padded size


@dataclass(frozen=True, slots=True)
class View:
    """How one tensor is a part of another: its dims in order, each a tuple of fused dims."""

    terms: tuple[tuple[DimSpec, ...] | None, ...]  # None is `*`: any number of unsplit dims


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """A parsed placement."""

    text: str
    views: tuple[View, ...]  # outer first
    partial: tuple[str, ...] = ()
    mesh: str = "dense"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split the tensor, in the order of the text."""
        dims = [dim for view in self.views for term in view.terms if term for dim in term]
        return tuple(split.axis for dim in dims for split in dim.splits)


_TOKEN = re.compile(r"\s*(?:([A-Za-z_]\w*)|(\d+)|([()\[\],:~*+@|]))")


def parse_placement(text: str) -> PlacementSpec:
    """Read a placement. Raises PlacementError that shows the text and the place of the mistake."""
    return _Parser(text).spec()


class _Parser:
    """One method for each rule of the grammar; `_next` is the token to be read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                at = position + len(text[position:]) - len(text[position:].lstrip())
                raise self._error(f"{text[at]!r} has no meaning here", at)
            self._tokens.append((match[0].strip(), match.end() - len(match[0].strip())))
            position = match.end()
        self._tokens.append(("", end))
        self._index = 0

    def spec(self) -> PlacementSpec:
        views, partial, mesh = [], [], "dense"
        while True:
            views.append(self._view())
            while self._next in ("+", "@"):
                if self._accept("+"):
                    partial.append(self._name("an axis"))
                else:
                    self._expect("@")
                    mesh = self._name("the mesh")
                    if mesh != "expert":
                        raise self._error(f"unknown mesh {mesh!r}: only @expert can be named")
            if not self._accept("|"):
                break
        if self._next:
            raise self._error(f"{self._next!r} has no meaning here")
        spec = PlacementSpec(self._text, tuple(views), tuple(partial), mesh)
        named = [*spec.axes, *partial]
        twice = next((axis for axis in named if named.count(axis) > 1), None)
        if twice:
            raise PlacementError(
                f"cannot read placement {self._text!r}: axis {twice} is named more than once",
                remedy="an axis splits one dim, or holds partial sums, once",
            )
        return spec

    def _view(self) -> View:
        terms: list[tuple[DimSpec, ...] | None] = []
        while self._next not in ("", "|", "+", "@"):
            if self._accept("*"):
                if None in terms:
                    raise self._error("only one '*' can stand in a view")
                terms.append(None)
            elif self._accept("("):
                fused = [self._dim()]
                while not self._accept(")"):
                    if not self._next:
                        raise self._error("')' is missing")
                    fused.append(self._dim())
                terms.append(tuple(fused))
            else:
                terms.append((self._dim(),))
        return View(tuple(terms))

    def _dim(self) -> DimSpec:
        size = self._number() if self._next.isdigit() else None
        name = str(size) if size is not None else self._name("a dim")
        splits: list[Split] = []
        if self._accept("["):
            splits.append(self._split())
            while self._accept(","):
                splits.append(self._split())
            self._expect("]")
        real = self._number() if self._accept("~") else None
        return DimSpec(name, size, tuple(splits), real)

    def _split(self) -> Split:
        axis = self._name("an axis")
        if self._accept("@"):
            start = self._number()
            self._expect(":")
            return Split(axis, range=(start, self._number()))
        if not self._accept(":"):
            return Split(axis)
        if not self._next.isdigit():
            order = self._name("an order")
            if order != ZIGZAG:
                raise self._error(
                    f"unknown order {order!r}: write zigzag, or the size of each part"
                )
            return Split(axis, order)
        sizes = [self._number()]
        while self._next == "," and self._tokens[self._index + 1][0].isdigit():
            self._expect(",")
            sizes.append(self._number())
        return Split(axis, sizes=tuple(sizes))

    @property
    def _next(self) -> str:
        return self._tokens[self._index][0]

    def _accept(self, token: str) -> bool:
        if self._next != token:
            return False
        self._index += 1
        return True

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise self._error(f"{token!r} is missing")

    def _name(self, what: str) -> str:
        token = self._next
        if not token.isidentifier():
            raise self._error(f"{what} is missing")
        self._index += 1
        return token

    def _number(self) -> int:
        token = self._next
        if not token.isdigit():
            raise self._error("a number is missing")
        self._index += 1
        return int(token)

    def _error(self, what: str, at: int | None = None) -> PlacementError:
        at = self._tokens[self._index][1] if at is None else at
        return PlacementError(
            f"cannot read placement {self._text!r}: {what}",
            evidence={"at": f"character {at + 1}, after {self._text[:at]!r}"},
            remedy="the grammar is in docs/placements.md",
        )
