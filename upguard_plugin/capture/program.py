"""The program digest: two runs with equal digests execute the same program.

In:  the models, the command line, the user's `program` text.
Out: one digest over the command, the sources of the script and of every class in the
     models. Output paths, hosts, ports and times are left out, and so are
     UpGuard's own settings: they do not move bits.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from upguard_plugin.capture.names import Models

_DIGEST_BYTES = 16
# Options whose value says where, not what: the same program may run with another one.
_PLACE = re.compile(
    r"(out|output|save|log|logs|tensorboard|wandb|cache|tmp|run|upguard)([-_].*)?|"
    r".*[-_](dir|path|folder|host|hostfile|addr|address|port|rank|file|name)|master.*|rdzv.*|"
    r"local[-_]rank|host.*|port"
)


@dataclass(frozen=True, slots=True)
class Program:
    """What was run."""

    digest: str  # hexadecimal
    sources: Mapping[str, str]  # name of a source file -> digest of its content


def program_of(models: Models, text: str, command: Sequence[str] | None = None) -> Program:
    """The program of this process. command: `sys.argv` of the script, by default this one's."""
    sources = _sources(models)
    arguments = stable_arguments(sys.argv[1:] if command is None else command)
    content = json.dumps([arguments, sources, text], sort_keys=True).encode()
    return Program(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest(), sources)


def stable_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments without options that name places: output directories, hosts, ports."""
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument[2:].partition("=")
            place = _PLACE.fullmatch(name.lower()) is not None
            skipping = place and not equals
            if not place:
                kept.append(argument)
        elif not skipping:
            kept.append(argument)
    return kept


def _sources(models: Models) -> dict[str, str]:
    classes = {type(part) for _, model in models for part in model.modules()}
    found = {cls.__module__ for cls in classes}
    modules = [sys.modules.get(name) for name in sorted(found | {"__main__"})]
    digests = {}
    for module in modules:
        path = _file_of(module)
        if module is not None and path is not None and not _belongs_to_torch(module):
            name = path.name if module.__name__ == "__main__" else module.__name__
            digests[name] = _digest_of(path)
    return digests


def _belongs_to_torch(module: ModuleType) -> bool:
    # torch's own classes are told apart by its version, which the manifest has.
    return module.__name__.partition(".")[0] == "torch"


def _file_of(module: ModuleType | None) -> Path | None:
    try:
        found = inspect.getsourcefile(module) if module is not None else None
    except TypeError:  # a module without a file: an interactive session
        return None
    return Path(found) if found else None


def _digest_of(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()
    except OSError:
        return "unreadable"
