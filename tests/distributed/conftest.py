from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pool, Ranks


@pytest.fixture(scope="session")
def pool_of_two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture
def two_ranks(pool_of_two: Pool) -> Ranks:
    """Two ranks that import torch once for all tests."""
    return pool_of_two.get()


@pytest.fixture(scope="session")
def deepspeed_pool() -> Iterator[Pool]:
    pool = Pool(2, timeout_s=240)  # the import of DeepSpeed alone may take long
    yield pool
    pool.close()


@pytest.fixture
def deepspeed_ranks(deepspeed_pool: Pool) -> Ranks:
    """Two ranks that import DeepSpeed once for all tests."""
    return deepspeed_pool.get()


@pytest.fixture(scope="session")
def parallel_pool() -> Iterator[Pool]:
    pool = Pool(2, timeout_s=240)
    yield pool
    pool.close()


@pytest.fixture
def parallel_ranks(parallel_pool: Pool) -> Ranks:
    """Two ranks for trainings that leave groups and modes of DeepSpeed behind."""
    return parallel_pool.get()
