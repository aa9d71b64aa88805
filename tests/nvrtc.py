"""NVRTC through ctypes, from the ``nvidia-cuda-nvrtc`` wheel: CUDA sources to machine code, without a driver."""

import ctypes
import functools
import importlib.util
from pathlib import Path

from speedtransfer.cuda.launch import OPTIONS

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@functools.cache
def library(which=-1):
    """Return libnvrtc of the newest wheel, or of the oldest one (0), or None where none is installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = sorted((it for folder in folders for it in folder.glob("*/lib/libnvrtc.so.*")), key=lambda path: path.name)
    if not found:
        return None
    for builtins in sorted(found[which].parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # libnvrtc looks for it by bare name
    nvrtc = ctypes.CDLL(str(found[which]))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def compile_cubin(source, name, architecture, options=(), kind="CUBIN", which=-1):
    """Return the machine code and the compiler's log; AssertionError with the log where it does not compile.

    With ``kind="PTX"`` and a virtual architecture ("compute_90") the code is what that is made of, as text.
    """
    nvrtc = library(which)
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        # As CuPy calls it.
        flags = (*OPTIONS, "--device-as-default-execution-space", f"--gpu-architecture={architecture}", *options)
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        code = nvrtc.nvrtcCompileProgram(program, len(flags), array)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
        assert code == 0, f"{name} for {architecture}: {nvrtc.nvrtcGetErrorString(code).decode()}\n{log}"
        return _read(nvrtc, program, kind), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc, program, what):
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc, code):
    assert code == 0, nvrtc.nvrtcGetErrorString(code).decode()
