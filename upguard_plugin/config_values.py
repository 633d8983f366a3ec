"""The kinds of values a setting can have: how each is parsed, and what it is when it is right.

In:  a value as found in a dict, a file, a variable or a flag.
Out: the canonical value, or ValueError; `config.py` turns that into a sentence for the user.

Every `parse` takes its own result back unchanged. Text from variables and flags is decoded first by
`from_text`: the text "true" is a bool there, but not in a JSON file, where `true` can be written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from os import PathLike, fspath
from typing import Any

from upguard_plugin import records
from upguard_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """How a setting is parsed, and the words for it in errors and docs."""

    parse: Callable[[Any], Any]  # raises ValueError for what it does not accept
    expected: str
    decode: Callable[[str], object] = str  # text of a variable or flag -> a value for `parse`
    words: tuple[str, ...] = ()  # all values, where there are few

    def from_text(self, text: str) -> object:
        """The value that a variable's or flag's text stands for; the text itself if none."""
        try:
            return self.decode(text)
        except (ValueError, RecursionError):  # also what Python reads no further: deep JSON
            return text


LARGEST = 10**15  # a number above is no step, no rank and no size: it is a slip


_SHOWN = 80  # characters of a value in a sentence


class TooLarge(ValueError):
    """A number above `LARGEST`."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Which tensors are kept whole: those of boundaries that match a glob, in some steps."""

    boundary: str
    steps: str | None = None  # "4-6,10"; None: every recorded step


def shown(value: object) -> str:
    """A value as it stands in a sentence: long ones are cut."""
    try:
        return cut(repr(value))
    except (ValueError, RecursionError):  # Python writes no number of more than 4300 digits
        return "what is too long to be printed"


def cut(text: str) -> str:
    """The beginning of a text, as far as a sentence holds it."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def unknown(sentence: str, word: str, known: Sequence[str]) -> ConfigError:
    """The error for a word that is not known, with the nearest one that is."""
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    evidence = {"nearest": near[0]} if near else {"known": ", ".join(known)}
    return ConfigError(sentence, evidence=evidence)


# Ranges: "4-6,10", "100-" from 100 on.


@lru_cache(maxsize=256)
def range_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """First and last number of each range."""
    pairs = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(-\s*(\d*))?\s*", part, re.ASCII)
        if match is None:
            raise ValueError(part)
        first = _number(match[1])
        last = first if match[2] is None else _number(match[3]) if match[3] else sys.maxsize
        if last < first:
            raise ValueError(part)
        pairs.append((first, last))
    return tuple(pairs)


def in_ranges(text: str | None, number: int) -> bool:
    """Whether the number is in one of the ranges; None holds every number."""
    return text is None or any(first <= number <= last for first, last in range_pairs(text))


def _parse_ranges(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and all(isinstance(part, (int, str)) for part in value):
        return _parse_ranges(",".join(str(_parse_ranges(part)) for part in value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(_not_too_large(value))
    if not isinstance(value, str):
        raise ValueError(value)
    range_pairs(value)
    return re.sub(r"\s", "", value)


# Plain values.


def _parse_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _decode_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _parse_path(value: object) -> str:
    text = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(value)
    return text


def _number(digits: str) -> int:
    if len(digits.lstrip("0")) > len(str(LARGEST)):  # Python itself reads 4300 digits at most
        raise TooLarge(digits)
    return _not_too_large(int(digits[-len(str(LARGEST)) :]))


def _not_too_large(value: int) -> int:
    if value > LARGEST:
        raise TooLarge
    return value


def _parse_positive(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(value)
    return _not_too_large(value)


def _parse_every(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return _not_too_large(int(value))


def _decode_every(text: str) -> object:
    return int(text) if text.strip().isdecimal() else _decode_bool(text)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def _parse_bytes(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)(\.\d+)?\s*([a-z]*)\s*", value.lower(), re.ASCII)
        if match is None or match[3] not in _UNITS:
            raise ValueError(value)
        unit = _UNITS[match[3]]
        value = _number(match[1]) * unit + int(float(match[2] or 0) * unit)
    return _parse_positive(value)


# Lists of words.


def _words_in(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise ValueError(value)
    return tuple(part.strip() for part in parts)


def _parse_globs(value: object) -> tuple[str, ...]:
    globs = _words_in(value) if value != "" else ()
    if any(glob in ("", "!") for glob in globs):
        raise ValueError(value)
    return globs


def _parse_roles(value: object) -> tuple[str, ...]:
    roles = _words_in(value) if value != "" else ()
    for role in roles:
        if role not in records.ROLES:
            raise unknown(f"unknown role {shown(role)} in roles", role, records.ROLES)
    return roles


def _parse_phases(value: object) -> tuple[str, ...]:
    phases = _words_in(value) if value != "" else ()
    for phase in phases:
        if phase not in records.PHASES:
            raise unknown(f"unknown phase {shown(phase)} in phases", phase, records.PHASES)
    return phases


def _one_of(words: Sequence[str]) -> Kind:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError(value)
        return str(value)

    return Kind(parse, f"{', '.join(words[:-1])} or {words[-1]}", words=tuple(words))


# Nested values.


def _parse_dump(value: object) -> Dump | None:
    if value is None:
        return None
    if isinstance(value, Dump):
        value = {"boundary": value.boundary, "steps": value.steps}
    if not isinstance(value, Mapping):
        raise ValueError(value)
    known = [f.name for f in fields(Dump)]
    for key in value:
        if key not in known:
            name = key if isinstance(key, str) else shown(key)
            raise unknown(f"unknown setting {shown(key)} in dump", name, known)
    boundary = value.get("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise ValueError(value)
    return Dump(boundary, _parse_ranges(value.get("steps")))


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; raises ValueError for a key that is given twice, which JSON would drop."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return content


BOOL = Kind(_parse_bool, "true or false", _decode_bool)
PATH = Kind(_parse_path, "a path")
LEVEL = _one_of(records.LEVELS)
RANGES = Kind(_parse_ranges, 'numbers and ranges such as "4-6,10"')
POSITIVE = Kind(_parse_positive, "a whole number of at least 1", int)
GLOBS = Kind(_parse_globs, 'globs such as "blocks.*,!*.dropout", or a list of them')
ROLES = Kind(_parse_roles, 'roles such as "output,grad", or a list of them')
PHASES = Kind(_parse_phases, 'phases such as "forward,backward", or a list of them')
TEXT = Kind(_parse_text, "text")
DUMP = Kind(_parse_dump, '{"boundary": GLOB, "steps": "4-6"}', json.loads)
EVERY = Kind(_parse_every, "true, false, or a number of steps", _decode_every)
IN_USE = _one_of(("first", "all", "off"))
BYTES = Kind(_parse_bytes, 'a size such as 1000000 or "2GiB"')
