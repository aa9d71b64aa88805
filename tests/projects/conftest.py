"""Warnings of the projects, unlike ours, are no errors; nothing here goes to the network."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", WANDB_DISABLED="true", TOKENIZERS_PARALLELISM="false")

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    files = {path for path in {item.path for item in items} if FOLDER in path.parents}
    for item in items:
        if item.path in files:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::speedtransfer"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    np.random.seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
