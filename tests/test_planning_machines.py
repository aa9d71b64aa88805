"""Machines as plans know them: published, from YAML files, and this one; and their order, by prices too."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from cases import raising

from speedtransfer.cuda import cuda_status
from speedtransfer.cuda.status import CudaStatus
from speedtransfer.engines.calibration import Calibration
from speedtransfer.errors import DeviceError, InvalidValueError, StorageError
from speedtransfer.nn.sizing import table_size
from speedtransfer.page_cache import PagesStayError
from speedtransfer.planning import this_machine as module
from speedtransfer.planning.estimate import estimate_step
from speedtransfer.planning.footprint import Form
from speedtransfer.planning.hosts import row_form
from speedtransfer.planning.machine import Machine, link_rates, load_machines, machine_given, published_machines
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.rank import MEASURES, Price, exchange_seconds, one_of, rank, read_prices, step_seconds
from speedtransfer.planning.this_machine import this_machine
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.cost import StepCost, expected_counts, sharded_step
from speedtransfer.units import parse_bytes

ROOT = Path(__file__).parents[1]


# --- published ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", published_machines().values(), ids=lambda m: m.name)
def test_each_has_what_a_gpu_has_with_a_source_and_a_year(machine):
    for name in ("device_bytes", "device_bytes_per_s", "link", "link_up_bytes_per_s", "link_down_bytes_per_s"):
        assert getattr(machine, name) is not None, name
    for field in dataclasses.fields(machine):
        if field.name.endswith(("_bytes", "_per_s")) and getattr(machine, field.name) is not None:
            assert re.search(r"\b20[12]\d\b", machine.sources[field.name]), field.name
    assert set(machine.sources) <= {field.name for field in dataclasses.fields(machine)}
    # No link beats its standard.
    _, up, down, source = link_rates(machine.link)
    standard = 1e9 * float(re.search(r"of the ([\d.]+) GB/s", source)[1])
    for rate in (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s, up, down):
        assert 0.4 * standard < rate < standard
    assert machine.device_bytes_per_s > machine.link_up_bytes_per_s
    # Host memory is that of whole machines.
    assert (machine.host_bytes is not None) == machine.name.startswith(("dgx", "g"))


@pytest.mark.parametrize(
    ("value", "per", "words"),
    [("much", "", "'much' but must be a size; write for instance 80 GB"), (True, "", "True but must be a size"),
     ("80 Gb/s", "/s", "has the unit 'Gb/s'; did you mean"), ("80 GB/s", "", "has the unit 'GB/s'; did you mean")],
)  # fmt: skip
def test_sizes_and_rates_as_people_write_them(value, per, words):
    assert (parse_bytes(" 94 GiB "), parse_bytes("55.6 GB/s", "/s")) == (94 * 2**30, 55.6e9)
    with pytest.raises(InvalidValueError, match=re.escape(words)):
        parse_bytes(value, per)


# --- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def test_machines_of_a_file(file):
    """With figures of their own, of a published machine or one before them, and of a link."""
    text = """machines:
  a: {base: H200, host_bytes: 94 GiB, link_up_bytes_per_s: 50 GB/s, source: "our lab, 2026"}
  b: {base: A, devices: 4, link: pcie gen4 x8, host_bytes: null}
  c: {link: CXL 3, link_up_bytes_per_s: 60 GB/s, link_down_bytes_per_s: 50 GB/s}"""
    first, second, third = load_machines(file(text))
    h200 = machine_given("h200")
    assert (first.name, first.device_bytes, first.host_bytes) == ("a", h200.device_bytes, 94 * 2**30)
    assert (first.link_up_bytes_per_s, first.link_down_bytes_per_s) == (50e9, h200.link_down_bytes_per_s)
    own = dict.fromkeys(("host_bytes", "link_up_bytes_per_s"), "our lab, 2026")
    assert first.sources == {**h200.sources, **own}
    assert (second.devices, second.host_bytes, second.link) == (4, None, "PCIe 4.0 x8")
    assert "host_bytes" not in second.sources
    assert second.link_up_bytes_per_s == link_rates("pcie4 x8")[1]
    assert "measured by" in second.sources["link_up_bytes_per_s"]
    assert (third.link, third.link_down_bytes_per_s) == ("CXL 3", 50e9)
    with pytest.raises(InvalidValueError, match=r"mine\.yaml holds 3 machines; pass a file with the one"):
        machine_given(file(text))


def test_the_examples():
    machine = machine_given(str(ROOT / "examples" / "machine.yaml"))
    assert (machine.name, machine.devices, machine.host_bytes) == ("our-server", 2, 512e9)
    assert machine.device_bytes == machine_given("h100-pcie").device_bytes
    assert machine.link_up_bytes_per_s == machine_given("h100-pcie").link_up_bytes_per_s / 2
    prices = read_prices(ROOT / "examples" / "prices.yaml")
    assert {each.name for each in prices.values()} <= {machine.name for machine in published_machines().values()}
    assert all(each.source and "://" in each.source and len(each.date) >= 4 for each in prices.values())


# Of a file of a machine; \\n begins a line.
BAD_MACHINES = r"""
- device: x -> a machine must be a mapping
a: [1 -> no YAML (while parsing a flow sequence
device: x\ndevice_byte: 1 -> has a key 'device_byte'; did you mean 'device_bytes'
device_bytes: yes -> device_bytes is True but must be a size
device: !!python/object/apply:os.system [ls] -> no YAML (could not determine a constructor
devices: 0 -> devices is 0 but must be a whole number from 1 on
link: PCI 5 -> link is 'PCI 5', whose rates are not known here
base: h20 -> base is 'h20'; did you mean 'h200'
machines:\n  a:\n    base: a -> base is 'a'
"""
BAD_PRICES = r"""
{} -> has the currencies []
h200: {price: 5} -> has a key 'price'; choose from 'device_price'
h200: {device_price: 5, currency: USD, date: May} -> date is 'May' but must be one
a: &a {device_price: 5, currency: USD, date: 2026}\nb: {<<: *a, currency: EUR} -> ['EUR', 'USD']; convert all prices to one
"""
BAD_FILES = [(load_machines, line) for line in BAD_MACHINES.strip().splitlines()]
BAD_FILES += [(read_prices, line) for line in BAD_PRICES.strip().splitlines()]


@pytest.mark.parametrize(("read", "line"), BAD_FILES, ids=[line for _, line in BAD_FILES])
def test_every_mistake_names_the_file_in_one_line(file, read, line):
    text, words = line.replace(r"\n", "\n").split(" -> ")
    path = file(text)
    with pytest.raises(InvalidValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(path)
    assert words in message
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path, file):
    with pytest.raises(StorageError, match=r"cannot read .*missing\.yaml' .*; check the path"):
        read_prices(str(tmp_path / "missing.yaml"))
    with pytest.raises(InvalidValueError, match="has more than 1,048,576 bytes, too many for a machine"):
        machine_given(file(" " * 2_000_000))


# --- this machine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Measurements of a few megabytes and milliseconds."""
    monkeypatch.setattr(module, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_FILE_BYTES", 8 << 20)
    monkeypatch.setattr(module, "_PIECE_BYTES", 4 << 20)
    monkeypatch.setattr(module, "_BUDGET_S", 0.01)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of which the driver tells these figures; nothing can run on it."""
    status = CudaStatus(True, "", "14.2", "13.0", "13.0", ("GPU A", "GPU B"))
    monkeypatch.setattr(module, "cuda_status", lambda: status)
    monkeypatch.setattr(module, "load", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5_000_000_000)


@pytest.mark.skipif(cuda_status().available, reason="CUDA works here")
def test_what_is_free_now(tmp_path, monkeypatch):
    for name in ("host_bytes_per_s", "device_bytes_per_s", "link_bytes_per_s", "disk_bytes_per_s"):
        monkeypatch.setattr(module, name, raising(RuntimeError("nobody has asked")))
    machine = this_machine(tmp_path)
    assert 0 < machine.host_bytes <= module.physical_bytes()
    assert machine.disk_bytes > 0
    assert (machine.device, machine.device_bytes, machine.devices) == (None, None, 1)
    assert (machine.host_bytes_per_s, machine.disk_bytes_per_s, machine.link_up_bytes_per_s) == (None, None, None)
    assert machine.sources == {"host_bytes": "measured", "disk_bytes": "measured"}
    assert any(note.startswith("no GPU is used: ") for note in machine.notes)
    assert not list(tmp_path.iterdir())


def test_a_gpu(gpu, monkeypatch):
    machine = this_machine()
    assert (machine.device, machine.devices, machine.device_bytes) == ("GPU A", 2, 64e9)
    note = "64 GB of 80 GB of cuda:0 are free; torch holds 5 GB in this process, and others and CUDA itself 11 GB"
    assert note in machine.notes
    monkeypatch.setattr(module, "load", lambda device: Calibration({}, [], 5.5e10))
    machine = this_machine()  # known without measuring
    assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (5.5e10, None)
    assert machine.sources["link_up_bytes_per_s"] == "measured by `speedtransfer calibrate`"
    monkeypatch.setattr(module, "load", lambda device: None)
    monkeypatch.setattr(module, "device_bytes_per_s", raising(DeviceError("the device is lost.\nMore lines")))
    monkeypatch.setattr(module, "link_bytes_per_s", lambda device: (5e10, 6e10))
    machine = this_machine(rates=["device", "link"])
    assert machine.device_bytes_per_s is None
    assert "the bandwidth of cuda:0 is not known: the device is lost." in machine.notes
    assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (5e10, 6e10)
    assert machine.sources["link_down_bytes_per_s"] == "measured"


def test_rates_of_the_host(small, monkeypatch):
    assert 1e8 < this_machine(rates=["host"]).host_bytes_per_s < 1e13
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    machine = this_machine(rates=["host"])
    assert machine.host_bytes_per_s is None
    assert any("1 kB of memory are left, too few" in note for note in machine.notes)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux")
def test_rates_of_a_disk(small, tmp_path, monkeypatch):
    try:
        rate = module.disk_bytes_per_s(tmp_path)
    except PagesStayError:
        pytest.skip("the folder of tests lives in memory")
    assert 1e3 < rate < 1e13
    assert not list(tmp_path.iterdir()), "the file had no name"
    monkeypatch.setattr("speedtransfer.page_cache.share_in_memory", lambda blocks: 0.5)
    machine = this_machine(tmp_path, rates=["disk"])
    assert machine.disk_bytes_per_s is None
    assert any("50% of the pages stay in memory after they were dropped" in note for note in machine.notes)


# --- machines in order: by a step's time, bandwidth or price, each with the best configuration on it ------------------


def moved(machine):
    """A step that brings bytes over the link and reads them in the GPU's memory; 20 GB must fit."""
    if machine.figure("device_bytes") < 20e9:
        raise InvalidValueError(f"it needs 20 GB but {machine.name} has {machine.figure('device_bytes') / 1e9:g}")
    return 1e9 / machine.figure("link_up_bytes_per_s") + 1e9 / machine.figure("device_bytes_per_s")


def price(name, devices=None, *prices):
    return {name.lower(): Price(name, *prices, devices=devices, currency="USD", date="2026", source=None)}


SLOW = Machine("slow", "a GPU", 24e9, 1e12, link="bus", link_up_bytes_per_s=1e10, link_down_bytes_per_s=1e10)
FAST = Machine("fast", "a GPU", 24e9, 5e11, link="bus", link_up_bytes_per_s=5e10, link_down_bytes_per_s=5e10)
SMALL = Machine("small", "a GPU", 8e9, 1e11, link_up_bytes_per_s=1e9)
CHEAP = price("slow", None, 100, 1000, 1) | price("fast", None, 1000, 2000, 3)  # steps of 0.101 and 0.022 s


def names(ranking):
    return [each.machine.name for each in ranking.ranked]


@pytest.mark.parametrize("by", ["time", "bandwidth", "device-price", "machine-price", "hour"])
def test_each_order(by):
    """What has no price comes last, by the time; what does not fit is left out, with the reason."""
    last = Machine("last", "a GPU", 24e9, 1e10, link_up_bytes_per_s=1e8)
    ranking = rank([SLOW, last, FAST, SMALL, Machine("empty")], moved, by=by, prices=CHEAP)
    slow_first = by in ("bandwidth", "device-price")  # 9.9 / 100 and 45 / 1000
    assert names(ranking) == [*(["slow", "fast"] if slow_first else ["fast", "slow"]), "last"]
    values = [MEASURES[by].value(each) for each in ranking.ranked[:2]]
    assert values == sorted(values, reverse=True)
    (small, reason), (_, unknown) = ranking.left_out
    assert (small, reason) == (SMALL, "it needs 20 GB but small has 8")
    assert "machine 'empty' has no figure device_bytes" in unknown


def test_what_makes_no_sense():
    with pytest.raises(InvalidValueError, match=r"no machine that fits has a hourly_price; .* \(--prices"):
        rank([SLOW, FAST], moved, by="hour")
    with pytest.raises(InvalidValueError, match="for 'fst', which is not a machine; did you mean 'fast'"):
        rank([SLOW, FAST], moved, prices=price("fst", None, 1, None, None))


# --- by the best configuration ------------------------------------------------------------------------------------------

BIG = Machine("big", "Test GPU", 90e9, 2e12, host_bytes=500e9, host_bytes_per_s=1e11, peer_bytes_per_s=1e11)
BIG = dataclasses.replace(BIG, link_up_bytes_per_s=2e10, link_down_bytes_per_s=2e10)
FOUR = dataclasses.replace(BIG, name="four", devices=4)


def of(rows, optimizer="AdamW", batch=1_000_000):
    return make_workload((rows, 64), optimizer_given(optimizer), batch, 4, 0.0, None, "exact")


def rank_machines(workload, machines):
    return rank(machines, lambda machine: step_seconds(workload, [Form()], machine))


def test_the_best_configuration_counts():
    narrow = dataclasses.replace(BIG, name="narrow", device_bytes=20e9, link_up_bytes_per_s=1e10)
    ranking = rank_machines(of(100_000_000), [narrow, BIG])
    assert names(ranking) == ["big", "narrow"]
    # 77 GB of planes: on the device of the one, in host memory of the other.
    for memory, machine, found in zip(("device", "pinned"), (BIG, narrow), ranking.ranked, strict=True):
        wanted = estimate_step(of(100_000_000), Form(), memory, machine)
        assert found.seconds == pytest.approx(wanted.ahead_s)


def test_several_gpus_share_the_rows_out():
    workload = of(100_000_000)
    found = rank_machines(workload, [FOUR]).ranked[0]
    table = workload.tables[0]
    # Uniform ids: 16 million lookups of 4 processes, and of one 4 million.
    share = 1e8 * (1 - (1 - 1e-8) ** 16e6) / (4 * table.unique)
    cost = sharded_step([expected_counts(row_form(table_size(1, 64)), table.unique, share, 4)], 4)
    features, unique = ((25_000_000, 4_000_000),), share * table.unique
    owned = dataclasses.replace(table, rows=25_000_000, features=features, unique=unique)
    alone = estimate_step(dataclasses.replace(workload, tables=(owned,)), Form(), "device", one_of(FOUR))
    assert found.seconds == pytest.approx(alone.ahead_s + exchange_seconds(FOUR, cost), rel=1e-6)
    assert found.performance == pytest.approx(4 / found.seconds)
    trained, frozen = (rank_machines(of(1_000_000, how), [FOUR]).ranked[0] for how in ("SGD", None))
    assert frozen.seconds < trained.seconds, "frozen tables send no gradients"


def test_what_one_process_has():
    box = Machine("box", devices=4, host_bytes=400e9, host_bytes_per_s=1e11, device_bytes=8e9)
    machine = one_of(box)
    assert (machine.devices, machine.host_bytes) == (1, 100e9)
    assert (machine.device_bytes, machine.host_bytes_per_s, machine.link_up_bytes_per_s) == (8e9, 2.5e10, None)
    machine = one_of(machine_given("gb200"))  # no link is faster than its share of host memory
    assert machine.link_up_bytes_per_s == machine.host_bytes_per_s == 381e9 / 2


def test_rate_between_gpus():
    cost = StepCost(ids=1e9, rows=2e9, gradients=1e9, calls=10)
    assert exchange_seconds(Machine("x", peer_bytes_per_s=4e9), cost) == pytest.approx(1.0005)
    by_host = Machine("x", link_up_bytes_per_s=2e10, link_down_bytes_per_s=2e10)
    assert exchange_seconds(by_host, cost) == pytest.approx(0.4005)
    with pytest.raises(InvalidValueError, match="has no figure link_down_bytes_per_s"):
        exchange_seconds(Machine("x"), cost)
