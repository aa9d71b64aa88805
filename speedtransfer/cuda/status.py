"""Which CUDA devices there are, or what is missing for them: a driver, a CUDA build of torch or CuPy.

CuPy is imported by :func:`load_cupy` alone, at the first call that needs it: importing this package starts nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from speedtransfer.errors import DeviceError, InvalidTypeError, InvalidValueError
from speedtransfer.once import once


@dataclass(frozen=True)
class CudaStatus:
    """What :func:`cuda_status` found.

    Attributes
    ----------
    available : bool
        Everything that this package needs for CUDA is there and sees a device.
    reason : str
        One sentence: what is missing and what to do. Empty where CUDA is available.
    cupy, torch_cuda, driver : str or None
        The version of CuPy, the CUDA version that torch is built for, and the newest that the driver supports.
    devices : tuple of str
        The names of the devices, by index.
    """

    available: bool
    reason: str
    cupy: str | None
    torch_cuda: str | None
    driver: str | None
    devices: tuple[str, ...]


@once
def cuda_status() -> CudaStatus:
    """Look for a driver, a CUDA build of torch and a CuPy that compiles kernels, once a process; never raises nor warns."""
    driver, cupy_version = None, None
    devices: tuple[str, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and CuPy warn about what `reason` says
        try:
            driver, cupy_version = _driver_version(), _cupy_version()
            reason, devices = _missing(driver, cupy_version)
        except Exception as error:  # whatever a broken installation throws
            reason = f"looking for it failed ({type(error).__name__}: {first_line(error)}); reinstall torch and CuPy"
    return CudaStatus(not reason, reason, cupy_version, torch.version.cuda, driver, devices)


def require_cuda(what: str) -> None:
    """Raise :class:`~speedtransfer.errors.DeviceError` "<what> needs CUDA, but <reason>" where there is no CUDA."""
    reason = cuda_status().reason
    if reason:
        raise DeviceError(f"{what} needs CUDA, but {reason}")


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the compute device that `device` names: the CPU, or a CUDA device with its index.

    Parameters
    ----------
    device : torch.device or str or int or None
        As in torch: an int is the index of a CUDA device. None: the current CUDA device, or the CPU without one.

    Raises
    ------
    DeviceError
        There is no CUDA, or no CUDA device of that index.
    InvalidValueError
        The device is neither a CPU nor a CUDA device.
    InvalidTypeError
        `device` has another type.
    """
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if cuda_status().available else torch.device("cpu")
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise InvalidTypeError(f"device is {device!r} but must be a torch.device, str or int; pass 'cpu' or 'cuda:0'")
    rule = "the compute device must be a CPU or CUDA device; pass device='cpu' or device='cuda:0'"
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError):  # ValueError: an index of more than 64 bits
        raise InvalidValueError(f"device is {device!r} but {rule}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InvalidValueError(f"device is {str(found)!r} but {rule}")
    require_cuda(f"device={str(found)!r}")
    index = torch.cuda.current_device() if found.index is None else found.index
    count = len(cuda_status().devices)
    if index >= count:
        raise DeviceError(
            f"device is 'cuda:{index}' but this process sees {count} CUDA devices; pass 'cuda:{count - 1}'"
        )
    return torch.device("cuda", index)


def resolve_cuda(device: torch.device | str | int | None, what: str) -> torch.device:
    """Return the CUDA device that `device` names; DeviceError "<what> needs CUDA, but ..." where that is none."""
    require_cuda(what)
    found = resolve_device(device)
    if found.type != "cuda":
        raise DeviceError(f"{what} needs CUDA, but the compute device is {str(found)!r}; pass device='cuda'")
    return found


@once
def load_cupy() -> Any:
    """Import CuPy, without the warnings that :func:`cuda_status` puts into words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cupy
    return cupy


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make CUDA device `index` current for torch and for CuPy: each brings a CUDA runtime with a current device of its own."""
    with torch.cuda.device(index), load_cupy().cuda.Device(index):
        yield


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cupy_version() -> str | None:
    for name in (*_CUPY_PACKAGES, "cupy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


_CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x")


def cupy_package() -> str:
    """Return the name of the CuPy that fits torch: of the CUDA that torch is built for, which the driver runs."""
    return "cupy-cuda12x" if (torch.version.cuda or "").startswith("12.") else "cupy-cuda13x"


def _driver_version() -> str | None:
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _missing(driver: str | None, cupy_version: str | None) -> tuple[str, tuple[str, ...]]:
    """Return why CUDA does not work ("" where it does) and the names of the devices."""
    if driver is None:
        return (
            "this machine has no NVIDIA driver; install one, or stay on the CPU with device='cpu' and memory='pageable'",
            (),
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch from pytorch.org", ()
    if not torch.cuda.is_available():
        if tuple(map(int, torch.version.cuda.split("."))) > tuple(map(int, driver.split("."))):
            what = f"torch is built for CUDA {torch.version.cuda} but the driver supports {driver} only"
            older = f"a torch built for CUDA {driver.split('.')[0]}, which pytorch.org's install selector names"
            return f"{what}; update the driver, or install {older}", ()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"the driver shows no device (CUDA_VISIBLE_DEVICES is {visible!r}); make one visible to this process", ()
    remedy = f"pip install '{cupy_package()}[ctk]'"
    devices = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed; {remedy}", devices
    cupy, others = f"CuPy {cupy_version}", _cupy_of_another_cuda()
    if others:
        cupy += f" (of {', '.join(others)}, but torch is built for CUDA {torch.version.cuda})"
        remedy = f"pip uninstall {' '.join(others)}, then {remedy}"
    try:
        count = load_cupy().cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"{cupy} does not work with this driver (CUDA {driver}): {first_line(error)}; {remedy}", devices
    if count < len(devices):
        return f"{cupy} sees {count} devices where torch sees {len(devices)}; {remedy}", devices
    try:
        _compile_something()
    except Exception as error:  # no compiler, no headers, a driver that does not take what they make
        return f"{cupy} cannot compile kernels here: {first_line(error)}; {remedy}", devices
    return "", devices


def _cupy_of_another_cuda() -> list[str]:
    """Return the packages of CuPy that are installed and built for another CUDA than torch."""
    installed = []
    for name in _CUPY_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            installed.append(name)
    return [name for name in installed if name != cupy_package()]


def _compile_something() -> None:
    """Compile and load the smallest kernel: a tenth of a second where CuPy has none in its cache."""
    with on_device(torch.cuda.current_device()):
        module = load_cupy().RawModule(code=_TRIAL, options=("-std=c++17",))
        module.get_function("speedtransfer_trial")


_TRIAL = 'extern "C" __global__ void speedtransfer_trial() {}'
