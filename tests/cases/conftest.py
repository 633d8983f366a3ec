from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.recordings import Recordings


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recordings]:
    with Recordings(tmp_path_factory.mktemp("cases")) as recordings:
        yield recordings
