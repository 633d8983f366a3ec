"""Several processes give the answer that one gives."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compare.teams import command, needs_mpi, together
from tests.memory_run import MemoryRun, replace, written
from tests.toy_training import flip, train
from upguard_plugin.cli import main
from upguard_plugin.compare import crew
from upguard_plugin.compare.pieces import shares_of
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.errors import TraceError
from upguard_plugin.trace.batch import RankEnd


@given(
    st.lists(st.integers(0, 1000), max_size=9, unique=True), st.integers(1, 7), st.integers(0, 9)
)
def test_the_work_is_divided_without_rest_or_repetition(ranks, size, num_steps):
    done = [
        (share.rank, step)
        for index in range(size)
        for share in shares_of(ranks, index, size)
        for step in range(num_steps)[share.part_of(num_steps)]
    ]

    assert done == [(rank, step) for rank in ranks for step in range(num_steps)]
    loads = [len(shares_of(ranks, index, size)) for index in range(size)]
    assert max(loads) <= len(ranks) / size + 2


# What may be done to a training: a wrong value made, a scalar or generator that differs in vain.
PLACES = st.sampled_from(
    [
        "{step}/0/forward/blocks.0.mlp.fc1/output",
        "{step}/1/backward/head/grad_input",
        "{step}/-/grad_sync/head.weight/output",
        "{step}/-/clip/grad_norm/scalar",
        "{step}/0/data/input_ids/value",
    ]
)
FAULTS = st.lists(st.tuples(PLACES, st.integers(0, 3), st.integers(0, 2)), max_size=2)
EXTRAS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 3), st.sampled_from(["log", "extra", "dtype", "drop"])
    ),
    max_size=4,
)


def changed(run: MemoryRun, extras) -> MemoryRun:
    """The run with an event of a step changed, added or dropped on a rank."""
    batches = {rank: list(listed.values()) for rank, listed in run.batches.items()}
    for rank, step, what in extras:
        listed = batches.get(rank, [])
        if step < len(listed):
            listed[step] = _edited(listed[step], what)
    return MemoryRun(batches, run.manifest.run_id)


def _edited(made, what: str):
    rows = len(made) - 1
    if what == "log":  # the last event is the learning rate or a scalar: another value
        h = made.h.copy()
        h[rows] += 1
        return replace(made, h=h)
    if what == "drop":
        names = ("key", "seq", "microbatch", "call", "h", "s", "producer")
        return replace(made, **{name: getattr(made, name)[:-1] for name in names}, group_seq=None,
                       peer=None, pair_seq=None)  # fmt: skip
    keys = list(made.keys)
    at = int(made.key[rows // 2])
    change = {"dtype": "bfloat16"} if what == "dtype" else {"boundary": "other"}
    keys[at] = replace(keys[at], **change)
    return replace(made, keys=keys)


def with_faults(faults, world: int):
    def fault(place: str, rank: int, value: int) -> int:
        for where, step, on in faults:
            if place == where.format(step=step) and rank == on % world:
                return value ^ 1
        return value

    return fault


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), FAULTS, EXTRAS, st.integers(2, 4), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_every_number_of_processes_gives_the_same_answer(
    world, num_steps, faults, extras, size, verify, collectives
):
    toy = {"world": world, "num_steps": num_steps, "num_blocks": 1, "collectives": collectives}
    baseline = train(**toy)
    target = changed(train(**toy, fault=with_faults(faults, world), name="target"), extras)
    noise = [changed(train(**toy, name="noise"), extras[:1])] if extras else []

    for options in ({"verify": verify}, {"noise": noise}):
        alone = compare_runs(baseline, target, **options)
        assert together(size, baseline, target, **options) == [alone] * size


def test_the_steps_of_one_rank_are_divided():
    baseline, target = train(num_steps=8), train(num_steps=8)

    answers = together(4, baseline, target, verify=True)

    assert [answer.verdict for answer in answers] == ["identical"] * 4
    assert answers == [compare_runs(baseline, target, verify=True)] * 4


def test_equal_steps_are_read_once_whatever_the_number_of_processes():
    baseline, target = train(num_steps=8, world=2), train(num_steps=8, world=2)

    together(4, baseline, target, verify=True)

    assert baseline.num_reads == target.num_reads == 2 * 8


class Watched(MemoryRun):
    """Counts who is asked for."""

    def asked(self, rank):
        self.__dict__.setdefault("looks", []).append(rank)
        return rank

    def has_trace(self, rank):
        return super().has_trace(self.asked(rank))

    def end(self, rank):
        return super().end(self.asked(rank))

    def layout(self, rank):
        return super().layout(self.asked(rank))


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_is_looked_at_by_one_process_once(size):
    runs = [
        Watched({r: list(b.values()) for r, b in train(num_steps=2, world=7).batches.items()}, name)
        for name in ("baseline", "target")
    ]

    answers = together(size, *runs)

    assert {answer.verdict for answer in answers} == {"identical"}
    assert [sorted(run.looks) for run in runs] == [sorted([*range(7)] * 3)] * 2


class Damaged(MemoryRun):
    def read(self, rank, step, *, verify=False):
        if (rank, step) == (1, 3):
            raise TraceError("cannot read rank 1: it is damaged", remedy="copy it again")
        return super().read(rank, step, verify=verify)


def test_an_error_on_one_process_is_the_answer_of_all():
    baseline = train(num_steps=4, world=2)
    target = Damaged({r: list(b.values()) for r, b in baseline.batches.items()}, "target")

    answers = together(3, baseline, target, verify=True)

    assert {str(answer) for answer in answers} == {
        "cannot read rank 1: it is damaged\n  try  copy it again"
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    toy = {"world": 3, "num_steps": 3, "collectives": True}
    faulty = train(**toy, name="faulty", fault=flip("1/0/forward/head/output", rank=1))
    for run in (train(**toy), train(**toy, name="twin"), faulty):
        written(run, folder / run.manifest.run_id)
    shutil.copytree(folder / "twin", folder / "damaged")
    segment = folder / "damaged" / "rank00002" / "segment-00000.arrow"
    segment.write_bytes(segment.read_bytes()[:-40])
    return folder


@pytest.mark.parametrize("options", [["--jobs", "3"], ["--jobs", "2", "--verify"]])
def test_jobs_print_what_one_process_prints(runs, options, capfd):
    for target, expected in (("twin", 0), ("faulty", 1), ("damaged", 2)):
        words = ["compare", str(runs / "run"), str(runs / target)]
        verify = ["--verify"] if target == "damaged" and "--verify" not in options else []
        assert main([*words, *options, *verify]) == expected
        printed = capfd.readouterr()
        assert main([*words, *options[2:], *verify]) == expected
        assert capfd.readouterr() == printed


def test_mpiexec_prints_one_verdict(runs):
    needs_mpi()
    alone = command(runs / "run", runs / "faulty")
    both = command(runs / "run", runs / "faulty", processes=2)
    damaged = command(runs / "run", runs / "damaged", "--verify", processes=2)

    assert (both.returncode, both.stdout) == (alone.returncode, alone.stdout)
    assert both.returncode == 1
    assert damaged.returncode == 2
    assert damaged.stderr.count("segment-00000.arrow") == 1
    assert "Traceback" not in damaged.stderr


def test_mpiexec_without_mpi4py_is_told_what_to_do(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(os.environ, "PMI_SIZE", "2")

    assert main(["compare", str(runs / "run"), str(runs / "twin")]) == 2
    assert capsys.readouterr().err == (
        "mpiexec has started 2 processes, but mpi4py cannot be loaded\n"
        "  try  pip install upguard-plugin[mpi], or without mpiexec: --jobs 2\n"
    )


def test_an_incomplete_rank_is_said_by_all():
    baseline, target = train(num_steps=2, world=2), train(num_steps=2, world=2, name="target")
    target._ends = {1: RankEnd(False, "disk full")}

    answers = together(3, baseline, target)

    assert answers == [compare_runs(baseline, target)] * 3
    assert answers[0].verdict == "incomparable"


def test_what_is_read_again_gives_the_same_answer(monkeypatch):
    """Nothing but the rank in use stays in memory."""
    toy = {"world": 4, "num_steps": 3, "collectives": True}
    baseline = train(**toy)
    target = train(**toy, fault=flip("1/0/forward/head/output"), name="target")
    kept = compare_runs(baseline, target)
    monkeypatch.setattr(crew, "_MOST_KEPT", 0)
    num_reads = baseline.num_reads

    assert compare_runs(baseline, target) == kept
    assert baseline.num_reads - num_reads > num_reads
    assert kept.first_divergence.ranks == [0, 1, 2, 3]
