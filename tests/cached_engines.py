"""Caches of hot rows around engines, for the tests of them on the CPU and on a device."""

from __future__ import annotations

import torch

from speedtransfer.engines import CachedEngine, HostEngine, LfuPolicy, StaticPolicy


def cached(capacity, policy="static", inner=None, planes=None, kind=CachedEngine, device="cpu", **options):
    """Return a cache of the last rows of planes of 30, or of those gathered last."""
    device = torch.device(device)
    if policy == "static":
        chosen = StaticPolicy(torch.arange(max(capacity, 30) - 1, -1, -1, device=device)[:capacity])
    else:
        chosen = LfuPolicy(device, every=1)
    return kind(inner or HostEngine("cpu"), chosen, capacity, planes, **options)


class Twice(CachedEngine):
    """Gathers everything twice, so that the second time rows come from the cache."""

    def gather(self, planes, index, rows, check=False, unsorted=False):
        super().gather(planes, index, rows, check, unsorted)
        for out in rows:
            out.view(torch.uint8).fill_(1)
        super().gather(planes, index, rows, check, unsorted)
