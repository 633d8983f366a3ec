from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap

import pytest

from upguard_plugin.integrations.when_imported import when_imported


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Write a module of that name; forgotten again after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(name: str, code: str = "value = 1") -> None:
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(textwrap.dedent(code))
        importlib.invalidate_caches()

    finders = list(sys.meta_path)
    yield make
    assert sys.meta_path == finders, "a finder was left behind"
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def test_the_callback_gets_the_module_after_its_code_has_run(make_module):
    make_module("late_one")
    seen = []

    when_imported("late_one", lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module("late_one")

    assert seen == [1]
    assert "exec_module" not in vars(module.__spec__.loader)


def test_names_copied_from_the_module_are_the_patched_ones(make_module):
    make_module("late_two")
    make_module("client", "from late_two import value")

    when_imported("late_two", lambda module: setattr(module, "value", "patched"))

    assert importlib.import_module("client").value == "patched"


def test_a_module_that_is_imported_already_calls_back_at_once(make_module):
    make_module("early")
    importlib.import_module("early")
    seen = []
    when_imported("early", lambda module: seen.append(module.value))
    assert seen == [1]


def test_a_module_that_is_being_imported_calls_back_when_its_code_has_run(make_module):
    # As deepspeed does: it imports torch, whose entry point waits for deepspeed.
    make_module(
        "outer",
        """
        import outer_helper
        assert outer_helper.seen == []
        value = 1
        """,
    )
    make_module(
        "outer_helper",
        """
        from upguard_plugin.integrations.when_imported import when_imported
        seen = []
        def patch(module):
            seen.append(module.value)
            module.value = "patched"
        when_imported("outer", patch)
        """,
    )
    make_module("outer_client", "from outer import value")

    client = importlib.import_module("outer_client")

    outer = sys.modules["outer"]
    assert client.value == "patched"
    assert sys.modules["outer_helper"].seen == [1]
    assert type(outer) is type(sys)  # its class is its own again


def test_two_requests_for_one_module_both_call_back_once(make_module):
    make_module("shared")
    seen = []
    when_imported("shared", lambda module: seen.append("first"))
    when_imported("shared", lambda module: seen.append("second"))

    importlib.import_module("shared")

    assert sorted(seen) == ["first", "second"]


def test_looking_for_a_module_is_not_importing_it(make_module):
    make_module("looked_for")
    seen = []
    when_imported("looked_for", lambda module: seen.append(module.value))

    assert importlib.util.find_spec("looked_for") is not None
    assert seen == []
    importlib.import_module("looked_for")
    assert seen == [1]


def test_a_request_taken_back_is_not_answered(make_module):
    make_module("unwanted")
    seen = []
    when_imported("unwanted", seen.append)()
    importlib.import_module("unwanted")
    assert seen == []


def test_a_failed_import_does_not_count(make_module, tmp_path):
    make_module("flaky", "raise RuntimeError('not yet')")
    seen = []
    when_imported("flaky", lambda module: seen.append(module.value))
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("flaky")
    assert seen == []

    make_module("flaky", "value = 1  # now it is longer than before")
    importlib.import_module("flaky")

    assert seen == [1]


def test_a_callback_may_import_the_module_itself_and_others(make_module):
    make_module("entered")
    make_module("other")
    seen = []

    def callback(module):
        import entered
        import other

        seen.append((entered is module, other.value))

    when_imported("entered", callback)
    importlib.import_module("entered")
    assert seen == [(True, 1)]


def test_a_submodule_is_watched_by_its_full_name(make_module):
    make_module("family.child")
    make_module("family.__init__", "")
    seen = []
    when_imported("family.child", lambda module: seen.append(module.__name__))
    importlib.import_module("family.child")
    assert seen == ["family.child"]


def test_a_module_run_as_main_is_left_alone(tmp_path):
    (tmp_path / "program.py").write_text("print('ran as', __name__)")
    (tmp_path / "sitecustomize.py").write_text(
        "from upguard_plugin.integrations.when_imported import when_imported\n"
        "when_imported('program', lambda module: print('called back'))\n"
    )
    out = subprocess.run(
        [sys.executable, "-m", "program"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (out.stdout, out.stderr) == ("ran as __main__\n", "")
