from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from upguard_plugin.environment import (
    collect_sources,
    collect_variables,
    collect_versions,
    device_name,
    program_digest,
    redact_command,
)
from upguard_plugin.program import is_incidental, is_secret

BASE = ["/usr/bin/python3", "train.py", "--lr", "1e-3", "--output_dir", "runs/a", "--layers=4"]


def digest(command=BASE, sources=None, program="", training_config=None):
    return program_digest(command, sources or {}, program, training_config)


@pytest.mark.parametrize(
    "command",
    [
        ["/v/bin/python3", *BASE[1:]],
        [*BASE[:5], "runs/b", BASE[6]],
        [*BASE[:4], "--output_dir=runs/b", BASE[6]],
        [*BASE[:4], BASE[6]],
        [*BASE, "--master_port", "29501"],
        [*BASE, "--master-addr=10.0.0.7", "--local_rank=3", "--node_rank", "1"],
        [*BASE, "--upguard", "--upguard-output-dir", "ug/a", "--upguard-level=op"],
        [*BASE, "--save", "ckpt/b", "--tensorboard-dir", "tb"],
        [*BASE, "--rdzv-id=77", "--rdzv_endpoint", "host:1"],
        [*BASE, "--wandb-api-key", "abc", "--run_name=monday"],
        [*BASE, "trainer.output_dir=/x", "+trainer.log_dir=/y"],
        [*BASE, "-o", "out.txt"],
    ],
)
def test_what_equal_runs_differ_in_does_not_count(command):
    assert digest(command) == digest()


@pytest.mark.parametrize(
    "command",
    [
        [*BASE[:3], "1e-4", *BASE[4:]],
        [*BASE[:6], "--layers=5"],
        BASE[:6],
        [*BASE, "--pad-token", "0"],
        [*BASE, "--load", "elsewhere"],
        [*BASE, "--master-weights", "fp32"],
        [*BASE, "--num-key-value-heads", "2"],
        [*BASE, "--upguard", "data.txt"],
        [*BASE, "model.lr=3"],
        [BASE[0], "other.py", *BASE[2:]],
        [*BASE, "--seed", "-1"],
    ],
)
def test_what_can_move_bits_counts(command):
    assert digest(command) != digest()


def test_a_flag_without_value_does_not_swallow_the_next_option():
    assert digest([*BASE, "--save", "--lr-decay", "2"]) == digest([*BASE, "--lr-decay", "2"])
    assert digest([*BASE, "--save", "--lr-decay", "2"]) != digest([*BASE, "--lr-decay", "3"])


def test_loading_what_the_run_saves_is_not_another_program():
    def command(place):
        return [*BASE, "--save", place, "--load", place]

    assert digest(command("ckpt/a")) == digest(command("ckpt/b"))
    assert digest(command("ckpt/a")) != digest([*BASE, "--save", "ckpt/a", "--load", "ckpt/b"])
    first, second = ({"save": place, "load": place} for place in "ab")
    assert digest(training_config=first) == digest(training_config=second)


def test_program_and_sources_count_and_their_places_do_not():
    assert digest(program="flipped") != digest()
    assert digest(sources={"/a/train.py": "1"}) == digest(sources={"/b/train.py": "1"})
    assert digest(sources={"/a/train.py": "1"}) != digest(sources={"/a/train.py": "2"})
    moved = [["python", f"/{place}/train.py"] for place in "ab"]
    first, second = (digest(command, {command[1]: "1"}) for command in moved)
    assert first == second


def test_a_json_config_counts_by_its_content(tmp_path):
    files = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for file, config in zip(
        files,
        [
            {"lr": 1, "upguard": {"output_dir": "a"}},
            {"upguard": {"output_dir": "b", "level": "op"}, "lr": 1, "output_path": "x"},
            {"lr": 2},
        ],
        strict=True,
    ):
        file.write_text(json.dumps(config))
    first, second, third = (digest([*BASE, "--deepspeed_config", str(file)]) for file in files)
    assert first == second
    assert first != third


class Anything:
    """An object whose repr is another one every time."""


def test_a_training_config_counts_by_its_settings():
    config = {"optimizer": {"lr": 1.0, "betas": (0.9, 0.99)}, "init": Anything, "obj": Anything()}
    same = {
        "obj": Anything(),
        "init": Anything,
        "optimizer": {"betas": [0.9, 0.99], "lr": 1.0},
        "upguard": {"enabled": True},
        "master_port": 3,
        "rank": 1,
        "tensorboard_dir": "x",
    }
    other = {**config, "optimizer": {"lr": 2.0, "betas": (0.9, 0.99)}}
    assert digest(training_config=config) == digest(training_config=same)
    assert digest(training_config=config) != digest(training_config=other)


def test_the_digest_is_the_same_in_another_process():
    code = (
        "from upguard_plugin.environment import program_digest;"
        f"print(program_digest({BASE!r}, {{'/a/b.py': '1'}}, 'p', {{'x': {{1, 2, 'z'}}}}))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in "12"
    }
    assert answers == {digest(BASE, {"/a/b.py": "1"}, "p", {"x": {"z", 2, 1}})}


