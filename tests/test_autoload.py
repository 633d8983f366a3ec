from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from importlib.metadata import entry_points

import pytest

from upguard_plugin.integrations import autoload
from upguard_plugin.integrations.autoload import adopt_carried, is_dormant, is_launcher


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("UPGUARD", "PYTHON_UPG"))}
    command = [sys.executable, *(arguments or ("-c",)), textwrap.dedent(code)]
    environ |= variables
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_the_package_registers_its_entry_point():
    (entry,) = [e for e in entry_points(group="torch.backends") if e.name == "upguard"]
    assert entry.load() is autoload.autoload


WAITING = """
    import sys, torch
    from upguard_plugin.integrations.when_imported import _Finder
    print(sorted(f._name for f in sys.meta_path if type(f) is _Finder))
    print(torch.nn.Module.__call__.__module__)
    print([m for m in ("deepspeed", "upguard_plugin.config", "upguard_plugin.capture")
           if m in sys.modules])
"""


def test_importing_torch_only_waits_for_frameworks():
    done = run(WAITING)
    frameworks = ["deepspeed", "megatron.training.arguments", "megatron.training.training"]
    waiting = ["accelerate.utils.deepspeed", *frameworks]
    assert done.stdout.splitlines() == [str(waiting), "torch.nn.modules.module", "[]"]
    assert done.stderr == ""


def test_upguard_0_leaves_nothing_behind():
    assert run(WAITING, UPGUARD="0").stdout.splitlines()[:2] == ["[]", "torch.nn.modules.module"]


def test_upguard_1_also_watches_for_a_loop_without_changing_the_module_class_name():
    done = run(
        """
        import torch
        from torch import nn
        print(nn.Module.__call__.__wrapped__ is nn.Module._wrapped_call_impl)
        """,
        UPGUARD="1",
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_wrong_switch_does_not_break_importing_torch():
    done = run("import torch; print('fine')", UPGUARD="maybe")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


SPAWN = """
import multiprocessing, sys
import torch
from upguard_plugin.integrations.when_imported import _Finder

def look():
    watched = hasattr(torch.nn.Module.__call__, "__wrapped__")
    print(any(type(f) is _Finder for f in sys.meta_path), watched, flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=look)
    child.start(); child.join(); look()
"""


@pytest.mark.parametrize("switch", ["", "1"])
def test_a_spawned_child_waits_for_no_framework(tmp_path, switch):
    # It imports the main script, and torch with it, before it knows that it has a parent. With
    # UPGUARD=1 a training loop in it would be seen: torch.multiprocessing.spawn makes such ranks.
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = run(str(script), "-u", UPGUARD=switch)
    watched = switch == "1"
    assert (done.stdout.splitlines(), done.stderr) == ([f"False {watched}", f"True {watched}"], "")


def test_an_error_of_ours_becomes_one_line(monkeypatch, capsys):
    monkeypatch.setattr(autoload, "_loaded", [])
    monkeypatch.setattr(autoload, "SEAMS", None)
    autoload.autoload()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("upguard: cannot watch this process: ")
    assert len(err.splitlines()) == 1


def test_autoload_is_fast_and_a_second_call_does_nothing(monkeypatch):
    monkeypatch.setattr(autoload, "_loaded", [])
    monkeypatch.delenv("UPGUARD", raising=False)
    finders = list(sys.meta_path)
    try:
        began = time.process_time()
        autoload.autoload()
        cost_s = time.process_time() - began
        after_one = list(sys.meta_path)
        autoload.autoload()
        assert sys.meta_path == after_one
    finally:
        autoload.unload()
    assert sys.meta_path == finders
    assert cost_s < 0.05  # about 20 us; the bound only catches an import that does not belong here


def test_carried_variables_get_their_names():
    environ = {"PYTHON_UPGUARD": "1", "PYTHON_UPGUARD_LEVEL": "op", "UPGUARD_LEVEL": "stage"}
    adopt_carried(environ)
    assert (environ["UPGUARD"], environ["UPGUARD_LEVEL"]) == ("1", "stage")


def test_quotes_that_deepspeed_has_put_around_a_value_go():
    environ = {"PYTHON_UPGUARD_OUTPUT_DIR": '"/data/my run"', "PYTHON_UPGUARD_STEPS": '"'}
    adopt_carried(environ)
    assert (environ["UPGUARD_OUTPUT_DIR"], environ["UPGUARD_STEPS"]) == ("/data/my run", '"')


@pytest.mark.parametrize(
    "command",
    [
        "python -m torch.distributed.run train.py",
        "python -u -m deepspeed.launcher.launch --world_info=x train.py",
        "python -um deepspeed.launcher.runner train.py",
        "python -maccelerate.commands.launch train.py",
        "python /venv/bin/torchrun train.py",
        "python -W ignore -X dev /venv/bin/deepspeed train.py",
        "python /venv/bin/accelerate launch train.py",
        "python /venv/bin/upguard demo",
    ],
)
def test_launchers_are_known(command):
    assert is_launcher(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python",
        "python train.py -m torch.distributed.run",
        "python -m mypackage.train --deepspeed",
        "python -u deepspeed/train.py",
        "python -W -mtorch.distributed train.py",
        "python -c pass",
        "python -m deepspeed_chat.train",
        "python -",
    ],
)
def test_trainings_are_no_launchers(command):
    assert not is_launcher(command.split())


def test_dormant_is_what_the_environment_says():
    assert is_dormant({"UPGUARD": "off"})
    assert not is_dormant({"UPGUARD": "1"}) and not is_dormant({})
