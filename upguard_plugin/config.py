"""One validated, frozen config object, whoever switches UpGuard on.

In:  dicts, JSON or YAML files, environment variables, command-line flags.
Out: an `UpGuardConfig`, or a ConfigError that names the key, where it came from, and the nearest
     right one.

Each source is a layer; a later one wins, field by field: defaults, a framework's own config block,
the file, the environment, a dict given in Python, flags. One switch stands above all: `UPGUARD=0`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from upguard_plugin import config_values as values
from upguard_plugin.config_clashes import clash_of
from upguard_plugin.config_values import Dump, Kind
from upguard_plugin.errors import ConfigError

__all__ = ["Dump", "UpGuardConfig", "environment_switch", "load_config"]

PREFIX = "UPGUARD_"
# Variables that `upguard run` sets for the processes it starts. They are no settings.
LAUNCH_VARIABLES = frozenset({"UPGUARD_CONFIG", "UPGUARD_RUN_ID", "UPGUARD_CPU"})


def _setting(default: object, kind: Kind, text: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text})


@dataclass(frozen=True, slots=True)
class UpGuardConfig:
    """What to record and where. Raises ConfigError for a wrong value or an impossible combination.

    Values are kept in canonical form: `steps` and `ranks` as text ("4-6,10"), globs and roles as
    tuples, `max_bytes` in bytes, `check` as the number of steps from one check to the next.
    """

    enabled: bool = _setting(True, values.BOOL, "record this run")
    output_dir: str = _setting("runs/upguard", values.PATH, "run directory, the same on all ranks")
    level: str = _setting(
        "module", values.LEVEL, "how much: weights and collectives, modules or every operator"
    )
    steps: str | None = _setting(None, values.RANGES, "steps to record; none: every step")
    interval: int = _setting(1, values.POSITIVE, "record steps 0, N, 2N, ...")
    ranks: str | None = _setting(None, values.RANGES, "global ranks to record; none: all")
    modules: tuple[str, ...] = _setting((), values.GLOBS, "modules to record, `!` excludes")
    roles: tuple[str, ...] = _setting((), values.ROLES, "roles to record; none: all")
    phases: tuple[str, ...] = _setting((), values.PHASES, "phases to record; none: all")
    program: str = _setting("", values.TEXT, "text that tells variants of a program apart")
    samples: bool = _setting(False, values.BOOL, "record each sample by itself where known")
    sketch: bool = _setting(False, values.BOOL, "also sketch tensors, to estimate distances")
    dump: Dump | None = _setting(None, values.DUMP, "whole tensors to keep")  # noqa: RUF009 (frozen)
    check: int = _setting(0, values.EVERY, "check invariants online, every N steps")
    weights_in_use: str = _setting("first", values.IN_USE, "hash weights as modules use them")
    max_bytes: int | None = _setting(None, values.BYTES, "stop recording at this size, per rank")
    overwrite: bool = _setting(False, values.BOOL, "replace the run in `output_dir`")

    def __post_init__(self) -> None:
        given = {f.name: (getattr(self, f.name), "UpGuardConfig(...)") for f in fields(self)}
        for name, value in _validated(given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], source: str = "config") -> UpGuardConfig:
        """A config from a dict with field names as keys. `source` names it in errors."""
        return cls(**_validated(_layer(mapping, source)))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> UpGuardConfig:
        """A config from a JSON or YAML file; settings may stand under a key `upguard`."""
        return cls.from_mapping(_read_file(path), str(path))

    def to_mapping(self) -> dict[str, object]:
        """All fields as JSON values; `from_mapping` takes them back."""
        return asdict(self)

    def selected_step(self, step: int) -> bool:
        """Whether `step`, counted from 0 at `enable`, is recorded."""
        return step % self.interval == 0 and values.in_ranges(self.steps, step)

    def selected_rank(self, rank: int) -> bool:
        """Whether this global rank records."""
        return values.in_ranges(self.ranks, rank)

    def selected_module(self, name: str) -> bool:
        """Whether the module of this name is recorded; `*` in a glob also crosses dots."""
        return _selected(self.modules, name)

    def selected_role(self, role: str) -> bool:
        """Whether events of this role are recorded."""
        return not self.roles or role in self.roles


@lru_cache(maxsize=1 << 16)
def _selected(globs: tuple[str, ...], name: str) -> bool:
    include = [g for g in globs if not g.startswith("!")]
    exclude = [g[1:] for g in globs if g.startswith("!")]
    included = not include or any(fnmatchcase(name, g) for g in include)
    return included and not any(fnmatchcase(name, g) for g in exclude)


def load_config(
    argument: UpGuardConfig | Mapping[str, object] | str | os.PathLike[str] | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    block: Mapping[str, object] | None = None,
    block_source: str = "the upguard block",
    environ: Mapping[str, str] = os.environ,
) -> UpGuardConfig:
    """The config that is in force: flags over `argument` over environment over file over `block`.

    argument: what Python code gave; a path is read as the file (the environment wins over it).
    flags: by flag ("--upguard-level") or field name; None means "not given".
    block: the settings found in a framework's own config file.
    With `UPGUARD=0` the result is disabled, and nothing else is read.
    Raises ConfigError.
    """
    if environment_switch(environ) is False:
        return UpGuardConfig(enabled=False)
    path = environ.get("UPGUARD_CONFIG")
    if isinstance(argument, (str, os.PathLike)):
        path, argument = os.fspath(argument), None
    merged = _layer(block or {}, block_source)
    if path is not None:
        merged |= _layer(_read_file(path), path)
    merged |= _environment_layer(environ)
    if isinstance(argument, UpGuardConfig):
        argument = {f.name: getattr(argument, f.name) for f in fields(argument)}
    merged |= _layer(argument or {}, "the config argument")
    merged |= _flag_layer(flags or {})
    return UpGuardConfig(**_validated(merged))


def environment_switch(environ: Mapping[str, str] = os.environ) -> bool | None:
    """What the variable UPGUARD says: on, off, or (None) nothing. Raises ConfigError."""
    text = environ.get("UPGUARD", "")
    if not text:
        return None
    return bool(_parsed("enabled", values.BOOL.from_text(text), "environment variable UPGUARD"))


Layer = dict[str, tuple[Any, str]]  # field name -> value and where it came from


def _layer(mapping: Mapping[str, object], source: str) -> Layer:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"cannot read settings from {source}: expected keys and values")
    for key in mapping:
        if key not in _KINDS:
            name = key if isinstance(key, str) else values.shown(key)
            raise _unknown(name, source, list(_KINDS))
    return {key: (value, source) for key, value in mapping.items()}


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    layer: Layer = {}
    for flag, value in flags.items():
        name = flag.removeprefix("--").removeprefix("upguard-").replace("-", "_")
        if name not in _KINDS:
            raise _unknown(flag, "flags", [f"--{n.replace('_', '-')}" for n in _KINDS])
        if value is not None:
            decoded = _KINDS[name].from_text(value) if isinstance(value, str) else value
            layer[name] = (decoded, f"flag {flag}")
    return layer


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    layer: Layer = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in LAUNCH_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _KINDS or name == "enabled":
            known = [PREFIX + n.upper() for n in _KINDS if n != "enabled"]
            raise _unknown(variable, "the environment", ["UPGUARD", "UPGUARD_CONFIG", *known])
        layer[name] = (_KINDS[name].from_text(text), f"environment variable {variable}")
    switch = environment_switch(environ)
    if switch is not None:
        layer["enabled"] = (switch, "environment variable UPGUARD")
    return layer


def _unknown(key: str, source: str, known: list[str]) -> ConfigError:
    return values.unknown(f"unknown setting {values.shown(key)} in {source}", key, known)


def _validated(given: Layer) -> dict[str, Any]:
    parsed = {name: _parsed(name, value, source) for name, (value, source) in given.items()}
    clash = clash_of(_DEFAULTS | parsed)
    if clash is not None:
        sources = {key: given[key][1] for key in clash.keys if key in given}
        evidence = {
            key: f"{values.shown(given[key][0])} from {source}" for key, source in sources.items()
        }
        raise ConfigError(clash.sentence, evidence=evidence)
    return parsed


def _parsed(name: str, value: object, source: str) -> Any:
    kind = _KINDS[name]
    try:
        return kind.parse(value)
    except ConfigError as error:  # a key inside a nested setting
        raise ConfigError(f"{error.sentence} from {source}", evidence=error.evidence) from None
    except ValueError as error:
        is_large = isinstance(error, values.TooLarge)
        expected = f"no number above {values.LARGEST}" if is_large else kind.expected
        sentence = f"cannot use {name} = {values.shown(value)} from {source}: expected {expected}"
        near = get_close_matches(value if isinstance(value, str) else "", kind.words, 1, 0.5)
        raise ConfigError(sentence, evidence={"nearest": near[0]} if near else None) from None


def _read_file(path: str | os.PathLike[str]) -> Mapping[str, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from None
    content = _parse_text(text, path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"cannot read the config file {path}: expected keys and values")
    block = content.get("upguard", content)
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"cannot use upguard = {values.shown(block)} in {path}: expected keys and values"
        )
    return block


def _parse_text(text: str, path: str | os.PathLike[str]) -> object:
    if Path(path).suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=values.unique_keys)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read the config file {path}: {error}") from None
    import yaml  # slow to load, and only some configs are YAML

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())  # also of dates and keys that Python has not
        raise ConfigError(f"cannot read the config file {path}: {reason}") from None


_KINDS: dict[str, Kind] = {f.name: f.metadata["kind"] for f in fields(UpGuardConfig)}
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(UpGuardConfig)}
