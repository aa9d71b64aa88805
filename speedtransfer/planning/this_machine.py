"""This machine as a plan sees it: what is left of its memories now, and rates where they are asked for."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from speedtransfer.cuda import cuda_status
from speedtransfer.engines.calibration import load
from speedtransfer.errors import InvalidValueError, SpeedtransferError, format_bytes, suggest
from speedtransfer.planning import measured_rates
from speedtransfer.planning.machine import Machine
from speedtransfer.system import available_bytes, physical_bytes

NAME = "this machine"
RATES = ("host", "device", "link", "disk")
_MEASURED = "measured"


def this_machine(path: str | Path | None = None, *, rates: Collection[str] = (), device: int = 0) -> Machine:
    """Return this machine: its free memories and disk now and, where asked for, its rates, measured in about a second each.

    Parameters
    ----------
    path : str or Path, optional
        A folder on the disk where files of tables would be; by default the current one.
    rates : collection of {"host", "device", "link", "disk"}
        What to measure: the bandwidths of host and GPU memory, the link between them, random reads of the disk. For the disk a
        file without a name is written into `path`. None by default; the link's rate to the GPU is also known, without
        measuring, where `speedtransfer calibrate` has measured it.
    device : int
        The CUDA device.

    Returns
    -------
    Machine
        What could not be found out is None, and `notes` say why.

    Raises
    ------
    InvalidValueError
        `rates` has another name, or there is no such device.
    """
    for rate in rates:
        if rate not in RATES:
            raise InvalidValueError(f"rates has {rate!r}{suggest(rate, RATES)}")
    found = _Findings()
    folder = Path.cwd() if path is None else Path(path)
    _host(found)
    found.add("disk_bytes", lambda: shutil.disk_usage(folder).free, f"disk room at {str(folder)!r}")
    status = cuda_status()
    if status.available:
        if not 0 <= device < len(status.devices):
            raise InvalidValueError(
                f"device is {device} but this machine has CUDA devices 0 to {len(status.devices) - 1}"
            )
        _gpu(found, device, rates)
    else:
        found.notes.append(f"no GPU is used: {status.reason}")
    if "host" in rates:
        found.add("host_bytes_per_s", measured_rates.host_bytes_per_s, "the bandwidth of host memory")
    if "disk" in rates:
        found.add("disk_bytes_per_s", lambda: measured_rates.disk_bytes_per_s(folder), f"the disk at {str(folder)!r}")
    return Machine(
        NAME,
        **found.figures,
        devices=max(1, len(status.devices) if status.available else 1),
        sources=dict.fromkeys((name for name in found.figures if name != "device"), _MEASURED) | found.sources,
        notes=tuple(found.notes),
    )


class _Findings:
    """Figures, where they are from if not measured here, and notes on those that could not be had."""

    def __init__(self) -> None:
        self.figures = dict[str, Any]()
        self.sources = dict[str, str]()
        self.notes = list[str]()

    def add(self, names: str, find: Callable[[], float | tuple[float, ...]], what: str) -> None:
        """Add the figures that `find` returns, by their names with spaces between, or a note that it could not."""
        try:
            values = find()
            several = values if isinstance(values, tuple) else (values,)
            self.figures |= dict(zip(names.split(), map(float, several), strict=True))
        except (SpeedtransferError, OSError, RuntimeError, MemoryError) as error:
            self.notes.append(f"{what} is not known: {_first_line(error)}")


def _host(found: _Findings) -> None:
    free, whole = available_bytes(), physical_bytes()
    if not whole:
        found.notes.append("host memory is not known: the system does not say")
        return
    found.figures["host_bytes"] = float(free)
    found.notes.append(
        f"{format_bytes(free)} of {format_bytes(whole)} of host memory are free; the rest is held by this process and others"
    )
    limit = _lock_limit()
    if limit is not None:
        found.notes.append(
            f"the limit of locked memory (ulimit -l) is {format_bytes(limit)}; CUDA's driver locks pages by itself and is not "
            "known to count them against it, so that the plan does not either"
        )


def _lock_limit() -> int | None:
    """Return the bytes that this process may lock; None for no limit, or where there is no such thing."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def _gpu(found: _Findings, number: int, rates: Collection[str]) -> None:
    device = torch.device("cuda", number)
    found.figures["device"] = cuda_status().devices[number]
    found.add("device_bytes", lambda: _free_on(device, found), f"the memory of cuda:{number}")
    if "device" in rates:
        found.add(
            "device_bytes_per_s", lambda: measured_rates.device_bytes_per_s(device), f"the bandwidth of cuda:{number}"
        )
    calibrated = load(device)
    if "link" in rates:
        names = "link_up_bytes_per_s link_down_bytes_per_s"
        found.add(names, lambda: measured_rates.link_bytes_per_s(device), f"the link to cuda:{number}")
    if calibrated is not None and calibrated.copy_bytes_per_s > 0:
        found.figures["link_up_bytes_per_s"] = calibrated.copy_bytes_per_s
        found.sources["link_up_bytes_per_s"] = f"{_MEASURED} by `speedtransfer calibrate`"


def _free_on(device: torch.device, found: _Findings) -> float:
    """Return what is free on a GPU, with what torch holds in this process and does not use."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device)
    idle = kept - torch.cuda.memory_allocated(device)
    found.notes.append(
        f"{format_bytes(free + idle)} of {format_bytes(total)} of cuda:{device.index} are free; torch holds "
        f"{format_bytes(kept - idle)} in this process, and others and CUDA itself {format_bytes(total - free - kept)}"
    )
    return float(free + idle)


def _first_line(error: BaseException) -> str:
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return str(text.splitlines()[0])
