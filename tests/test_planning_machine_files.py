"""Machines by name and from YAML files: what may be written, and what every mistake is told."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.planning.links import link_named
from speedtransfer.planning.machine_files import (
    PUBLISHED,
    load_machine,
    load_machines,
    machine_names,
    published_machines,
)

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
        assert set(wanted.split()) <= set(machine_names())

    @pytest.mark.parametrize("machine", published_machines(), ids=lambda m: m.name)
    def test_each_has_what_a_gpu_has_with_a_source_and_a_year(self, machine):
        for name in FIGURES:
            assert getattr(machine, name) is not None, name
        for field in dataclasses.fields(machine):
            if field.name.endswith(("_bytes", "_per_s")) and getattr(machine, field.name) is not None:
                assert re.search(r"\b20[12]\d\b", machine.sources[field.name]), field.name
        assert set(machine.sources) <= {field.name for field in dataclasses.fields(machine)}

    @pytest.mark.parametrize("machine", published_machines(), ids=lambda m: m.name)
    def test_no_link_beats_its_standard(self, machine):
        link = link_named(machine.link)
        for rate in (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s):
            assert 0.4 * link.theoretical_bytes_per_s < rate < link.theoretical_bytes_per_s
        assert machine.device_bytes_per_s > machine.link_up_bytes_per_s

    def test_host_memory_is_that_of_whole_machines(self):
        with_host = {machine.name for machine in published_machines() if machine.host_bytes is not None}
        assert with_host == {name for name in machine_names() if name.startswith(("dgx", "g"))}

    def test_case_does_not_matter(self):
        assert load_machine("H200") == load_machine("h200")
        assert load_machines("h200") == [load_machine("h200")]

    @pytest.mark.parametrize(
        ("name", "words"), [("h20", "did you mean 'h200'"), ("nothing", "choose from 'k80'"), ("", "choose from")]
    )
    def test_unknown_names(self, name, words):
        with pytest.raises(
            InvalidValueError, match=f"machine is '{name}', which is neither a name nor a YAML"
        ) as caught:
            load_machine(name)
        assert words in str(caught.value)

    def test_is_in_the_wheel(self):
        told = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        patterns = told["tool"]["setuptools"]["package-data"]["speedtransfer.planning"]
        assert any(PUBLISHED.match(pattern) for pattern in patterns)
        assert any(requirement.startswith("pyyaml") for requirement in told["project"]["dependencies"])

    def test_yaml_is_loaded_where_it_is_needed(self):
        code = "import sys, speedtransfer.planning.machine_files as m; a = 'yaml' in sys.modules; m.machine_names()"
        code += "; print(a, 'yaml' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "True"]


class TestLinks:
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
    def test_rates_by_the_standard(self, text, name, gb_per_s):
        link = link_named(text)
        assert link.name == name
        assert link.theoretical_bytes_per_s == pytest.approx(1e9 * gb_per_s, rel=1e-4)
        assert 0.7 < link.up_bytes_per_s / link.theoretical_bytes_per_s < 0.9
        assert link.name in link.source

    def test_half_the_lanes_are_half_the_rate(self):
        assert link_named("PCIe 5.0 x8").up_bytes_per_s == pytest.approx(link_named("PCIe 5.0 x16").up_bytes_per_s / 2)


class TestFiles:
    def test_one_machine(self, file):
        lines = ["name: box", "device_bytes: 24 GB", "host_bytes: 94 GiB", "link: pcie gen4 x8", "devices: 2"]
        machine = load_machine(file("\n".join([*lines, "currency: EUR", "device_price: 900"])))
        assert (machine.name, machine.device_bytes, machine.host_bytes) == ("box", 24e9, 94 * 2**30)
        assert (machine.devices, machine.currency, machine.device_price) == (2, "EUR", 900)
        assert machine.link == "PCIe 4.0 x8"
        assert machine.link_up_bytes_per_s == link_named("pcie4 x8").up_bytes_per_s
        assert machine.sources["host_bytes"] == "given"
        assert "measured by" in machine.sources["link_up_bytes_per_s"]

    def test_without_a_name_it_is_that_of_the_file(self, file):
        assert load_machine(file("device_bytes: 8e9", "box.yml")).name == "box"

    def test_based_on_a_published_one(self, file):
        machine = load_machine(
            file("base: H200\nhost_bytes: 1 TB\nlink_up_bytes_per_s: 50 GB/s\nsource: our lab, 2026")
        )
        h200 = load_machine("h200")
        assert machine.device_bytes == h200.device_bytes
        assert machine.link_up_bytes_per_s == 50e9
        assert machine.link_down_bytes_per_s == h200.link_down_bytes_per_s
        assert machine.sources == {
            **h200.sources,
            "host_bytes": "our lab, 2026",
            "link_up_bytes_per_s": "our lab, 2026",
        }

    def test_another_link_has_other_rates(self, file):
        machine = load_machine(file("base: h200\nlink: PCIe 4.0 x16"))
        assert machine.link_up_bytes_per_s == link_named("PCIe 4.0 x16").up_bytes_per_s
        assert "PCIe 4.0 x16" in machine.sources["link_up_bytes_per_s"]

    def test_a_link_that_nobody_knows_with_its_rates(self, file):
        machine = load_machine(file("link: CXL 3\nlink_up_bytes_per_s: 60 GB/s\nlink_down_bytes_per_s: 50 GB/s"))
        assert (machine.link, machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == ("CXL 3", 60e9, 50e9)

    def test_null_is_what_is_not_known(self, file):
        machine = load_machine(file("base: gh200\nhost_bytes: null\n"))
        assert machine.host_bytes is None
        assert "host_bytes" not in machine.sources

    def test_several(self, file):
        path = file("machines:\n  b: {base: a, devices: 4}\n  a: {base: l4, host_bytes: 64 GB}\n")
        assert [(m.name, m.devices, m.host_bytes) for m in load_machines(path)] == [("b", 4, 64e9), ("a", 1, 64e9)]
        assert load_machine(f"{path}#A") == load_machines(path)[1]
        assert load_machines(f"{path}#b") == load_machines(path)[:1]
        with pytest.raises(InvalidValueError, match=r"holds 2 machines; name one, such as '.*mine\.yaml#b'"):
            load_machine(path)
        with pytest.raises(InvalidValueError, match=r"has no machine 'c'"):
            load_machine(f"{path}#c")

    def test_the_example(self):
        machine = load_machine(str(Path(__file__).parents[1] / "examples" / "machine.yaml"))
        assert (machine.name, machine.devices, machine.host_bytes) == ("our-server", 2, 512e9)
        assert machine.device_bytes == load_machine("h100-pcie").device_bytes
        assert machine.link_up_bytes_per_s == load_machine("h100-pcie").link_up_bytes_per_s / 2

    def test_any_file_that_is_there(self, file):
        assert load_machine(file("device_bytes: 8e9", "machine")).device_bytes == 8e9

    @pytest.mark.parametrize(
        ("text", "line", "words"),
        [
            ("", 1, "the file is empty"),
            ("# nothing\n", 1, "the file is empty"),
            ("a: [1", 1, "not YAML: expected ',' or ']'"),
            ("device: x\ndevice_bytes:\t1", 2, "not YAML: found character"),
            ("device: x\n---\ndevice: y", 2, "not YAML: but found another document"),
            ("device: \x00", 1, "not YAML"),
            (b"device: x\nname: \xff", 2, "the text is not UTF-8"),
            ("[" * 20_000, 1, "nested too deeply"),
            ("- device: x", 1, "a machine is a list but must be a mapping"),
            ("just text", 1, "a machine is a single value but must be a mapping"),
            ("device: x\ndevice_byte: 1", 2, "'device_byte' is not a key of a machine; did you mean 'device_bytes'"),
            ("device: x\ndevice: y", 2, "'device' is given again, first on line 1"),
            ("? [1]\n: 2", 1, "a key is a list"),
            ("\ndevice_bytes: 0", 2, "device_bytes is '0' but must be finite and above 0"),
            ("device_bytes: -5 GB", 1, "device_bytes is '-5 GB' but must be finite and above 0"),
            ("device_bytes: .nan", 1, "device_bytes is '.nan' but must be finite"),
            ("device_bytes: yes", 1, "device_bytes is yes, which YAML reads as true or false"),
            ("device_bytes: true", 1, "device_bytes is true"),
            ("device_bytes: [1]", 1, "device_bytes is a list but must be a single value"),
            ("device_bytes: {a: 1}", 1, "device_bytes is a mapping but must be a single value"),
            ("device_bytes: much", 1, "device_bytes is 'much' but must be a size"),
            ("device_bytes: 2026-01-02", 1, "device_bytes is '2026-01-02'"),
            ("host_bytes_per_s: 5 GB", 1, "host_bytes_per_s is '5 GB', which has the unit 'GB'"),
            ("device: !!python/object/apply:os.system [ls]", 1, "device is a list"),
            ("device: !!python/name:os.system x", 1, "has the tag"),
            ("device: !mine x", 1, "has the tag '!mine'"),
            ("devices: 0", 1, "devices is '0' but must be a whole number from 1 on"),
            ("devices: -1", 1, "devices is '-1' but must be"),
            ("devices: 1.5", 1, "'1.5' but must be a whole number"),
            ("devices: null", 1, "devices is null"),
            ("link: PCI 5", 1, "link is 'PCI 5', whose rates are not known here"),
            ("device_price: 5 USD", 1, "device_price is '5 USD' but must be a number without a unit"),
            ("base: h20", 1, "base is 'h20'; did you mean 'h200'"),
            ("sources: x", 1, "`sources` is a single value but must be a mapping"),
            ("device: x\nsources: {device_bytes: y}", 2, "'device_bytes' is not a key of `sources`"),
            ("machines: {}", 1, "`machines` is empty"),
            ("machines: [a]", 1, "`machines` is a list"),
            ("machines:\n  a: 5", 2, "a machine is a single value"),
            ("machines:\n  a: {}\nmachine: 1", 3, "'machine' is not a key of a machine; did you mean 'machines'"),
            (
                "machines:\n  a:\n    base: b\n  b:\n    base: a",
                5,
                "base is 'a', which is based on this machine itself",
            ),
            ("machines:\n  a:\n    base: a", 3, "based on this machine itself"),
        ],
    )
    def test_every_mistake_names_file_and_line_in_one(self, file, text, line, words):
        path = file(text)
        with pytest.raises(InvalidValueError) as caught:
            load_machines(path)
        message = str(caught.value)
        assert message.startswith(f"{path}, line {line}: ")
        assert words in message
        assert "\n" not in message

    def test_files_that_cannot_be_read(self, tmp_path, file):
        with pytest.raises(StorageError, match=r"missing\.yaml' is no file that is there"):
            load_machine(str(tmp_path / "missing.yaml"))
        (tmp_path / "folder.yaml").mkdir()
        with pytest.raises(StorageError, match="is no file"):
            load_machine(str(tmp_path / "folder.yaml"))
        with pytest.raises(InvalidValueError, match="has 2,000,000 bytes, too many for a machine"):
            load_machine(file(" " * 2_000_000))

    def test_random_bytes_are_a_message_and_no_traceback(self, file):
        import random

        source, text = random.Random(0), PUBLISHED.read_bytes()[:3000]
        for _ in range(200):
            broken = bytearray(text)
            for _ in range(source.randint(1, 4)):
                broken[source.randrange(len(broken))] = source.choice(b"\x00\t:[]{}-#&*!|>'\"%@`\n 0x\xff")
            message = "line 1: "
            try:
                load_machines(file(bytes(broken)))
            except SpeedtransferError as error:
                message = str(error)
            assert re.search(r"line \d+: ", message)
            assert "\n" not in message