def test_secrets_in_a_command_are_redacted():
    command = [
        "python",
        "train.py",
        "--api-key=k1",
        "--token",
        "k2",
        "--hub_token",
        "-k3",
        "--wandbApiKey=k4",
        "wandb.api_key=k5",
        "HF_TOKEN=k6",
        "--data",
        "https://user:k7@host/data?token=k8&part=1",
        "--json",
        '{"password": "k9", "lr": 1}',
        "bash -c 'AWS_SECRET_ACCESS_KEY=k10 train --auth k11'",
        "hf_abcdefghijklmnopqrstuv",
        "--header",
        "Authorization: Bearer k12",
        "--aws-access-key-id=k13",
    ]
    assert redact_command(command) == (
        "python",
        "train.py",
        "--api-key=<redacted>",
        "--token",
        "<redacted>",
        "--hub_token",
        "<redacted>",
        "--wandbApiKey=<redacted>",
        "wandb.api_key=<redacted>",
        "HF_TOKEN=<redacted>",
        "--data",
        "https://<redacted>@host/data?token=<redacted>&part=1",
        "--json",
        '{"password": "<redacted>", "lr": 1}',
        "bash -c 'AWS_SECRET_ACCESS_KEY=<redacted> train --auth <redacted>",
        "<redacted>",
        "--header",
        "Authorization: Bearer <redacted>",
        "--aws-access-key-id=<redacted>",
    )


def test_what_is_no_secret_is_left_as_it_is():
    command = (
        "python",
        "-u",
        "train.py",
        "--num-key-value-heads=4",
        "--tokenizer-model",
        "a/b.model",
        "--max-tokens",
        "100",
        "--lr=1e-3",
        "--author-name=x",
        "keyboard=1",
        "--data",
        "s3://bucket/path?part=1",
        '{"monkey": "banana"}',
        "a value with spaces -- and dashes",
    )
    assert redact_command(command) == command
    assert redact_command(redact_command(command)) == command


@pytest.mark.parametrize("name", ["HF_TOKEN", "DB_PASSWORD", "x.secretValue", "SSH_KEY", "authPat"])
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["log-interval", "save_interval", "data-path", "port_map", "steps"]
)
def test_names_of_settings_that_count(name):
    assert not is_incidental(name)


def test_variables_that_move_bits_and_no_others():
    environ = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "COMPATIBLE",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTHONHASHSEED": "0",
        "ATEN_CPU_CAPABILITY": "avx2",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "TORCH_SECRET_KEY": "k",
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1",
        "NCCL_COMM_ID": "10.0.0.1:77",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "TORCHELASTIC_RUN_ID": "4",
        "TORCH_EXTENSIONS_DIR": "/x",
        "MASTER_PORT": "1",
        "HF_TOKEN": "k",
        "HOME": "/root",
        "UPGUARD_LEVEL": "op",
        "OMPI_COMM_WORLD_RANK": "0",
    }
    assert collect_variables(environ) == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MKL_CBWR": "COMPATIBLE",
        "NCCL_ALGO": "Ring",
        "NVIDIA_TF32_OVERRIDE": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1",
        "TORCH_SECRET_KEY": "<redacted>",
    }


SWITCHES = """
import json, sys
from upguard_plugin.environment import collect_versions, device_name
assert "torch" not in sys.modules
without = collect_versions()
import torch
before = collect_versions()
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("medium")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.set_flush_denormal(True)
with torch.autocast("cpu", torch.bfloat16):
    after = collect_versions()
print(json.dumps([without, before, after, device_name()]))
"""


def test_versions_and_switches_follow_torch():
    answer = subprocess.run(
        [sys.executable, "-c", SWITCHES], capture_output=True, text=True, check=True
    )
    without, before, after, device = json.loads(answer.stdout)

    assert answer.stderr == ""
    assert not any(name.startswith("torch") for name in without)
    assert without["python"].endswith(sys.version.split()[0])
    assert {"libc", "cpu", "cpu features", "numpy"} <= set(without)
    assert device.startswith("cpu: ")
    assert before["torch build"].startswith("PyTorch built with")
    assert {name: after[name] for name in after if before.get(name) != after[name]} == {
        "torch switch deterministic algorithms": "True",
        "torch switch float32 matmul precision": "medium",
        "torch switch cuda matmul tf32": "True",
        "torch switch cuda matmul fp32 precision": "tf32",
        "torch switch mkldnn matmul fp32 precision": "bf16",
        "torch switch default dtype": "torch.float64",
        "torch switch autocast cpu": "torch.bfloat16",
        "torch switch flush denormal": "True",
    } | ({} if before["torch switch threads"] == "1" else {"torch switch threads": "1"})


def test_asking_twice_gives_the_same():
    assert collect_versions() == collect_versions()
    assert device_name() == device_name()


SCRIPT = """
import json, torch, layers, helper
from upguard_plugin.environment import collect_sources
print(json.dumps(collect_sources([layers.Block, torch.nn.Linear, int])))
"""


def run_script(folder: Path) -> dict[str, str]:
    command = [sys.executable, folder / "train.py"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_sources_are_the_script_and_what_it_imports_of_the_users_own(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "layers.py").write_text("class Block: pass\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "unused.py").write_text("x = 1\n")

    first = run_script(tmp_path)
    assert sorted(Path(path).name for path in first) == ["helper.py", "layers.py", "train.py"]
    assert run_script(tmp_path) == first
    (tmp_path / "helper.py").write_text("x = 2\n")
    second = run_script(tmp_path)
    assert {path for path in first if first[path] != second[path]} == {str(tmp_path / "helper.py")}


def test_a_class_without_a_file_is_no_trouble():
    scope = {"__name__": "nowhere"}
    exec("class Block: pass", scope)
    assert isinstance(collect_sources([scope["Block"]]), dict)


def test_an_output_directory_given_by_its_place_is_no_part_of_the_program():
    found = {
        program_digest(["python", "loop.py", place, "7"], {}, "", outputs=[place])
        for place in ("runs/a", "runs/b")
    }
    assert len(found) == 1
    assert found != {program_digest(["python", "loop.py", "runs/a", "7"], {}, "")}
