"""Runs that were damaged, mixed up or made to mislead: never `identical` for what was not read."""

from __future__ import annotations

import os
import random
import shutil
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.memory_run import replace, written
from tests.toy_training import flip, train
from upguard_plugin.cli import main
from upguard_plugin.compare.driver import Comparison
from upguard_plugin.compare.selection import Selection
from upguard_plugin.compare.team import Alone
from upguard_plugin.errors import UpGuardError
from upguard_plugin.trace.reader import open_trace

NUM_MUTATIONS = int(os.environ.get("UPGUARD_FUZZ_EXAMPLES", "60"))
TOY = {"world": 2, "num_steps": 3, "num_blocks": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """`baseline`, its `twin`, `other` with another value, and `long` with one step more."""
    folder = tmp_path_factory.mktemp("runs")
    fault = flip("1/0/forward/head/output", rank=1)
    for name, options in (("baseline", {}), ("twin", {}), ("other", {"fault": fault})):
        written(train(**TOY, **options), folder / name)
    written(train(**(TOY | {"num_steps": 4})), folder / "long")
    return folder


def answer(runs: Path, target: Path, *, verify: bool = False) -> str:
    """The verdict's word, or "refused" where an error of ours came out."""
    comparison = Comparison(runs / "baseline", target, Selection(), verify=verify)
    try:
        return comparison.verdict(Alone()).verdict
    except UpGuardError as error:
        assert error.sentence and error.remedy
        return "refused"


def copied(runs: Path, name: str, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(runs / name, to))


def files_in(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


def mutated(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return bytes([rng.randrange(256)])
    place, other = sorted(rng.randrange(len(data)) for _ in range(2))
    return rng.choice(
        [
            data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :],
            data[:place],
            data[:place] + data[other:],
            data[:place] + data[other:] + data[place:other],
            data[:place] + rng.randbytes(9) + data[place:],
        ]
    )


def reads_like(run: Path, original: Path) -> bool:
    """Whether everything in the run can be read and is what the original holds."""
    mine, theirs = open_trace(run), open_trace(original)
    return mine.ranks == theirs.ranks and all(
        [*mine.steps(rank)] == [*theirs.steps(rank)]
        and all(
            mine.read(rank, entry.step, verify=True).keys
            == theirs.read(rank, entry.step, verify=True).keys
            for entry in theirs.steps(rank)
        )
        for rank in theirs.ranks
    )


@pytest.mark.parametrize("verify", [False, True])
def test_a_mutated_run_is_identical_only_where_it_reads_like_the_original(runs, tmp_path, verify):
    rng, words = random.Random(verify), set()
    for _ in range(NUM_MUTATIONS):
        target = copied(runs, "twin", tmp_path / "target")
        path = rng.choice(files_in(target))
        path.write_bytes(mutated(rng, path.read_bytes()))

        word = answer(runs, target, verify=verify)

        words.add(word)
        if word == "identical" and verify:
            assert reads_like(target, runs / "twin")
        if word == "identical":  # without it digests count as reading; they are in the index
            steps = [[*open_trace(run).steps(1)] for run in (target, runs / "twin")]
            assert steps[0] == steps[1]
    assert {"refused", "identical"} >= words >= {"refused"}


def test_a_missing_file_is_never_identical(runs, tmp_path):
    """`claim.json` only tells who records there: a run may be copied without it."""
    for path in files_in(runs / "twin"):
        if path.name == "claim.json":
            continue
        target = copied(runs, "twin", tmp_path / "target")
        (target / path.relative_to(runs / "twin")).unlink()

        assert answer(runs, target, verify=True) in ("refused", "incomparable"), path.name


def test_files_of_another_run_are_noticed(runs, tmp_path):
    for stranger in ("other", "long", "baseline"):
        for path in files_in(runs / stranger):
            name = path.relative_to(runs / stranger)
            target = copied(runs, "twin", tmp_path / "target")
            target.joinpath(name).write_bytes(path.read_bytes())

            word = answer(runs, target, verify=True)

            assert word != "divergent", (stranger, name)
            if word == "identical":
                assert reads_like(target, runs / "twin"), (stranger, name)


def test_files_of_another_rank_are_noticed(runs, tmp_path):
    for here, there in permutations(("rank00000", "rank00001")):
        for path in files_in(runs / "twin" / there):
            target = copied(runs, "twin", tmp_path / "target")
            (target / here / path.name).write_bytes(path.read_bytes())

            word = answer(runs, target, verify=True)

            assert word == "refused" or (
                word == "identical" and reads_like(target, runs / "twin")
            ), path


def test_exchanged_ranks_are_refused(runs, tmp_path):
    target = copied(runs, "twin", tmp_path / "target")
    for old, new in (("rank00000", "x"), ("rank00001", "rank00000"), ("x", "rank00001")):
        (target / old).rename(target / new)

    assert answer(runs, target) == "refused"


@pytest.mark.parametrize("name", ["rank00001", "rank00001/segment-00000.arrow", "manifest.json"])
def test_what_leads_out_of_the_run_is_not_followed(runs, tmp_path, name):
    """The link leads to the very same bytes: without it the runs are identical."""
    target = copied(runs, "twin", tmp_path / "target")
    assert answer(runs, target, verify=True) == "identical"
    elsewhere = tmp_path / "elsewhere"
    (target / name).rename(elsewhere)
    (target / name).symlink_to(elsewhere)

    assert answer(runs, target, verify=True) in ("refused", "incomparable")


def test_names_in_a_trace_are_words_and_no_paths(runs, tmp_path, capsys):
    """Boundaries, operators and sources may be anything; the report prints them."""
    names = ["../../../etc/passwd", "\x1b[31mred", "a\nb", "%s%n", "", "\u202e", "x" * 5000]
    for run, change in (("hostile", 0), ("changed", 1)):
        toy = train(**TOY)
        for listed in toy.batches.values():
            for step, made in listed.items():
                keys = [
                    replace(key, boundary=names[i % len(names)], operator=names[-i % len(names)])
                    for i, key in enumerate(made.keys)
                ]
                listed[step] = replace(made, keys=keys, h=made.h + np.uint64(change * step))
        written(toy, tmp_path / run)
    before = sorted(path for path in tmp_path.rglob("*"))

    codes = [
        main(["compare", str(tmp_path / "hostile"), str(tmp_path / other), "--verify", "--verbose"])
        for other in ("hostile", "changed")
    ]

    printed = capsys.readouterr()
    assert (codes, printed.err) == ([0, 1], "")
    assert all(line.isprintable() for line in printed.out.splitlines())
    assert "a\\nb" in printed.out and "\\x1b[31mred" in printed.out
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_entries_that_are_no_ranks_are_left_alone(runs, tmp_path):
    target = copied(runs, "twin", tmp_path / "target")
    for name in ("rank1", "rank000001", "rank-0001", "rank00002x", "..rank00000", "tensors"):
        (target / name).mkdir()
    (target / "rank00005").write_text("a file")

    assert answer(runs, target, verify=True) == "identical"
