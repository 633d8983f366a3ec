"""`upguard run -- deepspeed --hostfile ...`: our variables reach the other hosts, by every runner.

The runners' commands (pdsh, mpirun, srun) are stand-ins, which start the program as another host
would: with the variables that DeepSpeed's command line names, and no others.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

DEEPSPEED = str(Path(sysconfig.get_path("scripts")) / "deepspeed")
RUN = [sys.executable, "-m", "upguard_plugin.cli", "run", "--level", "op", "--output", "my run"]

# pdsh -S -f FAN_OUT -w HOSTS COMMAND ...: a shell on another host. %n is the host's number.
PDSH = """#!/bin/sh
shift 5
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$(echo "$*" | sed 's/%n/0/')"
"""

# mpirun of Open MPI (-x NAME=VALUE), of MPICH (-genv NAME=VALUE) and Intel's (-genv NAME VALUE);
# srun (--export=ALL,NAME=VALUE,...). There is no shell: quotes in a value stay in it.
MPIRUN = f"""#!{sys.executable}
import os, sys
words, variables = iter(sys.argv[1:]), {{}}
for word in words:
    if word.endswith("look.py"):
        break
    if word in ("-x", "-genv"):
        name, equals, value = next(words).partition("=")
        variables[name] = value if equals else next(words)
    elif word.startswith("--export=ALL,"):
        variables.update(os.environ)
        variables.update(part.split("=", 1) for part in word.split(",")[1:] if "=" in part)
os.execve(sys.executable, [sys.executable, "look.py"], variables)
"""
RUNNERS = {
    "pdsh": {"pdsh": PDSH},
    "openmpi": {"mpirun": MPIRUN, "ompi_info": MPIRUN},
    "mpich": {"mpirun": MPIRUN},
    "impi": {"mpirun": MPIRUN},
    "slurm": {"srun": MPIRUN, "sinfo": MPIRUN},
}
OFTEN = ("pdsh", "openmpi")
NAMES = ("UPGUARD", "UPGUARD_LEVEL", "UPGUARD_OUTPUT_DIR", "UPGUARD_STEPS")
LOOK = f"""
import os
print([os.environ.get(name) for name in {NAMES!r}])
"""


@pytest.mark.parametrize(
    "runner", [pytest.param(r, marks=[] if r in OFTEN else pytest.mark.long) for r in RUNNERS]
)
def test_the_variables_reach_other_hosts(tmp_path, monkeypatch, runner):
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("UPGUARD")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UPGUARD_STEPS", "0,2-4")
    Path("hosts").write_text("localhost slots=1\n")
    Path("look.py").write_text(LOOK)
    Path("bin").mkdir()
    for name, code in {"ssh": "#!/bin/sh\nexit 0\n", **RUNNERS[runner]}.items():
        (tmp_path / "bin" / name).write_text(code)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    flags = ["--hostfile", "hosts", "--force_multi", "--master_addr", "127.0.0.1"]

    done = subprocess.run(
        [*RUN, "--", DEEPSPEED, *flags, "--launcher", runner, "look.py"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert str(["1", "op", str(tmp_path / "my run"), "0,2-4"]) in done.stdout, done.stdout
