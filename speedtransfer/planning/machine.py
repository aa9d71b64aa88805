"""A machine as a plan sees it: what fits in which of its memories, and how fast bytes move between them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, printable, suggest

_UNITS = {"B": 1.0, **{f"{letter}B": 1e3**n for n, letter in enumerate("kMGTP", 1)}}
_UNITS |= {f"{letter}iB": 1024.0**n for n, letter in enumerate("KMGTP", 1)}
_NUMBER = re.compile(r"([+-]?[\d_.]+(?:e[+-]?\d+)?|[+-]?\.?(?:nan|inf)) *(.*)", re.IGNORECASE)

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

    Attributes
    ----------
    name : str
        "h200", or what a user calls it.
    device : str, optional
        The GPU's full name; None: rows are computed on the CPU.
    device_bytes, device_bytes_per_s : float, optional
        Memory of one GPU and its bandwidth.
    link : str, optional
        What connects host memory and the GPU, such as "PCIe 5.0 x16".
    link_up_bytes_per_s, link_down_bytes_per_s : float, optional
        From host memory to the GPU and back, one direction at a time.
    peer_bytes_per_s : float, optional
        What one GPU can send to the others of the machine while all do; None: by way of host memory.
    host_bytes, host_bytes_per_s : float, optional
        Host memory that a process may take, and its bandwidth.
    pinned_bytes : float, optional
        Host memory that may be page-locked; None: all of `host_bytes`.
    disk_bytes, disk_bytes_per_s : float, optional
        Free room for files of tables, and the rate of random reads of rows.
    devices : int
        GPUs in the machine.
    sources : mapping of str to str
        Where each figure is from, by attribute: "measured", "given", or a publication with its date.
    notes : tuple of str
        Sentences about figures that could not be had, or that need a word.
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
    pinned_bytes: float | None = None
    disk_bytes: float | None = None
    disk_bytes_per_s: float | None = None
    devices: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def figure(self, name: str) -> float:
        """Return the figure `name`.

        Raises
        ------
        InvalidValueError
            It is not known of this machine.
        """
        value = getattr(self, name)
        if value is None:
            raise InvalidValueError(
                f"machine {self.name!r} has no figure {name}; add `{name}:` to a YAML file of the machine and pass its path"
            )
        return float(value)


# --- values -------------------------------------------------------------------------------------------------------------


def parse_bytes(value: Any, per: str = "") -> float:
    """Return bytes: a number, or text such as "80 GB" (1e9) or "94 GiB" (2**30); with ``per="/s"`` a rate, "55 GB/s".

    Raises
    ------
    InvalidValueError
        It is none, or not above 0. The message begins with the value and names the rule, without a subject.
    """
    example = f"80 GB{per}"
    found = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
    try:
        number, unit = float(found[1].replace("_", "")), found[2]  # type: ignore[index]
    except (TypeError, ValueError):
        what = "a rate" if per else "a size"
        raise InvalidValueError(f"{value!r} but must be {what}; write for instance {example}") from None
    # Gb/s is bits, to many.
    exact = {f"{name}{per}": factor for name, factor in _UNITS.items()}
    by_case = exact if per else {name.lower(): factor for name, factor in exact.items()}
    if unit and (unit if per else unit.lower()) not in by_case:
        raise InvalidValueError(f"{value!r}, which has the unit {unit!r}{suggest(unit, exact)}")
    number *= by_case[unit if per else unit.lower()] if unit else 1.0
    if not (math.isfinite(number) and number > 0):
        raise InvalidValueError(f"{value!r} but must be finite and above 0; leave it out where it is not known")
    return number


def parse_count(value: Any) -> int:
    """Return a whole number from 1 on; raises as :func:`parse_bytes` does."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**9:
        raise InvalidValueError(f"{value!r} but must be a whole number from 1 on, below 1e9; write for instance 8")
    return value


def parse_text(value: Any) -> str:
    """Return text that a terminal shows as it is; raises as :func:`parse_bytes` does."""
    text = " ".join(str(value).split())
    if isinstance(value, bool | list | dict) or printable(text) != text:
        raise InvalidValueError(f"{value!r} but must be plain text; write it in quotes")
    return text


def link_rates(text: str) -> tuple[str, float, float, str]:
    """Return the name of a link such as "PCIe 5.0 x16" or "NVLink-C2C", what copies get up and down, and the source.

    Raises
    ------
    InvalidValueError
        It is none that is known here. The message begins with the text, without a subject.
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


def with_memory(machine: Machine, host_memory: Any = None, disk: Any = None, pinned: float | None = None) -> Machine:
    """Return a machine with bytes such as "512GB" in place of its own; of the host memory `pinned` may be page-locked."""
    changed: dict[str, Any] = {}
    if host_memory is not None:
        changed["host_bytes"] = _bytes(host_memory, "host_memory")
        changed["pinned_bytes"] = min(changed["host_bytes"], pinned or changed["host_bytes"])
    if disk is not None:
        changed["disk_bytes"] = _bytes(disk, "disk")
    sources = {**machine.sources, **dict.fromkeys(changed, "given")}
    return dataclasses.replace(machine, **changed, sources=sources) if changed else machine


def _bytes(value: Any, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidTypeError(
            f"{label} is {value!r} ({type(value).__name__}) but must be bytes; pass for instance '512GB'"
        )
    try:
        return parse_bytes(value)
    except InvalidValueError as error:
        raise InvalidValueError(f"{label} is {error}") from None
