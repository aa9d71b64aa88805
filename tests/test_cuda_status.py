"""What CUDA lacks, and which device is meant; what needs a device is in tests/gpu/test_cuda.py."""

import contextlib
import importlib.metadata
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from speedtransfer.cuda import status as cuda
from speedtransfer.errors import DeviceError, InvalidTypeError, InvalidValueError

without_cuda = pytest.mark.skipif(cuda.cuda_status().available, reason="there is a CUDA device")


class TestStatus:
    @pytest.mark.parametrize(
        ("driver", "expected"),
        [("12.2", "the driver supports 12.2 only; update"), ("13.0", "the driver shows no device")],
    )
    def test_torch_sees_no_device(self, monkeypatch, driver, expected):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        reason = cuda._missing(driver, "14.2")[0]
        assert expected in reason
        assert ("install a torch built for CUDA 12, which" in reason) == (driver == "12.2")

    @pytest.fixture
    def torch_with_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Device")

    @pytest.mark.parametrize(
        ("built_for", "driver", "extra"),
        [("12.6", "12.8", "cuda12x"), ("12.6", "13.0", "cuda12x"), ("13.0", "13.0", "cuda13x")],
    )
    def test_no_cupy(self, monkeypatch, torch_with_cuda, built_for, driver, extra):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        reason, devices = cuda._missing(driver, None)
        assert reason == f"CuPy is not installed; pip install 'cupy-{extra}[ctk]'"
        assert devices == ("A Device",)

    @pytest.fixture
    def cupy(self, monkeypatch, torch_with_cuda):
        """CuPy that works, on torch's part as well."""
        runtime = types.SimpleNamespace(getDeviceCount=lambda: 1)
        functions = types.SimpleNamespace(get_function=lambda name: name)
        device = lambda index: contextlib.nullcontext()  # noqa: E731
        cupy = types.SimpleNamespace(
            cuda=types.SimpleNamespace(runtime=runtime, Device=device), RawModule=lambda code, options: functions
        )
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(cuda, "load_cupy", lambda: cupy)
        return cupy

    def test_available_is_said_when_a_kernel_has_been_compiled(self, monkeypatch, cupy):
        def fail(code, options):
            raise RuntimeError("libnvrtc.so.13: cannot open shared object file\nmore lines")

        assert cuda._missing("13.0", "14.2") == ("", ("A Device",))
        cupy.RawModule = fail
        monkeypatch.setattr("importlib.metadata.version", lambda name: self.not_installed(name))
        assert cuda._missing("13.0", "14.2")[0] == (
            "CuPy 14.2 cannot compile kernels here: libnvrtc.so.13: cannot open shared object file; "
            "pip install 'cupy-cuda13x[ctk]'"
        )

    def not_installed(self, name):
        raise importlib.metadata.PackageNotFoundError(name)

    def test_a_cupy_of_another_cuda_than_torch_is_named(self, monkeypatch, cupy):
        def fail(code, options):
            raise RuntimeError("no compiler")

        monkeypatch.setattr(
            "importlib.metadata.version",
            lambda name: "13.6" if name == "cupy-cuda12x" else self.not_installed(name),
        )
        assert cuda._missing("13.0", "13.6")[0] == ""  # it works
        cupy.RawModule = fail
        assert cuda._missing("13.0", "13.6")[0] == (
            "CuPy 13.6 (of cupy-cuda12x, but torch is built for CUDA 13.0) cannot compile kernels here: no compiler; "
            "pip uninstall cupy-cuda12x, then pip install 'cupy-cuda13x[ctk]'"
        )

    def test_never_raises(self, monkeypatch):
        def fail(*args):
            raise OSError("the disk is on fire")

        monkeypatch.setattr(cuda, "_driver_version", fail)
        status = cuda.cuda_status.__wrapped__()
        assert not status.available
        assert "OSError: the disk is on fire" in status.reason

    def test_torch_without_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "is built without CUDA; install" in cuda._missing("13.0", "14.2")[0]

    def test_cupy_that_does_not_work(self, monkeypatch, torch_with_cuda):
        def fail():
            raise ImportError("libcudart.so.12: cannot open\nmore lines")

        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(cuda, "load_cupy", fail)
        reason, _ = cuda._missing("13.0", "13.6")
        assert "CuPy 13.6 does not work with this driver (CUDA 13.0): libcudart.so.12: cannot open; " in reason


@pytest.mark.slow
@without_cuda
def test_a_torch_for_cuda_works_without_a_driver(tmp_path):
    """What most install on Linux, on a machine without a GPU; tests/without_driver.py says what is run."""
    command = [sys.executable, str(Path(__file__).with_name("without_driver.py")), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "(built for CUDA " in result.stdout
    assert "CUDA           not usable: " in result.stdout


class TestResolveDevice:
    def test_cpu(self):
        assert cuda.resolve_device("cpu") == cuda.resolve_device(torch.device("cpu", 0)) == torch.device("cpu")

    @without_cuda
    def test_none_is_the_cpu(self):
        assert cuda.resolve_device(None) == torch.device("cpu")

    @pytest.mark.parametrize("value", ["meta", "mps", "gpu", -1, torch.device("meta")])
    def test_other_devices(self, value):
        with pytest.raises(InvalidValueError, match="must be a CPU or CUDA device; pass device='cpu'"):
            cuda.resolve_device(value)

    @pytest.mark.parametrize("value", [1.0, True, ["cpu"]])
    def test_other_types(self, value):
        with pytest.raises(InvalidTypeError, match=r"must be a torch.device, str or int"):
            cuda.resolve_device(value)

    @without_cuda
    @pytest.mark.parametrize("value", ["cuda", "cuda:0", 0, torch.device("cuda", 1)])
    def test_cuda_without_cuda(self, value):
        with pytest.raises(DeviceError) as error:
            cuda.resolve_device(value)
        assert str(error.value).startswith("device='cuda")
        assert str(error.value).endswith(f" needs CUDA, but {cuda.cuda_status().reason}")
