"""Who may import whom: the table of the house, read from all imports in the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "upguard_plugin": ROOT / "upguard_plugin",
    "upguard_plugin.integrations": ROOT / "integrations",
    "upguard_plugin.launch": ROOT / "launch",
}
# Files that are a part of another name. What is not listed is a part of its own first name.
PART_OF = {
    "check_report": "records",
    "cli_options": "cli",
    "errors": "records",
    "verdict": "records",
    "verdict_parts": "records",
    "placement": "records",
    "placement_cover": "records",
    "placement_grammar": "records",
    "placement_pieces": "records",
    "config_clashes": "config",
    "config_values": "config",
    "program": "environment",
    "exact_functions": "exact",
    "fingerprint.reference": "reference",
    "fingerprint.keys": "reference",
    "fingerprint.adding": "reference",
    "fingerprint.sketch": "reference",
}
BELOW = {
    "records": set(),
    "reference": {"records"},
    "fingerprint": {"reference", "records"},
    "config": {"records"},
    "environment": {"records"},
    "trace": {"records"},
    "invariants": {"trace", "reference", "records"},
    "capture": {
        "trace", "fingerprint", "reference", "invariants", "config", "environment", "records",
    },
    "compare": {"trace", "reference", "records"},
    "report": {"records"},
    "exact": {"capture", "fingerprint", "records"},
    "integrations": {"capture", "config", "records"},
}  # fmt: skip
BELOW["launch"] = {*BELOW, "launch"}
BELOW["cli"] = {*BELOW, "cli"}
TORCH_FREE = ("records", "reference", "config", "trace", "invariants", "compare", "report")


def sources() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).with_suffix("")
            found[".".join([package, *inside.parts]).removesuffix(".__init__")] = path
    return found


def part_of(module: str) -> str | None:
    """The part of the house that a module belongs to; None for what is not ours or the top."""
    names = module.split(".")
    if names[0] != "upguard_plugin" or len(names) == 1:
        return None
    for length in (3, 2):
        if ".".join(names[1:length]) in PART_OF:
            return PART_OF[".".join(names[1:length])]
    return names[1]


def imported_by(tree: ast.AST) -> set[str]:
    """Modules that a source imports, also inside functions, but not for type checkers only."""
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            names |= set().union(*(imported_by(child) for child in node.orelse))
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        names |= imported_by(node)
    return names


MODULES = sources()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def arrows(tree: ast.AST, mine: str) -> set[str]:
    """Parts that a source of the part `mine` imports although the table does not say so."""
    parts = {part_of(name) for name in imported_by(tree) if _is_module(name)}
    return {part for part in parts if part not in (None, mine) and part not in BELOW[mine]}


def _is_module(name: str) -> bool:
    # `from upguard_plugin.trace import writer` names a module, `from ...batch import NONE` does
    # not; the package itself is named with every import of a part of it.
    return name in MODULES and name != "upguard_plugin.fingerprint"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "upguard_plugin"])
def test_imports_point_downwards(module):
    mine = part_of(module)

    assert mine in BELOW, f"{module}: the table does not know {mine!r}"
    assert arrows(TREES[module], mine) == set()


@pytest.mark.parametrize("module", MODULES)
def test_only_full_names_are_imported(module):
    relative = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.ImportFrom) and n.level]
    bare = {name.split(".")[0] for name in imported_by(TREES[module])} & {"integrations", "launch"}

    assert not relative and not bare


@pytest.mark.parametrize("module", [n for n in MODULES if part_of(n) in TORCH_FREE])
def test_torch_stays_out(module):
    assert not any(name.split(".")[0] == "torch" for name in imported_by(TREES[module]))


def test_the_core_knows_no_framework():
    core = [name for name in MODULES if part_of(name) not in ("integrations", "launch")]
    frameworks = {"deepspeed", "megatron", "transformers", "accelerate"}

    assert not [n for n in core if frameworks & {x.split(".")[0] for x in imported_by(TREES[n])}]


def test_a_wrong_arrow_is_seen():
    tree = ast.parse(
        "def f():\n    from upguard_plugin.report.text import verdict_text\n"
        "if TYPE_CHECKING:\n    import upguard_plugin.cli\n"
    )
    assert arrows(tree, "compare") == {"report"}
    assert arrows(ast.parse("import upguard_plugin.errors"), "compare") == set()


def test_compare_loads_no_torch():
    code = (
        "import sys, upguard_plugin.compare.runs, upguard_plugin.trace.reader, "
        "upguard_plugin.report.text; assert not {'torch', 'rich', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_loads_no_slow_package():
    code = (
        "import sys; from upguard_plugin.cli import main; assert main(['--help']) == 0; "
        "assert not {'torch', 'numpy', 'pyarrow', 'pydantic', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
