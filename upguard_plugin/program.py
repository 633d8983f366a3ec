"""Which program a run is: its command, its sources, and one digest of both.

Two runs of one program may lie in other directories and use other hosts, ports and times; the
digest leaves these out, and UpGuard's own settings. It takes everything else: where it cannot tell
whether an option moves bits, it says that the programs differ.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import itertools
import json
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REDACTED = "<redacted>"

# Words in the names of settings, as `_words` splits them.
_SECRET_WORDS = {"secret", "password", "passwd", "pwd", "passphrase", "credential", "credentials"}
_SECRET_PAIRS = {"api key", "access key", "private key", "auth token", "access token"}
# Not always secret (`--pad-token`): redacted where shown, but part of the program.
_DOUBTFUL_LAST_WORDS = {"key", "token", "auth", "pat"}
_PLACE_WORDS = {"dir", "path", "file", "folder", "directory", "root", "to", "name"}
_OUTPUT_WORDS = {"output", "out", "save", "log", "logs", "logging", "tensorboard", "results"}
_OUTPUT_WORDS |= {"result", "report", "profile", "profiler", "run", "experiment", "exp", "job"}
_OUTPUT_NAMES = {"o", "out", "output", "outputs", "outdir", "save", "savedir", "log", "logdir"}
_HOST_WORDS = {"port", "host", "hosts", "hostname", "hostfile", "addr", "address", "endpoint"}
_TIME_WORDS = {"timestamp", "date", "datetime"}
_RANK_NAMES = {"rank", "local rank", "node rank", "local process index"}
_OWN_WORDS = {"upguard", "rdzv", "wandb"}

_SECRET_VALUES = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[opsu]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abp]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?<=Bearer )\S+"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
# name=value and "name": "value" in longer texts: URL queries, JSON, shell lines, Hydra overrides.
_ASSIGNED = re.compile(r"""([\w.\-]+)(=|["']\s*:\s*["'])([^&\s"',}]+)""")

_OPTION = re.compile(r"--?([A-Za-z][\w.\-]*)|\+{0,2}([A-Za-z][\w./\-]*)(?==)")


def redact_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command with `<redacted>` for every value that looks like a secret."""
    redacted: list[str] = []
    secret_follows = False
    for text in command:
        if secret_follows and not text.startswith("--"):
            redacted.append(REDACTED)
            secret_follows = False
            continue
        redacted.append(redact_text(text))
        option = re.fullmatch(r"--?([A-Za-z][\w.\-]*)", text)
        secret_follows = option is not None and is_secret(option[1])
    return tuple(redacted)


def redact_text(text: str) -> str:
    """A text without logins in URLs, assigned secrets, and tokens of well-known forms."""
    if any(character.isspace() for character in text) and "--" in text:
        pieces = re.split(r"(\s+)", text)  # a shell line: bash -c "train --token X"
        pieces[::2] = redact_command(pieces[::2])
        text = "".join(pieces)
    text = _URL_LOGIN.sub(REDACTED, text)
    text = _ASSIGNED.sub(
        lambda m: f"{m[1]}{m[2]}{REDACTED if is_secret(m[1]) else m[3]}",
        text,
    )
    return _SECRET_VALUES.sub(REDACTED, text)


def is_secret(name: str) -> bool:
    """Whether an option or variable of this name may hold a secret."""
    words = _words(name)
    return _is_surely_secret(words) or bool(words and words[-1] in _DOUBTFUL_LAST_WORDS)


def _is_surely_secret(words: list[str]) -> bool:
    pairs = {" ".join(pair) for pair in itertools.pairwise(words)}
    return bool(_SECRET_WORDS & {*words} or "apikey" in words or _SECRET_PAIRS & pairs)


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]


def is_incidental(name: str) -> bool:
    """Whether a setting of this name may differ between two runs of one program."""
    words = _words(name)
    leaf = _leaf(name)
    return bool(leaf) and (
        is_output(name)
        or leaf[-1] in _HOST_WORDS | _TIME_WORDS
        or not _OWN_WORDS.isdisjoint((words[0], leaf[0]))
        or " ".join(leaf) in _RANK_NAMES
        or _is_surely_secret(words)
    )


def is_output(name: str) -> bool:
    """Whether a setting of this name says where results go."""
    leaf = _leaf(name)
    return "".join(leaf) in _OUTPUT_NAMES or bool(
        leaf and leaf[-1] in _PLACE_WORDS and _OUTPUT_WORDS & {*leaf[:-1]}
    )


def _leaf(name: str) -> list[str]:
    """The words of the last part of a name: `trainer.output_dir` -> output, dir."""
    return _words(re.split(r"[./]", name)[-1])


