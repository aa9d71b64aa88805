"""What connects host memory and a GPU: its rate by the standard, and the share of it that copies get."""

from __future__ import annotations

import re
from typing import NamedTuple

from speedtransfer.errors import InvalidValueError

# Transfers per second of a lane, times the share of bits that are not coding (8b/10b, 128b/130b, FLITs of 242 in 256).
_PCIE_BITS_PER_S = {1: 2.5e9 * 8 / 10, 2: 5e9 * 8 / 10, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130}
_PCIE_BITS_PER_S[6] = 64e9 * 242 / 256
_PCIE = re.compile(r"pci(?:e| express)?[ -]*(?:gen *)?([1-6])(?:\.0)?[ -]*x(1|2|4|8|16)", re.IGNORECASE)
_C2C_BYTES_PER_S = 450e9  # of 900 GB/s in both directions
_ASSUMED_SHARE = 0.85
# Measured rates of large copies from and to page-locked memory over 16 lanes, GB/s up and down, and where.
_MEASURED = {
    3: (
        12.4,
        13.1,
        "bandwidthTest on a cluster of Princeton University, https://github.com/jdh4/della-gpu-A100, seen 2026",
    ),
    4: (26.2, 26.3, "bandwidthTest of an A100, https://github.com/jdh4/della-gpu-A100, seen 2026"),
    5: (55.0, 55.0, "nvbandwidth of an H200, https://github.com/samuel-bohman/AI-benchmarking-guide, seen 2026"),
}


class Link(NamedTuple):
    """A link, and what copies over it are expected to get.

    Attributes
    ----------
    name : str
    theoretical_bytes_per_s : float
        In one direction.
    up_bytes_per_s, down_bytes_per_s : float
    source : str
        Where the shares are from.
    """

    name: str
    theoretical_bytes_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    source: str


def link_named(text: str) -> Link:
    """Return the link that `text` names: "PCIe 5.0 x16", "PCIe Gen4 x8", "NVLink-C2C".

    Raises
    ------
    InvalidValueError
        It names none. The message begins with the text, without a subject.
    """
    if text.strip().lower().replace(" ", "-") == "nvlink-c2c":
        return _link("NVLink-C2C", _C2C_BYTES_PER_S, _ASSUMED_SHARE, _ASSUMED_SHARE, "assumed")
    found = _PCIE.fullmatch(text.strip())
    if found is None:
        raise InvalidValueError(
            f"{text!r}, whose rates are not known here; write for instance PCIe 5.0 x16 or NVLink-C2C, or give "
            "link_up_bytes_per_s and link_down_bytes_per_s as well"
        )
    generation, lanes = int(found[1]), int(found[2])
    name, rate = f"PCIe {generation}.0 x{lanes}", _PCIE_BITS_PER_S[generation] / 8 * lanes
    if generation not in _MEASURED:
        return _link(name, rate, _ASSUMED_SHARE, _ASSUMED_SHARE, "assumed")
    up, down, source = _MEASURED[generation]
    full = _PCIE_BITS_PER_S[generation] / 8 * 16
    return _link(name, rate, 1e9 * up / full, 1e9 * down / full, f"as measured by {source}")


def _link(name: str, rate: float, up: float, down: float, source: str) -> Link:
    shares = f"{up:.2f}" if up == down else f"{up:.2f} up and {down:.2f} down"
    return Link(name, rate, up * rate, down * rate, f"{shares} of the {rate / 1e9:.1f} GB/s of {name}, {source}")
