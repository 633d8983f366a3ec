from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from upguard_plugin.errors import ConfigError, RunDirectoryError, UsageError
from upguard_plugin.launch.run import STARTUP, Options, plan
from upguard_plugin.launch.run_launchers import fit_launcher, is_multi_node, is_open_mpi

UPGUARD = [sys.executable, "-m", "upguard_plugin.cli", "run", "--"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("UPGUARD")]:
        monkeypatch.delenv(name)


def run(*command: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*UPGUARD, *command], capture_output=True, text=True, timeout=60, **kwargs
    )


def script(code: str, name: str = "train.py") -> str:
    Path(name).write_text(code)
    return name


# The plan.


def test_the_variables_say_what_the_options_said():
    options = Options(config="c.yaml", level="op", output="out", cpu=True)
    Path("c.yaml").write_text("steps: 1-3\n")

    (launch,) = plan(["torchrun", "train.py"], options, {"PYTHONPATH": "mine", "HOME": "/h"})

    here = Path.cwd()
    assert launch.command == ("torchrun", "train.py")
    assert launch.run == Path("out")
    variables = dict(launch.variables)
    assert len(variables.pop("UPGUARD_RUN_ID")) == 32
    assert variables == {
        "UPGUARD": "1",
        "UPGUARD_CONFIG": str(here / "c.yaml"),
        "UPGUARD_LEVEL": "op",
        "UPGUARD_CPU": "1",
        "UPGUARD_OUTPUT_DIR": str(here / "out"),
        "PYTHONPATH": f"{STARTUP}:mine",
    }


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "a/train.py", "--x"], "runs/train-1"),
        (["torchrun", "--nproc-per-node", "2", "-m", "my.train"], "runs/my.train-1"),
        (["./start.sh"], "runs/start.sh-1"),
    ],
)
def test_a_run_gets_a_short_name_where_nobody_names_one(command, name):
    assert plan(command, Options(), {})[0].run == Path(name)


def test_the_next_run_gets_the_next_number():
    Path("runs/train-1").mkdir(parents=True)
    assert plan(["python", "train.py"], Options(), {})[0].run == Path("runs/train-2")


def test_flag_then_environment_then_file_name_the_directory():
    Path("c.json").write_text('{"output_dir": "file"}')
    by_file = Options(config="c.json")
    environ = {"UPGUARD_OUTPUT_DIR": "environment"}
    assert plan(["x"], by_file, {})[0].run == Path("file")
    assert plan(["x"], by_file, environ)[0].run == Path("environment")
    assert plan(["x"], Options(config="c.json", output="f"), environ)[0].run == Path("f")


def test_repeats_get_a_directory_and_an_id_each():
    first, second = plan(["x"], Options(output="pair", repeat=2), {})
    assert (first.run, second.run) == (Path("pair/1"), Path("pair/2"))
    assert first.variables["UPGUARD_RUN_ID"] != second.variables["UPGUARD_RUN_ID"]


def test_a_directory_with_a_run_is_refused_before_anything_is_started():
    Path("out").mkdir()
    Path("out/claim.json").touch()
    with pytest.raises(RunDirectoryError, match="cannot record in out: it holds a run already"):
        plan(["x"], Options(output="out"), {})
    assert plan(["x"], Options(output="out"), {"UPGUARD_OVERWRITE": "1"})


def test_a_wrong_setting_is_refused_before_anything_is_started():
    with pytest.raises(ConfigError, match="cannot use level = 'modul' from flag --level"):
        plan(["x"], Options(level="modul"), {})
    with pytest.raises(UsageError, match="cannot run the command 0 times"):
        plan(["x"], Options(repeat=0), {})


# Launchers.


VARIABLES = {"UPGUARD": "1", "UPGUARD_LEVEL": "op", "PYTHONPATH": "p"}


