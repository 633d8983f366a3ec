"""The package as users get it: installed by `pip install .` and by `pip install -e .`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = """
import importlib, pathlib
from importlib import metadata
import upguard_plugin, upguard_plugin.integrations, upguard_plugin.launch
for package in (upguard_plugin, upguard_plugin.integrations, upguard_plugin.launch):
    print(pathlib.Path(package.__file__).parent)
points = metadata.distribution("upguard-plugin").entry_points
print(sorted((point.group, point.name) for point in points))
assert (pathlib.Path(upguard_plugin.__file__).parent / "py.typed").exists()
for name in ("integrations", "launch"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} can be imported as a top-level package")
"""
POINTS = [("console_scripts", "upguard"), ("torch.backends", "upguard")]


def pip(python: Path | str, *args: str) -> None:
    """Install without asking an index for anything."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, *args], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def probe(python: Path | str, cwd: Path, **variables: str) -> tuple[list[Path], str]:
    """The folders of the three packages as another process finds them, and the entry points."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("UPGUARD", "PYTHONPATH"))}
    done = subprocess.run(
        [str(python), "-P" if sys.version_info >= (3, 11) else "-s", "-c", PROBE],
        capture_output=True, text=True, cwd=cwd, env={**environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *folders, points = done.stdout.splitlines()
    return [Path(folder) for folder in folders], points


@pytest.fixture
def empty_venv(tmp_path):
    """A virtual environment that sees the packages of this one, but no upguard."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    here = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))]
    (site / "outer.pth").write_text("\n".join(here) + "\n")
    return python, site


def test_an_installed_wheel_has_its_folders_under_their_long_names(tmp_path):
    target = tmp_path / "site"
    pip(sys.executable, "--target", str(target), ".")

    folders, points = probe(sys.executable, tmp_path, PYTHONPATH=str(target))

    package = target / "upguard_plugin"
    assert folders == [package, package / "integrations", package / "launch"]
    assert points == str(POINTS)
    for folder in ("upguard_plugin", "integrations", "launch"):
        inside = package if folder == "upguard_plugin" else package / folder
        for module in (ROOT / folder).rglob("*.py"):
            installed = inside / module.relative_to(ROOT / folder)
            assert installed.exists(), f"setup.cfg leaves out {module.relative_to(ROOT)}"


def test_an_editable_install_points_into_the_checkout(empty_venv, tmp_path):
    python, site = empty_venv
    pip(python, "--prefix", str(site.parents[2]), "--editable", ".")

    folders, points = probe(python, tmp_path)

    assert folders == [ROOT / "upguard_plugin", ROOT / "integrations", ROOT / "launch"]
    assert points == str(POINTS)


def test_the_folders_refuse_to_be_imported_under_their_short_names():
    code = "import integrations"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "import this package as upguard_plugin.integrations" in done.stderr
