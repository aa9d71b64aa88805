"""What is measured on a CUDA device, and the choice by it: whatever is chosen, the results are the same bits, in order."""

import itertools

import pytest
import torch
from test_engines_auto import cache  # noqa: F401 - a fixture

import speedtransfer as st
from gpu.tools import hold
from speedtransfer.engines import auto
from speedtransfer.engines.calibration import PLANE_BYTES, Calibration, Point, machine_of, remember
from speedtransfer.engines.timing import NUM_ROWS, ROW_BYTES
from speedtransfer.planning.this_machine import this_machine

NAMES = ("mapped", "staged")


def choose(device, gather, scatter):
    """Let these engines be the fastest for every call."""
    points = []
    for direction, fastest in (("gather", gather), ("scatter", scatter)):
        points.append(Point(direction, 256, 1000, {name: 1e-6 if name == fastest else 1.0 for name in NAMES}))
    remember(device, Calibration(machine_of(device), points))


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


@pytest.mark.parametrize(("first", "then"), [*itertools.permutations(NAMES, 2)], ids="-".join)
def test_the_order_is_kept(device, first, then):
    """One engine still moves rows when another is chosen for the next call."""
    table, side = st.Table(1000, 64, memory="pinned", device=device).fill_(1), torch.cuda.Stream()
    index, rows = torch.arange(1000, device=device), torch.zeros(1000, 64, device=device)
    torch.cuda.synchronize()
    choose(device, then, first)
    with torch.cuda.stream(side):
        hold(side, 50)
        rows.fill_(5)
        table.scatter(index, rows, check=False)
    assert table.gather(index).eq(5).all()
    choose(device, first, then)
    with torch.cuda.stream(side):
        hold(side, 50)
        out = table.gather(index)
    table.scatter(index, rows + 2, check=False)
    side.synchronize()
    assert out.eq(5).all()
    assert table.torch().eq(7).all()