def test_most_launchers_are_left_as_they_are():
    for command in (["torchrun", "a b"], ["accelerate", "launch", "t.py"], ["python", "t.py"]):
        assert fit_launcher(command, VARIABLES) == (tuple(command), VARIABLES)


def test_deepspeed_gets_names_that_it_carries_to_other_hosts():
    carried = {"PYTHON_UPGUARD": "1", "PYTHON_UPGUARD_LEVEL": "op"}
    for command in (["/v/bin/deepspeed", "t.py"], ["python", "-m", "deepspeed.launcher.runner"]):
        assert fit_launcher(command, VARIABLES) == (tuple(command), VARIABLES | carried)


def test_open_mpi_is_told_what_to_export_and_mpich_is_not():
    command = ["/v/mpirun", "-n", "2", "python", "t.py"]
    told = ("/v/mpirun", "-x", "UPGUARD", "-x", "UPGUARD_LEVEL", "-x", "PYTHONPATH", *command[1:])
    assert fit_launcher(command, VARIABLES, lambda _: True)[0] == told
    assert fit_launcher(command, VARIABLES, lambda _: False)[0] == tuple(command)


def test_open_mpi_is_known_by_its_version(tmp_path):
    for name, answer in (("ompi", "mpirun (Open MPI) 4.1.6"), ("hydra", "HYDRA build details:")):
        fake = tmp_path / name
        fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    assert is_open_mpi(str(tmp_path / "ompi"))
    assert not is_open_mpi(str(tmp_path / "hydra"))
    assert not is_open_mpi(str(tmp_path / "absent"))


@pytest.mark.parametrize("export", [["--export=NONE"], ["--export", "HOME"]])
def test_srun_that_hides_us_is_refused(export):
    with pytest.raises(UsageError, match="it hides UpGuard from the ranks") as caught:
        fit_launcher(["srun", *export, "python", "t.py"], VARIABLES)
    assert "UPGUARD,UPGUARD_LEVEL,PYTHONPATH, or --export=ALL" in caught.value.remedy


@pytest.mark.parametrize("export", [[], ["--export=ALL,X=1"], ["--export=UPGUARD,UPGUARD_LEVEL"]])
def test_srun_that_hands_us_on_is_left_as_it_is(export):
    command = ["srun", *export, "python", "t.py"]
    assert fit_launcher(command, VARIABLES)[0] == tuple(command)


def test_launches_on_several_nodes_share_no_random_id():
    assert is_multi_node(["torchrun", "--nnodes=2", "t.py"])
    assert is_multi_node(["accelerate", "launch", "--num_machines", "4", "t.py"])
    assert not is_multi_node(["torchrun", "--nnodes", "1", "t.py"])
    assert not is_multi_node(["torchrun", "t.py"])
    (launch,) = plan(["torchrun", "--nnodes=2", "t.py"], Options(output="shared"), {})
    assert "UPGUARD_RUN_ID" not in launch.variables


# What is passed through. None of these commands imports torch.


def test_arguments_arrive_as_they_were_given():
    name = script("import json, sys; print(json.dumps(sys.argv[1:]))")
    arguments = ["a b", "", "--flag=x y", "$HOME", "'quoted'", 'double"', "new\nline", "--"]
    assert json.loads(run(sys.executable, name, *arguments).stdout) == arguments


