"""Machines as a plan sees them: what fits in which of their memories, and how fast bytes move between them.

By name from the published figures that come with this package, or from users' YAML files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, printable, suggest
from speedtransfer.once import once
from speedtransfer.units import parse_bytes
from speedtransfer.untrusted import open_file, storage_error

# Transfers per second of a lane, times the share of bits that are not coding (8b/10b, 128b/130b, FLITs of 242 in 256).
_PCIE_BITS_PER_S = {1: 2e9, 2: 4e9, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130, 6: 64e9 * 242 / 256}
_PCIE = re.compile(r"pci(?:e| express)?[ -]*(?:gen *)?([1-6])(?:\.0)?[ -]*x(1|2|4|8|16)", re.IGNORECASE)
_C2C_BYTES_PER_S = 450e9  # of 900 GB/s in both directions
_ASSUMED_SHARE = 0.85
# Measured rates of large copies from and to page-locked memory over 16 lanes, GB/s up and down, and where.
_MEASURED = {
    3: (12.4, 13.1, "bandwidthTest at Princeton University, https://github.com/jdh4/della-gpu-A100, seen 2026"),
    4: (26.2, 26.3, "bandwidthTest of an A100, https://github.com/jdh4/della-gpu-A100, seen 2026"),
    5: (55.0, 55.0, "nvbandwidth of an H200, https://github.com/samuel-bohman/AI-benchmarking-guide, seen 2026"),
}


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes and rates in bytes per second; a figure that is not known is None.

    `device` is the GPU's full name, None where rows are computed on the CPU; it has `device_bytes` of memory. `link` is what
    connects host memory and the GPU, such as "PCIe 5.0 x16", with its rates up, from host memory to the GPU, and down, one
    direction at a time. The `peer` rate is what one GPU can send to the others of the machine while all do (None: by way of
    host memory). `host_bytes` are what a process may take, `disk_bytes` free room for files of tables, with the rate of random
    reads of rows. `sources` say where each figure is from, by attribute: "measured", "given", or a publication with its date;
    `notes` are sentences about figures that could not be had, or that need a word.
    """

    name: str
    device: str | None = None
    device_bytes: float | None = None
    device_bytes_per_s: float | None = None
    link: str | None = None
    link_up_bytes_per_s: float | None = None
    link_down_bytes_per_s: float | None = None
    peer_bytes_per_s: float | None = None
    host_bytes: float | None = None
    host_bytes_per_s: float | None = None
    disk_bytes: float | None = None
    disk_bytes_per_s: float | None = None
    devices: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def figure(self, name: str) -> float:
        """Return the figure `name`; raises InvalidValueError if it is not known of this machine."""
        value = getattr(self, name)
        if value is None:
            raise InvalidValueError(
                f"machine {self.name!r} has no figure {name}; add `{name}:` to a YAML file of the machine and pass its path"
            )
        return float(value)


# --- values -------------------------------------------------------------------------------------------------------------


