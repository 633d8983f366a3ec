"""Across layouts, too, several processes give the answer that one gives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compare.teams import command, needs_mpi, together
from tests.layouts.split_runs import NUM_LOGICAL, Mesh, split_run
from tests.memory_run import MemoryRun, written
from upguard_plugin.cli import main
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import TraceError, UsageError

MESHES = [Mesh(), Mesh(tp=2), Mesh(dp=2), Mesh(tp=2, dp=2), Mesh(tp=4), Mesh(tp=4, dp=2)]
FLIPS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 20)),
    st.integers(1, 9),
    max_size=3,
)


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_every_logical_tensor_of_two_clean_runs_is_compared_and_equal(mesh):
    verdict = compare_runs(split_run(Mesh()), split_run(mesh, name="target"))

    assert verdict.verdict == "identical", verdict.first_divergence
    assert (verdict.coverage.compared, verdict.coverage.differ) == (2 * NUM_LOGICAL, 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(MESHES), st.sampled_from(MESHES), FLIPS, FLIPS, st.integers(1, 3),
    st.booleans(), st.booleans(), st.integers(2, 4),
)  # fmt: skip
def test_every_number_of_processes_gives_the_same_answer(
    ours, theirs, flips, other_flips, num_steps, sketch, exact, size
):
    baseline = split_run(ours, num_steps, flips=flips, sketch=sketch)
    target = split_run(theirs, num_steps, flips=other_flips, sketch=sketch, name="target")

    alone = compare_runs(baseline, target, exact=exact)
    answers = together(size, baseline, target, exact=exact)

    assert [answer.model_dump_json() for answer in answers] == [alone.model_dump_json()] * size


def test_noise_is_the_same_for_every_number_of_processes():
    """A repeat is one more run that the processes read."""
    baseline, target = split_run(Mesh(), 3), split_run(Mesh(tp=2, dp=2), 3, name="target")
    repeat = split_run(Mesh(), 3, flips={(0, 1, 3): 1}, name="repeat")

    alone = compare_runs(baseline, target, noise=[repeat])
    answers = together(3, baseline, target, noise=[repeat])

    assert alone.coverage.noise > 0
    assert answers == [alone] * 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_step_of_each_rank_is_read_once(size):
    baseline, target = split_run(Mesh(tp=4), 5), split_run(Mesh(tp=2, dp=2), 5, name="target")

    answers = together(size, baseline, target)

    assert {answer.verdict for answer in answers} == {"identical"}
    assert (baseline.num_reads, target.num_reads) == (4 * 5, 4 * 5)


class Verified(MemoryRun):
    """Remembers whether it was read with its digests."""

    def read(self, rank, step, *, verify=False):
        self.__dict__.setdefault("verified", set()).add(verify)
        return super().read(rank, step, verify=verify)


@pytest.mark.parametrize("verify", [False, True])
def test_digests_are_verified_on_every_process_that_is_told_to(verify):
    made = split_run(Mesh(tp=2), 3)
    target = Verified({r: list(b.values()) for r, b in made.batches.items()}, layouts=made._layouts)

    together(2, split_run(Mesh(), 3), target, verify=verify)

    assert target.verified == {verify}


class Damaged(MemoryRun):
    """Step 2 of the last rank cannot be read."""

    def read(self, rank, step, *, verify=False):
        if (rank, step) == (self.ranks[-1], 2):
            raise TraceError("cannot read rank 3: it is damaged", remedy="copy it again")
        return super().read(rank, step, verify=verify)


def damaged(run: MemoryRun) -> Damaged:
    batches = {rank: list(listed.values()) for rank, listed in run.batches.items()}
    return Damaged(batches, "target", layouts=run._layouts)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_error_on_one_process_is_the_answer_of_all(size):
    baseline, target = split_run(Mesh(), 3), damaged(split_run(Mesh(tp=2, dp=2), 3))

    answers = together(size, baseline, target)

    assert [str(answer) for answer in answers] == [
        "cannot read rank 3: it is damaged\n  try  copy it again"
    ] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_lies_behind_a_divergence_may_be_damaged(size):
    """It is perhaps read ahead, but nobody asks for it."""
    target = damaged(split_run(Mesh(tp=2, dp=2), 3, flips={(0, 0, 4): 1}))

    answers = together(size, split_run(Mesh(), 3), target)

    assert [answer.verdict for answer in answers] == ["divergent"] * size


def test_an_error_of_the_first_process_alone_is_the_answer_of_all():
    asked = Selection.parse(ranks="0")

    answers = together(3, split_run(Mesh()), split_run(Mesh(tp=2)), selection=asked)

    assert [type(answer) for answer in answers] == [UsageError] * 3
    assert {str(answer).partition(":")[0] for answer in answers} == {
        "--ranks cannot be used across layouts"
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs on disk: one rank, two clean layouts, one with a fault."""
    folder = tmp_path_factory.mktemp("runs")
    written(split_run(Mesh(dp=2), 3), folder / "baseline")
    written(split_run(Mesh(tp=2, dp=2), 3), folder / "clean")
    written(split_run(Mesh(tp=2, dp=2), 3, flips={(3, 1, 4): 1}), folder / "faulty")
    written(split_run(Mesh(tp=2, dp=2), 3), folder / "damaged")
    segment = folder / "damaged" / "rank00003" / "segment-00000.arrow"
    segment.write_bytes(segment.read_bytes()[:-40])
    return folder


def test_jobs_print_what_one_process_prints(folder, capfd):
    for target, expected in (("clean", 0), ("faulty", 1), ("damaged", 2)):
        words = ["compare", "--format", "json", str(folder / "baseline"), str(folder / target)]
        assert main(words) == expected
        alone = capfd.readouterr()
        assert main([*words, "--jobs", "3"]) == expected
        assert capfd.readouterr() == alone


def test_mpiexec_prints_one_verdict(folder):
    needs_mpi()
    words = [folder / "baseline", folder / "faulty", "--format", "json"]
    alone = command(*words)
    both = command(*words, processes=2)
    damaged = command(folder / "baseline", folder / "damaged", processes=2)

    assert (both.returncode, both.stdout) == (alone.returncode, alone.stdout)
    assert both.returncode == 1
    assert damaged.returncode == 2
    assert damaged.stderr.count("segment-00000.arrow") == 1
    assert "Traceback" not in damaged.stderr