def test_the_double_dash_may_be_left_out():
    name = script("import sys; print(sys.argv[1:])")
    command = [*UPGUARD[:-1], sys.executable, name, "--level", "op"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['--level', 'op']\n"


def test_stdin_arrives():
    done = run(sys.executable, "-c", "print(input()[::-1])", input="abc\n")
    assert done.stdout == "cba\n"


def test_the_exit_code_and_what_was_not_recorded_are_said():
    done = run(sys.executable, script("import sys; sys.exit(17)"))
    assert done.returncode == 17
    assert done.stderr.splitlines()[:2] == [
        "upguard: the command ended with exit code 17",
        "upguard: nothing was recorded in runs/train-1",
    ]
    assert not Path("runs/train-1").exists()


def test_a_command_that_a_signal_ended_gives_what_shells_give():
    done = run(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("output", ["file", "file/run", "/proc/run"])
def test_a_directory_that_cannot_be_made_is_one_sentence(output):
    Path("file").write_text("")

    ended = subprocess.run(
        [*UPGUARD[:-1], "--output", output, "--", "true"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert lines[0].startswith(f"cannot record in {output}: ")
    assert lines[1:] == ["  try  name a directory that can be made with --output"]


def test_a_command_that_cannot_be_started_is_one_sentence():
    done = run("no-such-launcher")
    assert (done.returncode, done.stderr) == (2, "cannot run no-such-launcher: no such command\n")
    name = script("print(1)")
    done = run(f"./{name}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "cannot run ./train.py: Permission denied",
        "  try  upguard run -- python ./train.py",
    ]


def test_without_a_command_the_usage_is_shown():
    assert run().stderr.splitlines() == [
        "cannot run: no command",
        "  try  upguard run -- python train.py",
    ]


def test_upguard_0_runs_the_command_alone():
    code = "import os; print(sorted(n for n in os.environ if 'UPGUARD' in n))"
    done = run(sys.executable, "-c", code, env={**os.environ, "UPGUARD": "0"})
    assert (done.stdout, done.stderr) == (
        "['UPGUARD']\n",
        "upguard: not recording, because UPGUARD=0\n",
    )


# A child that waits for one SIGINT and tells a second one apart.
WAITS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
print("ready", flush=True)
first = signal.sigwait({signal.SIGINT, signal.SIGTERM})
again = signal.sigtimedwait({signal.SIGINT, signal.SIGTERM}, 0.5)
sys.exit(40 + first if again is None else 99)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sent_to_us_alone_reaches_the_command(number):
    command = [*UPGUARD, sys.executable, script(WAITS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 40 + number


def test_ctrl_c_on_a_terminal_reaches_the_command_once():
    command = [*UPGUARD, sys.executable, script(WAITS)]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(command[0], command)
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        shown = b""
        while b"ready" not in shown:
            shown += screen.read(1)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 40 + signal.SIGINT


# A Python without the package.


def bare_python(tmp_path: Path) -> str:
    """A Python that finds only the standard library, and a `torch` that is just a name."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)
    (packages,) = (tmp_path / "bare/lib").glob("python*/site-packages")
    (packages / "torch.py").write_text("loaded = True\n")
    return str(tmp_path / "bare/bin/python")


SEES = """
import sys
import torch
print(torch.loaded, sorted(f._name for f in sys.meta_path if type(f).__name__ == "_Finder"))
"""


def test_where_the_package_is_not_installed_it_comes_by_the_python_path(tmp_path):
    python, name = bare_python(tmp_path), script(SEES)
    waiting = [
        "accelerate.utils.deepspeed", "deepspeed", "megatron.training.arguments",
        "megatron.training.training",
    ]  # fmt: skip
    environ = {"PYTHONPATH": str(STARTUP)}

    found = subprocess.run([python, name], env=environ, capture_output=True, text=True, timeout=60)
    absent = subprocess.run([python, name], env={}, capture_output=True, text=True, timeout=60)

    assert (found.stdout, found.stderr) == (f"True {waiting}\n", "")
    assert absent.stdout == "True []\n"


def test_the_sitecustomize_that_ours_hides_still_runs(tmp_path):
    Path("site").mkdir()
    script("import sys; print('hidden ran', __name__, __file__)", "site/sitecustomize.py")
    environ = {"PYTHONPATH": f"{STARTUP}:{tmp_path / 'site'}"}

    done = subprocess.run(
        [sys.executable, "-c", "import sys, sitecustomize; print(sitecustomize.__file__)"],
        env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    path = tmp_path / "site/sitecustomize.py"
    assert done.stdout == f"hidden ran sitecustomize {path}\n{path}\n"
    assert done.stderr == ""
