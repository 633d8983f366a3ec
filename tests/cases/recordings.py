"""The runs of the cases, each recorded once, and the processes that train them.

    with Recordings(folder) as recordings:
        baseline = recordings.of(case, "baseline")

Cases of one rank are trained in this process; those of several share one gloo job per number of
ranks, started when the first of them is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

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
            self.on_ranks(case.ranks_of(variant), train_one, case.module, variant, str(output))
        return output

    def on_ranks(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function of some module returns on each rank of a job."""
        if num_ranks == 1:
            return [function(*args)]
        if num_ranks not in self._jobs:
            self._jobs[num_ranks] = Ranks(num_ranks)
        return self._jobs[num_ranks].run(function, *args)

    def close(self) -> None:
        while self._jobs:
            self._jobs.popitem()[1].close()

    def __enter__(self) -> Recordings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def all_cases() -> list[Case]:
    """The cases of this folder, by number."""
    return sorted(_cases_in("tests.cases", "case_*.py"), key=lambda case: case.number)


def all_siblings() -> list[Case]:
    """Further bugs of the kinds that the cases are of."""
    return _cases_in("tests.cases.siblings", "[a-z]*.py")


def _cases_in(package: str, pattern: str) -> list[Case]:
    folder = Path(__file__).parent.parent.parent.joinpath(*package.split("."))
    return [import_module(f"{package}.{file.stem}").CASE for file in sorted(folder.glob(pattern))]
