from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from tests.trace.sample_events import make_batch, make_keys
from upguard_plugin.errors import RunDirectoryError
from upguard_plugin.trace.manifest import Manifest, write_manifest
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.trace.run_directory import (
    claim_run_directory,
    rank_directories,
    run_id_of,
)
from upguard_plugin.trace.writer import RankWriter


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def record(run: Path, rank: int = 0, steps: int = 1) -> None:
    writer = RankWriter(run, rank)
    for step in range(steps):
        writer.write(make_batch(step, make_keys()))
    writer.close()


@pytest.mark.parametrize("token", [None, "job-1"])
def test_all_ranks_of_a_launch_get_the_same_directory(tmp_path, token):
    runs = [claim_run_directory(tmp_path / "a/run", rank=r, run_token=token) for r in range(4)]

    assert runs == [tmp_path / "a/run"] * 4
    assert list(rank_directories(runs[0])) == [0, 1, 2, 3]
    assert len(run_id_of(runs[0])) == 32


def claim_in_process(output, rank, token, overwrite, queue):
    queue.put(str(claim_run_directory(output, rank=rank, run_token=token, overwrite=overwrite)))


@pytest.mark.parametrize("token", [None, "job-1"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_ranks_that_come_at_once_agree(tmp_path, token, overwrite):
    output = tmp_path / "run"
    if overwrite:
        for rank in range(8):
            record(claim_run_directory(output, rank=rank, run_token="old" if token else None), rank)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=claim_in_process, args=(output, rank, token, overwrite, queue))
        for rank in range(8)
    ]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)

    assert set(answers) == {str(output)}
    assert list(rank_directories(output)) == list(range(8))
    assert not list(output.glob("rank*/*"))  # nothing of the old run
    assert not list(output.glob(".overwrite*"))


def pretend_other_launcher(run: Path) -> None:
    claim = json.loads((run / "claim.json").read_text())
    (run / "claim.json").write_text(json.dumps(claim | {"launcher": "node-7 1 1"}))


@pytest.mark.parametrize("steps", [0, 1])
def test_without_a_token_a_rank_joins_another_parents_claim_until_a_step_is_recorded(
    tmp_path, steps
):
    record(claim_run_directory(tmp_path, rank=0, run_token=None), steps=steps)
    pretend_other_launcher(tmp_path)

    if steps == 0:
        assert claim_run_directory(tmp_path, rank=1, run_token=None) == tmp_path
    else:
        with pytest.raises(RunDirectoryError, match="it holds a run already"):
            claim_run_directory(tmp_path, rank=1, run_token=None)


def test_without_a_token_a_late_rank_joins_its_siblings(tmp_path):
    record(claim_run_directory(tmp_path, rank=0, run_token=None))
    assert claim_run_directory(tmp_path, rank=1, run_token=None, overwrite=True) == tmp_path
    assert list(rank_directories(tmp_path)) == [0, 1]


@pytest.mark.parametrize("token", [None, "job-2"])
def test_a_directory_that_holds_a_run_is_refused(tmp_path, token):
    record(claim_run_directory(tmp_path, rank=0, run_token="job-1" if token else None))
    pretend_other_launcher(tmp_path)

    for rank in (0, 1):
        with pytest.raises(RunDirectoryError) as caught:
            claim_run_directory(tmp_path, rank=rank, run_token=token)
        assert str(caught.value) == (
            f"cannot record in {tmp_path}: it holds a run already\n"
            "  try  name another output directory, or set overwrite to replace that run"
        )
    assert list(rank_directories(tmp_path)) == [0]


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    run = claim_run_directory(tmp_path, rank=0, run_token=None)
    write_manifest(run, Manifest("old"))
    record(run, steps=3)
    (tmp_path / "attempt-2").mkdir()
    (tmp_path / "notes of mine.txt").write_text("keep")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rank00007").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "data").write_text("keep")
    old_id = run_id_of(run)

    assert claim_run_directory(tmp_path, rank=0, run_token=None, overwrite=True) == tmp_path

    assert run_id_of(tmp_path) != old_id
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "claim.json",
        "elsewhere",
        "notes of mine.txt",
        "rank00000",
        "rank00007",
    ]
    assert list((tmp_path / "rank00000").iterdir()) == []
    assert (tmp_path / "elsewhere" / "data").read_text() == "keep"


@pytest.mark.parametrize("token", [None, "job-1"])
def test_an_elastic_restart_writes_attempts_beside_the_first(tmp_path, monkeypatch, token):
    for restart, name in (("0", ""), ("1", "attempt-2"), ("2", "attempt-3")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        for rank in range(2):
            run = claim_run_directory(tmp_path, rank=rank, run_token=token, overwrite=True)
            assert run == tmp_path / name
            record(run, rank)
        write_manifest(run, Manifest(run_id_of(run), world_size=2))

    trace = open_trace(tmp_path)
    assert trace.ranks == (0, 1)
    assert trace.attempts == (tmp_path / "attempt-2", tmp_path / "attempt-3")
    assert open_trace(trace.attempts[0]).read(1, 0, verify=True)
    assert len({run_id_of(run) for run in (tmp_path, *trace.attempts)}) == 3


def test_a_requeued_job_with_the_same_token_writes_an_attempt(tmp_path):
    for name in ("", "attempt-2", "attempt-3"):
        for rank in range(2):
            run = claim_run_directory(tmp_path, rank=rank, run_token="job-1")
            assert run == tmp_path / name
            record(run, rank)


def test_a_rank_that_was_late_still_joins_by_its_token(tmp_path):
    record(claim_run_directory(tmp_path, rank=0, run_token="job-1"))
    assert claim_run_directory(tmp_path, rank=1, run_token="job-1") == tmp_path


def test_a_manifest_of_another_tool_is_left_alone(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"it holds a manifest\.json of something else"):
        claim_run_directory(tmp_path, rank=0, run_token=None, overwrite=True)
    assert (tmp_path / "manifest.json").read_text() == "{}"


def test_an_output_that_cannot_be_a_directory_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot record in .*/file/run: Not a directory"):
        claim_run_directory(tmp_path / "file" / "run", rank=0, run_token=None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_an_output_without_permission_is_a_sentence(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.is_relative_to("/tmp/pytest-of-root"):
            parent.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        os.seteuid(65534)
        try:
            claim_run_directory(tmp_path / "run", rank=0, run_token=None)
        except RunDirectoryError as error:
            os._exit(0 if "Permission denied" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_half_written_claim_is_waited_for(tmp_path):
    claim = tmp_path / "claim.json"
    claim.write_text("")
    text = '{"run_id": "x", "run_token": null, "restart": "0.0", "launcher": ""}'
    with subprocess.Popen(["sh", "-c", f"sleep 0.1; echo '{text}' > {claim}"]):
        assert claim_run_directory(tmp_path, rank=1, run_token=None) == tmp_path
    assert run_id_of(tmp_path) == "x"
