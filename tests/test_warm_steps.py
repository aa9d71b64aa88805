"""Every form of step that is counted and timed on a GPU can be built and made: here on the CPU."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from warm_steps import FORMS, Sizes


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:.*GradScaler")
def test_is_built_and_made(name, tmp_path):
    form = FORMS[name]
    if form.memory in ("pinned", "device"):
        form = dataclasses.replace(form, memory="pageable")
    step = form.build(Sizes(2600, 832, 8), torch.device("cpu"), tmp_path)
    for _ in range(2):
        step()
