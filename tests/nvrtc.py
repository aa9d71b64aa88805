"""NVRTC through ctypes, from the ``nvidia-cuda-nvrtc`` wheel: CUDA sources to machine code, without a driver."""

import ctypes
import functools
import importlib.util
from pathlib import Path

from speedtransfer.cuda.launch import OPTIONS

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@functools.cache
def library():
    """Return libnvrtc, or None where the wheel is not installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [path for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so*"))]
    if not found:
        return None
    for builtins in sorted(found[-1].parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # libnvrtc looks for it by bare name
    nvrtc = ctypes.CDLL(str(found[-1]))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def compile_cubin(source, name, architecture, options=(), kind="CUBIN"):
    """Return the machine code and the compiler's log; AssertionError with the log where it does not compile.

    With ``kind="PTX"`` and a virtual architecture ("compute_90") the code is what that is made of, as text.
    """
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        # As CuPy calls it.
        flags = (*OPTIONS, "--device-as-default-execution-space", f"--gpu-architecture={architecture}", *options)
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        code = nvrtc.nvrtcCompileProgram(program, len(flags), array)
        log = _read(program, "ProgramLog").rstrip(b"\0").decode()
        assert code == 0, f"{name} for {architecture}: {nvrtc.nvrtcGetErrorString(code).decode()}\n{log}"
        return _read(program, kind), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program, what):
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(code):
    nvrtc = library()
    assert nvrtc is not None
    assert code == 0, nvrtc.nvrtcGetErrorString(code).decode()
