"""What is measured on a CUDA device. The choice by it, and the order that this needs: tests/test_engines_auto.py."""

import itertools

import torch
from test_engines_auto import cache  # noqa: F401 - a fixture

from speedtransfer.engines import auto
from speedtransfer.engines.calibration import PLANE_BYTES
from speedtransfer.engines.timing import NUM_ROWS, ROW_BYTES
from speedtransfer.planning.this_machine import this_machine


def test_both_engines_at_every_size(device):
    measured = auto.calibrate_device(device, sizes=[PLANE_BYTES])
    sizes = {(point.direction, point.row_bytes) for point in measured.points}
    assert sizes == set(itertools.product(("gather", "scatter"), ROW_BYTES))
    for point in measured.points:
        assert set(point.seconds) == {"mapped", "staged"}, point
        assert 1e-6 < min(point.seconds.values()) <= max(point.seconds.values()) < 10, point
        assert 1 <= point.num_rows <= max(NUM_ROWS)
    assert measured.copy_bytes_per_s > 1e9


def test_a_plan_finds_free_memory_and_rates(device):
    before = torch.cuda.memory_allocated(device)
    machine = this_machine(rates=["device", "link"])
    assert machine.device == torch.cuda.get_device_name(device)
    assert machine.devices == torch.cuda.device_count()
    assert 0 < machine.device_bytes <= torch.cuda.mem_get_info(device)[1]
    for name in ("device_bytes_per_s", "link_up_bytes_per_s", "link_down_bytes_per_s"):
        assert getattr(machine, name) > 0, machine.notes
        assert machine.sources[name].startswith("measured")
    assert torch.cuda.memory_allocated(device) == before