def program_digest(
    command: Sequence[str],
    sources: Mapping[str, str],
    program: str,
    training_config: Mapping[str, Any] | None = None,
    outputs: Iterable[str] = (),
) -> str:
    """32 hexadecimal digits; equal for two runs of the same program.

    command: as given to the interpreter (`sys.orig_argv`), secrets and all: none of them is kept.
    sources: path -> digest, from `collect_sources`; where a file lies does not count.
    program: the config field of that name.
    training_config: the framework's settings (a DeepSpeed JSON, Megatron's arguments), nested.
    outputs: arguments that say where results go, whatever their place.
    """
    config = _plain(training_config or {})
    settings = [*_command_settings(command), *_config_settings(training_config or {})]
    places = {value for name, value in settings if is_output(name)} | set(outputs)
    fields = {
        "command": list(_essential(command, places, set(sources))),
        "sources": sorted([Path(path).name, digest] for path, digest in sources.items()),
        "program": program,
        "training_config": _replace_outputs(config, places),
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _essential(command: Sequence[str], outputs: set[str], sources: set[str]) -> Iterator[str]:
    """The parts of a command that tell one program from another."""
    skip_value = False
    for place, text in enumerate(command):
        if skip_value and not _is_option(text):
            skip_value = False
            continue
        option = _OPTION.match(text)
        name, separator, value = text.partition("=")
        skip_value = False
        if option is not None and is_incidental(option[1] or option[2]):
            skip_value = not separator and name != "--upguard"  # which takes no value
        elif option is not None and separator:
            yield f"{name}={_essential_value(value, outputs, sources)}"
        elif place == 0:
            yield Path(text).name
        else:
            yield _essential_value(text, outputs, sources)


def _is_option(text: str) -> bool:
    return re.match(r"--?[A-Za-z]", text) is not None


def _essential_value(value: str, outputs: set[str], sources: set[str]) -> str:
    if value in outputs:
        return "<output>"  # `--load` of what `--save` has written
    path = Path(value)
    if value in sources or _resolved(path) in sources:
        return path.name
    if path.suffix == ".json":
        return _config_file(path) or value
    return value


def _command_settings(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text, following in itertools.zip_longest(command, command[1:], fillvalue=""):
        option = _OPTION.match(text)
        if option is not None:
            _, separator, value = text.partition("=")
            if separator or not _is_option(following):
                yield option[1] or option[2], value if separator else following


def _config_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _config_settings(value)
        elif isinstance(value, (str, Path)):
            yield str(name), str(value)


def _replace_outputs(value: Any, outputs: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _replace_outputs(item, outputs) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_outputs(item, outputs) for item in value]
    return "<output>" if isinstance(value, str) and value in outputs else value


def _resolved(path: Path) -> str:
    try:
        return str(path.resolve())
    except (OSError, RuntimeError, ValueError):
        return str(path)


def _config_file(path: Path) -> str | None:
    """The settings in a JSON file, so that its name does not count but its content does."""
    try:
        if not path.is_file() or path.stat().st_size > 1 << 20:
            return None
        return json.dumps(_plain(json.loads(path.read_bytes())), sort_keys=True)
    except (OSError, ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    """JSON values of any settings, without what may differ between runs of one program."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = {str(name): item for name, item in value.items()}
        return {name: _plain(item) for name, item in items.items() if not is_incidental(name)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Path, enum.Enum)) or type(value).__name__ == "dtype":
        return str(value)
    # The repr of any other object may hold its address, which is another one every time.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def collect_sources(module_classes: Iterable[type]) -> dict[str, str]:
    """Path -> digest of the user's own source files: the script, the model, all they imported.

    module_classes: the classes of the model's modules. Files of installed packages and of the
    standard library do not count: their versions stand in the manifest. Nor do UpGuard's own.
    """
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for module_class in module_classes:
        try:
            files.add(inspect.getfile(module_class))
        except (TypeError, OSError):
            continue  # made by exec or in a console: there is no file
    roots = _installed_roots()
    # Most files are installed: look at their names before asking the disk where links lead.
    own = {file for file in files if isinstance(file, str) and not file.startswith(roots)}
    paths = sorted({_resolved(Path(file)) for file in own if file.endswith(".py")})
    digests = {path: _file_digest(Path(path)) for path in paths if not path.startswith(roots)}
    return {
        path: digest
        for path, digest in digests.items()
        if digest is not None and "/torchinductor_" not in path  # generated, not written
    }


def _installed_roots() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    roots = [sysconfig.get_path(name) for name in names]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    # Any site-packages on the path: environments are stacked with .pth files.
    roots += [text for text in sys.path if Path(text).name in ("site-packages", "dist-packages")]
    package = Path(__file__).parent
    roots += [str(package), str(package.parent / "integrations"), str(package.parent / "launch")]
    return tuple({f"{place}/" for root in roots for place in (root, _resolved(Path(root)))})


def _file_digest(path: Path) -> str | None:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None
