"""What torch calls at the end of `import torch`: switching on without code.

In:  the environment, and how this process was started.
Out: finders that wait for the frameworks in which a config flag can show; with UPGUARD=1 also a
     watch for the first training loop. Nothing else happens until a flag says so.

torch calls this in every process that imports it, so it must cost nothing (no framework, no config
is imported here), and it must never raise: an exception would break `import torch` itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from types import ModuleType

from upguard_plugin.integrations.when_imported import when_imported

# Module in which a framework's switch shows -> the adapter whose `patch(module)` looks for it.
SEAMS = {
    "deepspeed": "upguard_plugin.integrations.deepspeed",
    "accelerate.utils.deepspeed": "upguard_plugin.integrations.hugging_face",
    "megatron.training.arguments": "upguard_plugin.integrations.megatron",
    "megatron.training.training": "upguard_plugin.integrations.megatron",
}
ANY_LOOP = "upguard_plugin.integrations.any_loop"

# These start the training elsewhere. They import torch and frameworks, and train nothing.
LAUNCHER_MODULES = ("deepspeed.launcher", "torch.distributed", "accelerate.commands")
LAUNCHER_COMMANDS = ("deepspeed", "ds", "torchrun", "accelerate", "accelerate-launch", "upguard")

# DeepSpeed's launcher hands variables to other hosts only where their name begins with PYTHON.
CARRIED_PREFIX = "PYTHON_UPGUARD"


def autoload() -> None:
    """The entry point in group `torch.backends`. Never raises; a second call does nothing."""
    try:
        if not _loaded:
            _loaded.extend(_load(os.environ))
    except Exception as error:
        print(f"upguard: cannot watch this process: {error!r}", file=sys.stderr)


_loaded: list[Callable[[], None]] = []  # what takes the finders back, once they are there


def unload() -> None:
    """Take back what `autoload` did, where no framework has been patched yet."""
    while _loaded:
        _loaded.pop()()


def _load(environ: MutableMapping[str, str]) -> list[Callable[[], None]]:
    adopt_carried(environ)
    undo = [lambda: None]
    if is_dormant(environ):
        return undo
    if not is_helper(sys.orig_argv):
        undo += [when_imported(name, _patcher(adapter)) for name, adapter in SEAMS.items()]
    if environ.get("UPGUARD"):  # is_dormant has seen that it does not say "off"
        undo.append(import_module(ANY_LOOP).watch())
    return undo


def _patcher(adapter: str) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        try:
            import_module(adapter).patch(module)
        except Exception as error:
            # Not ours to break: the framework works without us. `upguard run` says at the end
            # that nothing was recorded.
            print(f"upguard: cannot record {module.__name__}: {error!r}", file=sys.stderr)

    return patch


def adopt_carried(environ: MutableMapping[str, str]) -> None:
    """Give variables that came under a PYTHON_ name their own, unless that is set."""
    carried = [name for name in environ if name.startswith(CARRIED_PREFIX)]
    for name in carried:
        text = environ[name]
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]  # DeepSpeed's launcher quotes for a shell that need not be there
        environ.setdefault(name.removeprefix("PYTHON_"), text)


def is_dormant(environ: Mapping[str, str]) -> bool:
    """Whether this process is to be left alone: switched off, a launcher, or a helper.

    Under UPGUARD=1 a helper is watched all the same: `torch.multiprocessing.spawn` makes ranks in
    the way in which others make data loaders, and only a training loop tells them apart.
    """
    if environ.get("UPGUARD"):
        return _says_off(environ) or is_launcher(sys.orig_argv)
    return is_launcher(sys.orig_argv) or is_helper(sys.orig_argv)


def is_helper(orig_argv: Sequence[str]) -> bool:
    """Whether multiprocessing made this process: a data loader's worker, a checkpoint's writer."""
    # A spawned child does not know its parent yet while it imports the main script.
    if "--multiprocessing-fork" in orig_argv:
        return True
    # Looked up, not imported: a child has it, and it takes time to load.
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _says_off(environ: Mapping[str, str]) -> bool:
    from upguard_plugin.config import environment_switch  # 10 ms that most processes save
    from upguard_plugin.errors import ConfigError

    try:
        return environment_switch(environ) is False
    except ConfigError:
        return False  # whoever switches on reads it again, and stops the job


def is_launcher(orig_argv: Sequence[str]) -> bool:
    """Whether a command line (with the interpreter first) starts trainings and is none itself."""
    module, script = _started(list(orig_argv[1:]))
    if module is not None:
        return any(module == name or module.startswith(f"{name}.") for name in LAUNCHER_MODULES)
    return script is not None and script.rpartition("/")[2] in LAUNCHER_COMMANDS


def _started(arguments: list[str]) -> tuple[str | None, str | None]:
    """The module or else the script that an interpreter's arguments name."""
    while arguments:
        argument = arguments.pop(0)
        if argument == "--check-hash-based-pycs":
            arguments = arguments[1:]
        if not argument.startswith("-") or argument == "-":
            return None, argument
        if argument.startswith("--"):
            continue
        for place, letter in enumerate(argument[1:], start=2):
            if letter in "cmWX":  # these take what follows, attached or as the next argument
                value = argument[place:] or (arguments.pop(0) if arguments else "")
                if letter in "cm":
                    return (value, None) if letter == "m" else (None, None)
                break
    return None, None
