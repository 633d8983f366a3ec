from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cases.recordings import Recordings


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recordings]:
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    with Recordings(tmp_path_factory.mktemp("cases")) as recordings:
        yield recordings
