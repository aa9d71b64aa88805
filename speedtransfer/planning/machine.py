"""A machine as a plan sees it: what fits in which of its memories, and how fast bytes move between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speedtransfer.errors import InvalidValueError


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
    device_price, machine_price, hourly_price : float, optional
        Of one GPU, of the whole machine, and of an hour of the whole machine, all in `currency`.
    currency : str, optional
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
    device_price: float | None = None
    machine_price: float | None = None
    hourly_price: float | None = None
    currency: str | None = None
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
