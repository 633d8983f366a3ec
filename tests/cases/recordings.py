"""The runs of the cases, each recorded once, and the processes that train them.

    with Recordings(folder) as recordings:
        baseline = recordings.of(case, "baseline")

Cases of one rank are trained in this process; those of several share one gloo job per number of
ranks, started when the first of them is trained.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.cases.case import Case, train_one
from tests.distributed.ranks import Ranks


class Recordings:
    """Recorded runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[int, Ranks] = {}

    def of(self, case: Case, variant: str) -> Path:
        """Where the run of a variant is; it is trained at the first call."""
        output = self._folder / case.module.rpartition(".")[2] / variant
        if not output.exists():
            if case.num_ranks == 1:
                train_one(case.module, variant, str(output))
            else:
                self._job(case.num_ranks).run(train_one, case.module, variant, str(output))
        return output

    def _job(self, num_ranks: int) -> Ranks:
        if num_ranks not in self._jobs:
            self._jobs[num_ranks] = Ranks(num_ranks)
        return self._jobs[num_ranks]

    def close(self) -> None:
        while self._jobs:
            self._jobs.popitem()[1].close()

    def __enter__(self) -> Recordings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def all_cases() -> list[Case]:
    """The cases of this folder, by number."""
    files = Path(__file__).parent.glob("case_*.py")
    cases = [import_module(f"tests.cases.{file.stem}").CASE for file in files]
    return sorted(cases, key=lambda case: case.number)
