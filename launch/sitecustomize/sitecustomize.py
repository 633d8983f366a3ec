"""Runs at the start of every Python process below `upguard run`, where its folder is on PYTHONPATH.

It switches UpGuard on where the package is not installed, or not for that Python: the package is
found from here, and torch's import is waited for. Then the `sitecustomize` that it hides runs.

Processes below are also compilers' helpers, pip and data loaders: nothing is printed to stdout,
nothing is imported that costs time, and nothing of ours is ever raised.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib takes time)
_LAUNCH = os.path.dirname(_HERE)  # noqa: PTH120
_PARENT = os.path.dirname(_LAUNCH)  # noqa: PTH120


class _OurPackage:
    """The last finder of all: finds upguard_plugin beside this file, if nobody else does."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "upguard_plugin":
            return None
        inner = os.path.join(_PARENT, "upguard_plugin")  # noqa: PTH118
        # In a checkout `integrations` and `launch` lie beside the package, installed in it.
        is_checkout = os.path.isdir(inner)  # noqa: PTH112
        folders = [inner, _PARENT] if is_checkout else [_PARENT]
        init = os.path.join(folders[0], "__init__.py")  # noqa: PTH118
        return spec_from_file_location(name, init, submodule_search_locations=folders)


def _switch_on() -> None:
    sys.meta_path.append(_OurPackage)  # type: ignore[arg-type]
    from upguard_plugin.integrations import autoload
    from upguard_plugin.integrations.when_imported import when_imported

    autoload.adopt_carried(os.environ)
    if os.environ.get("UPGUARD_CPU") == "1" and not autoload.is_dormant(os.environ):
        from upguard_plugin.launch.cpu_emulation import install

        install()
    # Does nothing where torch has found the installed package's entry point itself.
    when_imported("torch", lambda torch: autoload.autoload())


def _run_hidden() -> None:
    """Python runs the first `sitecustomize` on its path only: run the next one."""
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    hidden: ModuleType = module_from_spec(spec)
    sys.modules["sitecustomize"] = hidden
    spec.loader.exec_module(hidden)


try:
    _switch_on()
except Exception as error:
    print(f"upguard: cannot watch this process: {error!r}", file=sys.stderr)
_run_hidden()
