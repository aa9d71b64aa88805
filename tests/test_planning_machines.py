"""Machines as plans know them: published, from YAML files, and this one; and files of prices."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speedtransfer.cuda import cuda_status
from speedtransfer.cuda.status import CudaStatus
from speedtransfer.engines.calibration import Calibration
from speedtransfer.errors import DeviceError, InvalidValueError, StorageError
from speedtransfer.page_cache import PagesStayError
from speedtransfer.planning import this_machine as module
from speedtransfer.planning.machine import (
    link_rates,
    load_machines,
    machine_given,
    published_machines,
)
from speedtransfer.planning.rank import (
    Price,
    read_prices,
)
from speedtransfer.planning.this_machine import this_machine
from speedtransfer.units import parse_bytes

ROOT = Path(__file__).parents[1]


# --- published ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", published_machines(), ids=lambda m: m.name)
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


def test_names():
    assert machine_given("H200") == machine_given("h200")
    for name, words in (("h20", "did you mean 'h200'"), ("nothing", "choose from 'k80'"), ("", "choose from")):
        with pytest.raises(InvalidValueError, match=f"machine is '{name}', which is neither a name nor .*{words}"):
            machine_given(name)


@pytest.mark.parametrize(
    ("text", "name", "gb_per_s"),
    [
        ("pcie4 x8", "PCIe 4.0 x8", 15.754),
        ("PCIe Gen3 x16", "PCIe 3.0 x16", 15.754),
        ("PCI Express 2.0 x4", "PCIe 2.0 x4", 2.0),
        ("pcie-6-x16", "PCIe 6.0 x16", 121.0),
        ("nvlink c2c", "NVLink-C2C", 450.0),
    ],
)
def test_rates_of_links_by_the_standard(text, name, gb_per_s):
    found, up, down, source = link_rates(text)
    assert found == name
    assert f"of the {gb_per_s:.1f} GB/s of {name}" in source
    assert all(0.7 < rate / (1e9 * gb_per_s) < 0.9 for rate in (up, down))


@pytest.mark.parametrize(
    ("value", "per", "expected"),
    [
        (" 94 GiB ", "", 94 * 2**30),
        ("80_000", "", 80_000),
        (".5 kB", "", 500),
        (8e10, "", 80e9),
        ("55.6 GB/s", "/s", 55.6e9),
        ("much", "", "'much' but must be a size; write for instance 80 GB"),
        ("", "/s", "'' but must be a rate"),
        (True, "", "True but must be a size"),
        ("80 Gb/s", "/s", "has the unit 'Gb/s'; did you mean"),  # bits
        ("80 GB/s", "", "has the unit 'GB/s'; did you mean"),
        ("-1 GB", "", "must be finite and above 0"),
    ],
)
def test_sizes_and_rates_as_people_write_them(value, per, expected):
    if not isinstance(expected, str):
        assert parse_bytes(value, per) == expected
        return
    with pytest.raises(InvalidValueError, match=re.escape(expected)):
        parse_bytes(value, per)


# --- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def test_one_machine(file):
    lines = ["name: box", "device_bytes: 24 GB", "host_bytes: 94 GiB", "link: pcie gen4 x8", "devices: 2"]
    machine = machine_given(file("\n".join(lines)))
    assert (machine.name, machine.device_bytes, machine.host_bytes) == ("box", 24e9, 94 * 2**30)
    assert (machine.devices, machine.link) == (2, "PCIe 4.0 x8")
    assert machine.link_up_bytes_per_s == link_rates("pcie4 x8")[1]
    assert machine.sources["host_bytes"] == "given"
    assert "measured by" in machine.sources["link_up_bytes_per_s"]
    assert machine_given(file("device_bytes: 8e9", "machine")).device_bytes == 8e9


def test_based_on_a_published_one(file):
    text = "base: H200\nhost_bytes: 1 TB\nlink_up_bytes_per_s: 50 GB/s\nsource: our lab, 2026"
    machine, h200 = machine_given(file(text)), machine_given("h200")
    assert (machine.device_bytes, machine.link_up_bytes_per_s) == (h200.device_bytes, 50e9)
    assert machine.link_down_bytes_per_s == h200.link_down_bytes_per_s
    own = dict.fromkeys(("host_bytes", "link_up_bytes_per_s"), "our lab, 2026")
    assert machine.sources == {**h200.sources, **own}
    machine = machine_given(file("base: gh200\nhost_bytes: null\n"))  # what is not known
    assert machine.host_bytes is None
    assert "host_bytes" not in machine.sources


def test_another_link_has_other_rates(file):
    machine = machine_given(file("link: PCIe 4.0 x16\nlink_up_bytes_per_s: 20 GB/s"))
    assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (20e9, link_rates("PCIe 4.0 x16")[2])
    machine = machine_given(file("link: CXL 3\nlink_up_bytes_per_s: 60 GB/s\nlink_down_bytes_per_s: 50 GB/s"))
    assert (machine.link, machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == ("CXL 3", 60e9, 50e9)


def test_several(file):
    path = file("machines:\n  a: {base: l4, host_bytes: 64 GB}\n  b: {base: A, devices: 4}\n")
    assert [(m.name, m.devices, m.host_bytes) for m in load_machines(path)] == [("a", 1, 64e9), ("b", 4, 64e9)]
    with pytest.raises(InvalidValueError, match=r"mine\.yaml holds 2 machines; pass a file with the one"):
        machine_given(path)


def test_the_examples():
    machine = machine_given(str(ROOT / "examples" / "machine.yaml"))
    assert (machine.name, machine.devices, machine.host_bytes) == ("our-server", 2, 512e9)
    assert machine.device_bytes == machine_given("h100-pcie").device_bytes
    assert machine.link_up_bytes_per_s == machine_given("h100-pcie").link_up_bytes_per_s / 2
    prices = read_prices(ROOT / "examples" / "prices.yaml")
    assert {each.name for each in prices.values()} <= {machine.name for machine in published_machines()}
    assert all(each.source and "://" in each.source and len(each.date) >= 4 for each in prices.values())


def test_prices_of_a_file(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "H200: {device_price: 32_000, hourly_price: 3.79, machine_price: 2.5e5, devices: 8, currency: EUR, "
        "date: 2026-05-07, source: a list}\nl4: {device_price: 1, currency: EUR, date: 2026}"
    )
    found = read_prices(path)
    assert found["h200"] == Price("H200", 32_000, 2.5e5, 3.79, 8, "EUR", "2026-05-07", "a list")
    assert found["l4"] == Price("l4", 1, None, None, None, "EUR", "2026", None)


# Of a file of a machine; \\n begins a line.
BAD_MACHINES = r"""
- device: x -> a machine must be a mapping
1: 2 -> must be a mapping of words to values
a: [1 -> no YAML (while parsing a flow sequence
device: x\ndevice_byte: 1 -> has a key 'device_byte'; did you mean 'device_bytes'
device_bytes: 0 -> device_bytes is 0 but must be finite and above 0
device_bytes: yes -> device_bytes is True but must be a size
host_bytes_per_s: 5 GB -> host_bytes_per_s is '5 GB', which has the unit 'GB'
device: [1] -> device is [1] but must be plain text
device: !!python/object/apply:os.system [ls] -> no YAML (could not determine a constructor
devices: 0 -> devices is 0 but must be a whole number from 1 on
devices: null -> devices is null
link: PCI 5 -> link is 'PCI 5', whose rates are not known here
base: h20 -> base is 'h20'; did you mean 'h200'
sources: x -> `sources` must be a mapping
device: x\nsources: {device_bytes: y} -> `sources` has a key 'device_bytes'
machines: {} -> `machines` is empty
machines: [a] -> `machines` must be a mapping
machines:\n  a: 5 -> 'a' must be a mapping
machines:\n  a: {}\nmachine: 1 -> `machines` is empty or not alone
machines:\n  a:\n    base: a -> base is 'a'
"""
BAD_PRICES = r"""
{} -> has the currencies []
h200: 5 -> 'h200' must be a mapping
h200: {price: 5} -> has a key 'price'; choose from 'device_price'
h200: {device_price: 0} -> device_price is 0 but must be finite and above 0
h200: {device_price: 5, date: 2026} -> has no price or no currency
h200: {device_price: 5, currency: USD, date: May} -> date is 'May' but must be one
h200: {hourly_price: 5, currency: USD, date: 2026, devices: 0} -> devices is 0 but must be a whole
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
    (tmp_path / "folder.yaml").mkdir()
    for name in ("missing.yaml", "folder.yaml"):
        for read in (machine_given, read_prices):
            with pytest.raises(StorageError, match=rf"{name}' is no file that is there; check the path"):
                read(str(tmp_path / name))
    for text, words in (
        (" " * 2_000_000, "has more than 1,048,576 bytes, too many for a machine"),
        ("[" * 400, r"no YAML \("),
        (b"device: x\nname: \xff", r"no YAML \('utf-8' codec"),
        ("", "a machine must be a mapping"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            machine_given(file(text))


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


def failing(error):
    def fail(*args):
        raise error

    return fail


@pytest.mark.skipif(cuda_status().available, reason="CUDA works here")
def test_what_is_free_now(tmp_path, monkeypatch):
    for name in ("host_bytes_per_s", "device_bytes_per_s", "link_bytes_per_s", "disk_bytes_per_s"):
        monkeypatch.setattr(module, name, failing(RuntimeError("nobody has asked")))
    machine = this_machine(tmp_path)
    assert 0 < machine.host_bytes <= module.physical_bytes()
    assert machine.disk_bytes > 0
    assert (machine.device, machine.device_bytes, machine.devices) == (None, None, 1)
    assert (machine.host_bytes_per_s, machine.disk_bytes_per_s, machine.link_up_bytes_per_s) == (None, None, None)
    assert machine.sources == {"host_bytes": "measured", "disk_bytes": "measured"}
    assert any(note.startswith("no GPU is used: ") for note in machine.notes)
    assert not list(tmp_path.iterdir())


def test_what_a_system_does_not_say_is_a_note(monkeypatch, tmp_path):
    asked = []
    machine = this_machine(tmp_path / "missing", rates=["disk"])
    assert (machine.disk_bytes, machine.disk_bytes_per_s) == (None, None)
    assert sum("missing' is not known: No such file or directory" in note for note in machine.notes) == 2
    usage = lambda folder: asked.append(folder) or SimpleNamespace(free=7_000)  # noqa: E731
    monkeypatch.setattr(module.shutil, "disk_usage", usage)
    monkeypatch.setattr(module, "physical_bytes", lambda: 0)
    monkeypatch.chdir(tmp_path)
    machine = this_machine()  # of the current folder
    assert (machine.disk_bytes, asked, machine.host_bytes) == (7_000, [tmp_path], None)
    assert "host memory is not known: the system does not say" in machine.notes


def test_a_gpu(gpu, monkeypatch):
    machine = this_machine()
    assert (machine.device, machine.devices, machine.device_bytes) == ("GPU A", 2, 64e9)
    assert (
        "64 GB of 80 GB of cuda:0 are free; torch holds 5 GB in this process, and others and CUDA itself 11 GB"
        in machine.notes
    )
    monkeypatch.setattr(module, "load", lambda device: Calibration({}, [], 5.5e10))
    machine = this_machine()  # known without measuring
    assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (5.5e10, None)
    assert machine.sources["link_up_bytes_per_s"] == "measured by `speedtransfer calibrate`"
    monkeypatch.setattr(module, "load", lambda device: None)
    monkeypatch.setattr(module, "device_bytes_per_s", lambda device: 3e12)
    monkeypatch.setattr(module, "link_bytes_per_s", lambda device: (5e10, 6e10))
    machine = this_machine(rates=["device", "link"])
    assert machine.device_bytes_per_s == 3e12
    assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (5e10, 6e10)
    assert machine.sources["link_down_bytes_per_s"] == "measured"


def test_a_gpu_that_fails_is_a_note(gpu, monkeypatch):
    error = torch.cuda.OutOfMemoryError("CUDA out of memory.\nMore lines")
    monkeypatch.setattr(module, "device_bytes_per_s", failing(error))
    monkeypatch.setattr(module, "link_bytes_per_s", failing(DeviceError("the device is lost")))
    machine = this_machine(rates=["device", "link"])
    assert machine.device_bytes_per_s is machine.link_up_bytes_per_s is None
    assert "the bandwidth of cuda:0 is not known: CUDA out of memory." in machine.notes
    assert "the link to cuda:0 is not known: the device is lost" in machine.notes


def test_rates_of_the_host(small, monkeypatch):
    machine = this_machine(rates=["host"])
    assert 1e8 < machine.host_bytes_per_s < 1e13
    assert machine.sources["host_bytes_per_s"] == "measured"
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
    if os.path.isdir("/dev/shm"):
        machine = this_machine("/dev/shm", rates=["disk"])
        assert machine.disk_bytes_per_s is None
        assert any("stay in memory after they were dropped" in note for note in machine.notes)
    monkeypatch.setattr(module.os, "write", failing(OSError(28, "No space left on device")))
    machine = this_machine(tmp_path, rates=["disk"])
    assert machine.disk_bytes_per_s is None
    assert any("is not known: No space left on device" in note for note in machine.notes)
    monkeypatch.delattr(os, "posix_fadvise")
    with pytest.raises(PagesStayError, match="this needs Linux"):
        module.disk_bytes_per_s(tmp_path)
