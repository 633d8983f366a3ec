from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def deepspeed_pool() -> Iterator[list[Ranks]]:
    pool: list[Ranks] = []
    yield pool
    for ranks in pool:
        ranks.close()


@pytest.fixture
def deepspeed_ranks(deepspeed_pool: list[Ranks]) -> Ranks:
    """Two ranks that import DeepSpeed once for all tests; new ones where a call has failed."""
    while deepspeed_pool and not deepspeed_pool[0].usable:
        deepspeed_pool.pop().close()
    if not deepspeed_pool:
        deepspeed_pool.append(Ranks(2, timeout_s=240))  # the import alone may take long
    return deepspeed_pool[0]
