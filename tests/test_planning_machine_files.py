"""Machines by name and from YAML files: what may be written, and what every mistake is told."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.planning.machine import (
    PUBLISHED,
    link_rates,
    load_machines,
    machine_given,
    published_machines,
)
from speedtransfer.units import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIGURES = ("device_bytes", "device_bytes_per_s", "link", "link_up_bytes_per_s", "link_down_bytes_per_s")


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


class TestPublished:
    def test_those_that_people_ask_for(self):
        wanted = "h100-pcie h100-sxm h200 b200 gh200 gb200 gb300 a100-pcie a100-sxm a100-pcie-40gb a100-sxm-40gb"
        wanted += " l4 l40s a10 t4 v100-pcie rtx-4090 rtx-5090 rtx-3090 k80 dgx-h100"
        assert set(wanted.split()) <= {machine.name for machine in published_machines()}

    @pytest.mark.parametrize("machine", published_machines(), ids=lambda m: m.name)
    def test_each_has_what_a_gpu_has_with_a_source_and_a_year(self, machine):
        for name in FIGURES:
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

    def test_host_memory_is_that_of_whole_machines(self):
        with_host = {machine.name for machine in published_machines() if machine.host_bytes is not None}
        assert with_host == {m.name for m in published_machines() if m.name.startswith(("dgx", "g"))}

    def test_names(self):
        assert machine_given("H200") == machine_given("h200")
        for name, words in (("h20", "did you mean 'h200'"), ("nothing", "choose from 'k80'"), ("", "choose from")):
            with pytest.raises(InvalidValueError, match=f"machine is '{name}', which is neither a name nor") as caught:
                machine_given(name)
            assert words in str(caught.value)

    def test_is_in_the_wheel_and_yaml_is_loaded_where_it_is_needed(self):
        told = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        patterns = told["tool"]["setuptools"]["package-data"]["speedtransfer.planning"]
        assert any(PUBLISHED.match(pattern) for pattern in patterns)
        assert any(requirement.startswith("pyyaml") for requirement in told["project"]["dependencies"])
        code = "import sys, speedtransfer.planning.machine as m; a = 'yaml' in sys.modules; m.machine_given('t4')"
        code += "; print(a, 'yaml' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(
    ("text", "name", "gb_per_s"),
    [
        ("PCIe 5.0 x16", "PCIe 5.0 x16", 63.015),
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
    assert 0.7 < up / (1e9 * gb_per_s) < 0.9
    assert 0.7 < down / (1e9 * gb_per_s) < 0.9
    assert link_rates("PCIe 5.0 x8")[1] == pytest.approx(link_rates("PCIe 5.0 x16")[1] / 2)


@pytest.mark.parametrize(
    ("value", "per", "expected"),
    [
        ("80 GB", "", 80e9),
        (" 94 GiB ", "", 94 * 2**30),
        ("16gib", "", 2**34),
        ("80e9", "", 80e9),
        ("80_000", "", 80_000),
        (".5 kB", "", 500),
        (8e10, "", 80e9),
        ("55.6 GB/s", "/s", 55.6e9),
        ("2e10", "/s", 2e10),
        ("much", "", "'much' but must be a size; write for instance 80 GB"),
        ("", "/s", "'' but must be a rate"),
        (True, "", "True but must be a size"),
        ([1], "", "[1] but must be a size"),
        ("80 gb/s", "/s", "has the unit 'gb/s'; did you mean"),
        ("80 Gb/s", "/s", "has the unit 'Gb/s'; did you mean"),  # bits
        ("80 GB", "/s", "has the unit 'GB'; did you mean"),
        ("80 GB/s", "", "has the unit 'GB/s'; did you mean"),
        ("1 2", "", "has the unit '2'"),
        ("0", "", "must be finite and above 0; leave it out"),
        ("-1 GB", "", "must be finite and above 0"),
        ("nan", "", "must be finite and above 0"),
        (float("inf"), "", "must be finite and above 0"),
    ],
)
def test_sizes_and_rates_as_people_write_them(value, per, expected):
    if not isinstance(expected, str):
        assert parse_bytes(value, per) == expected
        return
    with pytest.raises(InvalidValueError) as caught:
        parse_bytes(value, per)
    assert expected in str(caught.value)


class TestFiles:
    def test_one_machine(self, file):
        lines = ["name: box", "device_bytes: 24 GB", "host_bytes: 94 GiB", "link: pcie gen4 x8", "devices: 2"]
        machine = machine_given(file("\n".join(lines)))
        assert (machine.name, machine.device_bytes, machine.host_bytes) == ("box", 24e9, 94 * 2**30)
        assert (machine.devices, machine.link) == (2, "PCIe 4.0 x8")
        assert machine.link_up_bytes_per_s == link_rates("pcie4 x8")[1]
        assert machine.sources["host_bytes"] == "given"
        assert "measured by" in machine.sources["link_up_bytes_per_s"]

    def test_any_file_that_is_there(self, file):
        assert machine_given(file("device_bytes: 8e9", "box.yml")).name == "box"
        assert machine_given(file("device_bytes: 8e9", "machine")).device_bytes == 8e9

    def test_based_on_a_published_one(self, file):
        text = "base: H200\nhost_bytes: 1 TB\nlink_up_bytes_per_s: 50 GB/s\nsource: our lab, 2026"
        machine, h200 = machine_given(file(text)), machine_given("h200")
        assert (machine.device_bytes, machine.link_up_bytes_per_s) == (h200.device_bytes, 50e9)
        assert machine.link_down_bytes_per_s == h200.link_down_bytes_per_s
        own = dict.fromkeys(("host_bytes", "link_up_bytes_per_s"), "our lab, 2026")
        assert machine.sources == {**h200.sources, **own}

    def test_another_link_has_other_rates(self, file):
        machine = machine_given(file("base: h200\nlink: PCIe 4.0 x16"))
        assert machine.link_up_bytes_per_s == link_rates("PCIe 4.0 x16")[1]
        assert "PCIe 4.0 x16" in machine.sources["link_up_bytes_per_s"]
        machine = machine_given(file("link: CXL 3\nlink_up_bytes_per_s: 60 GB/s\nlink_down_bytes_per_s: 50 GB/s"))
        assert (machine.link, machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == ("CXL 3", 60e9, 50e9)

    def test_null_is_what_is_not_known(self, file):
        machine = machine_given(file("base: gh200\nhost_bytes: null\n"))
        assert machine.host_bytes is None
        assert "host_bytes" not in machine.sources

    def test_several(self, file):
        path = file("machines:\n  a: {base: l4, host_bytes: 64 GB}\n  b: {base: A, devices: 4}\n")
        assert [(m.name, m.devices, m.host_bytes) for m in load_machines(path)] == [("a", 1, 64e9), ("b", 4, 64e9)]
        with pytest.raises(InvalidValueError, match=r"mine\.yaml holds 2 machines; pass a file with the one"):
            machine_given(path)

    def test_the_example(self):
        machine = machine_given(str(Path(__file__).parents[1] / "examples" / "machine.yaml"))
        assert (machine.name, machine.devices, machine.host_bytes) == ("our-server", 2, 512e9)
        assert machine.device_bytes == machine_given("h100-pcie").device_bytes
        assert machine.link_up_bytes_per_s == machine_given("h100-pcie").link_up_bytes_per_s / 2

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "a machine must be a mapping"),
            ("- device: x", "a machine must be a mapping"),
            ("? [1]\n: 2", "no YAML"),
            ("1: 2", "must be a mapping of words to values"),
            ("a: [1", "no YAML (while parsing a flow sequence"),
            (b"device: x\nname: \xff", "no YAML ('utf-8' codec"),
            ("[" * 20_000, "no YAML ("),
            ("device: x\ndevice_byte: 1", "has a key 'device_byte'; did you mean 'device_bytes'"),
            ("device_bytes: 0", "device_bytes is 0 but must be finite and above 0"),
            ("device_bytes: yes", "device_bytes is True but must be a size"),
            ("device_bytes: {a: 1}", "device_bytes is {'a': 1} but must be a size"),
            ("device_bytes: 2026-01-02", "device_bytes is datetime.date(2026, 1, 2)"),
            ("host_bytes_per_s: 5 GB", "host_bytes_per_s is '5 GB', which has the unit 'GB'"),
            ("device: [1]", "device is [1] but must be plain text"),
            ("device: !!python/object/apply:os.system [ls]", "no YAML (could not determine a constructor"),
            ("devices: 0", "devices is 0 but must be a whole number from 1 on"),
            ("devices: 1.5", "devices is 1.5 but must be a whole number"),
            ("devices: null", "devices is null"),
            ("link: PCI 5", "link is 'PCI 5', whose rates are not known here"),
            ("device_price: 5", "has a key 'device_price'"),
            ("base: h20", "base is 'h20'; did you mean 'h200'"),
            ("sources: x", "`sources` must be a mapping"),
            ("device: x\nsources: {device_bytes: y}", "`sources` has a key 'device_bytes'"),
            ("machines: {}", "`machines` is empty"),
            ("machines: [a]", "`machines` must be a mapping"),
            ("machines:\n  a: 5", "'a' must be a mapping"),
            ("machines:\n  a: {}\nmachine: 1", "`machines` is empty or not alone"),
            ("machines:\n  a:\n    base: a", "base is 'a'"),
        ],
    )
    def test_every_mistake_names_the_file_in_one_line(self, file, text, words):
        path = file(text)
        with pytest.raises(InvalidValueError) as caught:
            load_machines(path)
        message = str(caught.value)
        assert message.startswith(path)
        assert words in message
        assert "\n" not in message

    def test_files_that_cannot_be_read(self, tmp_path, file):
        with pytest.raises(StorageError, match=r"missing\.yaml' is no file that is there"):
            machine_given(str(tmp_path / "missing.yaml"))
        (tmp_path / "folder.yaml").mkdir()
        with pytest.raises(StorageError, match="is no file"):
            machine_given(str(tmp_path / "folder.yaml"))
        with pytest.raises(InvalidValueError, match="has more than 1,048,576 bytes, too many for a machine"):
            machine_given(file(" " * 2_000_000))

    def test_random_bytes_are_a_message_and_no_traceback(self, file):
        source, text = random.Random(0), PUBLISHED.read_bytes()[:3000]
        for _ in range(100):
            broken = bytearray(text)
            for _ in range(source.randint(1, 4)):
                broken[source.randrange(len(broken))] = source.choice(b"\x00\t:[]{}-#&*!|>'\"%@`\n 0x\xff")
            path = file(bytes(broken))
            message = path
            try:
                load_machines(path)
            except SpeedtransferError as error:
                message = str(error)
            assert message.startswith(path)
            assert "\n" not in message