def parse_count(value: Any) -> int:
    """Return a whole number from 1 on; raises as ``parse_bytes`` does."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**9:
        raise InvalidValueError(f"{value!r} but must be a whole number from 1 on, below 1e9; write for instance 8")
    return value


def parse_text(value: Any) -> str:
    """Return text that a terminal shows as it is; raises as ``parse_bytes`` does."""
    text = " ".join(str(value).split())
    if isinstance(value, bool | list | dict) or printable(text) != text:
        raise InvalidValueError(f"{value!r} but must be plain text; write it in quotes")
    return text


def link_rates(text: str) -> tuple[str, float, float, str]:
    """Return the name of a link such as "PCIe 5.0 x16" or "NVLink-C2C", what copies get up and down, and the source.

    Raises as ``parse_bytes`` does if it is none that is known here.
    """
    found = _PCIE.fullmatch(text.strip())
    up = down = _ASSUMED_SHARE
    source = "assumed"
    if text.strip().lower().replace(" ", "-") == "nvlink-c2c":
        name, rate = "NVLink-C2C", _C2C_BYTES_PER_S
    elif found is None:
        raise InvalidValueError(
            f"{text!r}, whose rates are not known here; write for instance PCIe 5.0 x16 or NVLink-C2C, or give "
            "link_up_bytes_per_s and link_down_bytes_per_s as well"
        )
    else:
        generation, lanes = int(found[1]), int(found[2])
        name, rate = f"PCIe {generation}.0 x{lanes}", _PCIE_BITS_PER_S[generation] / 8 * lanes
        if generation in _MEASURED:
            full = _PCIE_BITS_PER_S[generation] / 8 * 16
            up, down = (1e9 * measured / full for measured in _MEASURED[generation][:2])
            source = f"as measured by {_MEASURED[generation][2]}"
    shares = f"{up:.2f}" if up == down else f"{up:.2f} up and {down:.2f} down"
    return name, up * rate, down * rate, f"{shares} of the {rate / 1e9:.1f} GB/s of {name}, {source}"


def with_memory(machine: Machine, host_memory: Any = None, disk: Any = None) -> Machine:
    """Return a machine with bytes such as "512GB" in place of its own."""
    changed: dict[str, Any] = {}
    for label, value in (("host_memory", host_memory), ("disk", disk)):
        if value is None:
            continue
        try:
            changed[f"{label.removesuffix('_memory')}_bytes"] = parse_bytes(value)
        except InvalidValueError as error:
            raise InvalidValueError(f"{label} is {error}") from None
    sources = {**machine.sources, **dict.fromkeys(changed, "given")}
    return dataclasses.replace(machine, **changed, sources=sources) if changed else machine


# --- by name and from files ---------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).with_name("machines.yaml")
_MOST_BYTES = 1 << 20  # of a YAML file

_PARSERS: dict[str, Callable[[Any], Any]] = {
    "device": parse_text,
    "devices": parse_count,
    **{f"{name}_bytes": parse_bytes for name in ("device", "host", "disk")},
    **{
        f"{name}_bytes_per_s": lambda value: parse_bytes(value, "/s")
        for name in ("device", "link_up", "link_down", "peer", "host", "disk")
    },
}
_KEYS = ("name", "base", "link", "source", "sources", *_PARSERS)
_LINK_RATES = ("link_up_bytes_per_s", "link_down_bytes_per_s")


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; `what` it should be is for messages."""
    import yaml  # few commands need it

    with storage_error(f"cannot read {str(path)!r}", "check the path"), open_file(path) as opened:
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidValueError(f"{path} has more than {_MOST_BYTES:,} bytes, too many for {what}; check the path")
    try:
        found = yaml.safe_load(data.decode("utf-8-sig"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidValueError(f"{path} is no YAML ({' '.join(str(error).split())}); correct it") from None
    return mapping_of(found, f"{path}: {what}")


def mapping_of(value: Any, label: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return `value` if it is a mapping with words as keys, of those `known` if they are given."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidValueError(f"{label} must be a mapping of words to values; write `key: value` lines")
    for key in value:
        if known is not None and key not in known:
            raise InvalidValueError(f"{label} has a key {key!r}{suggest(key, known)}")
    return value


def parsed(entry: Mapping[str, Any], key: str, parse: Callable[[Any], Any], label: str) -> Any:
    """Return the value below `key`, None if there is none; what `parse` raises gets the label and the key in front."""
    if entry.get(key) is None:
        return None
    try:
        return parse(entry[key])
    except InvalidValueError as error:
        raise InvalidValueError(f"{label}: {key} is {error}") from None


def load_machines(machine: str) -> list[Machine]:
    """Return the machine of a name, in any case, or those of a YAML file (one that is there, or ends in .yaml or .yml)."""
    if machine.lower().endswith((".yaml", ".yml")) or Path(machine).is_file():
        return list(_machines_of(Path(machine), published_machines()).values())
    found = published_machines().get(machine.lower())
    if found is None:
        raise InvalidValueError(
            f"machine is {machine!r}, no name and no YAML file{suggest(machine, published_machines())}"
        )
    return [found]


@once
def published_machines() -> Mapping[str, Machine]:
    """Return the machines of which published figures come with this package, by name."""
    return _machines_of(PUBLISHED, {})


def _machines_of(path: Path, known: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return the machines of a file: those below `machines:`, or the file is one. A base is one before it, or of `known`."""
    root = read_yaml(path, "a machine")
    entries = {str(root.get("name") or path.stem): root}
    if "machines" in root:
        entries = mapping_of(root["machines"], f"{path}: `machines`")
        if len(root) > 1 or not entries:
            raise InvalidValueError(
                f"{path}: `machines` is empty or not alone; write all machines of the file below it"
            )
    found: dict[str, Machine] = {}
    for name, entry in entries.items():
        label = f"{path}, {name!r}"
        base = mapping_of(entry, label, _KEYS).get("base")
        bases = {**known, **{each.lower(): machine for each, machine in found.items()}}
        if base is not None and str(base).lower() not in bases:
            raise InvalidValueError(f"{label}: base is {base!r}{suggest(str(base), bases)}")
        found[name] = _machine(name, entry, None if base is None else bases[str(base).lower()], label)
    return found


def _machine(name: str, entry: Mapping[str, Any], base: Machine | None, label: str) -> Machine:
    """Return a machine with the figures of a file, where each is from, and the rates of its link."""
    given: dict[str, Any] = {key: parsed(entry, key, _PARSERS[key], label) for key in entry if key in _PARSERS}
    if given.get("devices", 1) is None:
        raise InvalidValueError(f"{label}: devices is null but must be a number of GPUs; leave it out for one")
    where = parsed(entry, "source", parse_text, label) or "given"
    sources = {**(base.sources if base else {}), **dict.fromkeys(given, where)}
    if "link" in entry:
        given["link"], sources["link"] = parsed(entry, "link", parse_text, label), where
        if given["link"] is not None and any(given.get(key) is None for key in _LINK_RATES):
            given["link"], *rates, source = parsed(entry, "link", link_rates, label)
            for key, rate in zip(_LINK_RATES, rates, strict=True):
                if given.get(key) is None:
                    given[key], sources[key] = rate, source
    own = mapping_of(entry.get("sources") or {}, f"{label}: `sources`", given)
    sources |= {key: parsed(own, key, parse_text, label) or "given" for key in own}
    sources = {key: value for key, value in sources.items() if key not in given or given[key] is not None}
    shown = parsed(entry, "name", parse_text, label) or parse_text(name)
    return dataclasses.replace(base or Machine(name), **given, name=shown, sources=sources)


def machine_given(machine: Any) -> Machine:
    """Return a machine that is given as it is, or the one of a name or a file with one."""
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str):
        raise InvalidTypeError(
            f"machine is {machine!r} ({type(machine).__name__}) but must be a name, the path of a YAML file or a Machine; "
            "pass one, or None for this machine"
        )
    found = load_machines(machine)
    if len(found) > 1:
        raise InvalidValueError(f"{machine} holds {len(found)} machines; pass a file with the one to plan for")
    return found[0]
