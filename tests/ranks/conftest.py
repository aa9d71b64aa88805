"""Fixtures that run a function on several ranks; see run.py."""

import pytest

from ranks.run import Pool, Ranks


@pytest.fixture(scope="session")
def two(pool: Pool) -> Ranks:
    return pool.of(2)


@pytest.fixture(scope="session")
def three(pool: Pool) -> Ranks:
    return pool.of(3)


# By three, which rows and sizes are seldom divided by.
@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, pool: Pool) -> Ranks:
    return pool.of(request.param)
