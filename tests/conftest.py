"""What every test shares. pytest puts this folder on the path, so tests import its helper modules by name."""

import pytest
import torch

pytest.register_assert_rewrite("cases", "engine_cases", "table_cases")


@pytest.fixture
def device():
    """The compute device of the tests; tests/gpu has its own."""
    return torch.device("cpu")
