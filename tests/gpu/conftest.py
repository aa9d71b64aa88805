"""Everything in this folder needs a CUDA device, and is skipped with the reason where there is none."""

from pathlib import Path

import pytest
import torch

from speedtransfer.device import cuda_status

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` selects
def pytest_collection_modifyitems(items):
    reason = cuda_status().reason
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"no CUDA: {reason}"))


@pytest.fixture
def device():
    """The compute device of the tests."""
    return torch.device("cuda", torch.cuda.current_device())
