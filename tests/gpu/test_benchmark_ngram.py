"""Suite `ngram` on a device: small tables that all methods can hold, and the large ones in small forms."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from speedtransfer.benchmark import ngram
from speedtransfer.benchmark.measure import measure

pytestmark = pytest.mark.gpu
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


def test_every_way_is_measured(monkeypatch):
    device = torch.device("cuda")
    # Attention of plain operations, and no sparse gradients of torch: a device that is emulated has neither.
    monkeypatch.setattr(ngram, "PLAIN", (ngram.DENSE,))
    with sdpa_kernel(SDPBackend.MATH):
        found = [measure(group, device, **FAST) for group in ngram.groups(device, True, rows=3000)]
    assert [[case.error for case in group.cases if case.error] for group in found] == [[], [], []]
    assert [len(group.ran) for group in found] == [8, 4, 4]
    for group in found:
        assert all(case.figures["moved_bytes"] > 0 for case in group.ran if case.role == "ours")
