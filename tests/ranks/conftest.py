"""Fixtures that run a function on several ranks; see run.py."""

import pytest

from ranks.run import Pool, Ranks


@pytest.fixture(scope="session")
def two(pool: Pool) -> Ranks:
    return pool.of(2)


@pytest.fixture(scope="session")
def three(pool: Pool) -> Ranks:
    return pool.of(3)
