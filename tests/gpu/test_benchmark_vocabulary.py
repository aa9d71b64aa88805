"""Suite `vocabulary` on a device: ids that lie there, in small tables."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.benchmark import vocabulary
from speedtransfer.benchmark.measure import measure

pytestmark = pytest.mark.gpu
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


def test_every_way_is_measured():
    device = torch.device("cuda")
    found = [measure(group, device, **FAST) for group in vocabulary.groups(device, True, rows=300)]
    assert not [case.error for group in found for case in group.cases if case.error]
    assert [len(group.ran) for group in found] == [7, 4, 6, 6, 2]
