"""The files of `--ignore`, `--map` and `--place`: YAML, one list of rules under one name.

In:  a path, the name of the list, and which fields a rule may have.
Out: the rules as plain texts. Whatever the file holds, only `UsageError` comes out.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from upguard_plugin.errors import UsageError

MAX_BYTES = 1 << 20  # a file of rules that people write


def read_rules(
    path: Path, option: str, name: str, fields: Mapping[str, bool]
) -> list[dict[str, tuple[str, ...]]]:
    """The rules of a file, each field as a tuple of texts.

    fields: the fields of a rule; True where it must be there.
    """
    rules = _loaded(path, option)
    if not isinstance(rules, dict) or list(rules) != [name] or not isinstance(rules[name], list):
        raise _bad(path, option, f"it is not a list of rules under the name {name!r}")
    return [_rule(path, option, number, rule, fields) for number, rule in enumerate(rules[name], 1)]


def one_of(
    path: Path, option: str, number: int, field: str, word: str, known: Collection[str]
) -> str:
    """The word, if it is known."""
    if word in known:
        return word
    near = difflib.get_close_matches(word, list(known), 1)
    meant = f" (is {near[0]!r} meant?)" if near else ""
    raise _bad(path, option, f"{field} of rule {number} does not know {word!r}{meant}")


def _loaded(path: Path, option: str) -> Any:
    import yaml  # slow to load

    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _bad(path, option, (error.strerror or "it is no file").lower()) from None
    if len(data) > MAX_BYTES:
        raise _bad(path, option, f"it has more than {MAX_BYTES} bytes")
    try:
        return yaml.safe_load(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad(path, option, "it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise _bad(path, option, f"it is not YAML{where}") from None
    except (ValueError, TypeError, RecursionError):  # dates and keys that Python has not
        raise _bad(path, option, "it is not a list of rules") from None


def _rule(
    path: Path, option: str, number: int, rule: Any, fields: Mapping[str, bool]
) -> dict[str, tuple[str, ...]]:
    if not isinstance(rule, dict):
        raise _bad(path, option, f"rule {number} is not a list of fields ({', '.join(fields)})")
    for field in rule:
        one_of(path, option, number, "the field names", str(field), fields)
    for field, needed in fields.items():
        if needed and field not in rule:
            raise _bad(path, option, f"rule {number} has no {field}")
    return {
        field: _texts(path, option, f"{field} of rule {number}", value)
        for field, value in rule.items()
    }


def _texts(path: Path, option: str, what: str, value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise _bad(path, option, f"{what} is no text and no list of texts")
    return tuple(text.strip() for text in texts)


def _bad(path: Path, option: str, why: str) -> UsageError:
    return UsageError(f"cannot use {path} for {option}: {why}", remedy="docs/comparing.md")
