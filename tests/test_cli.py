"""The command line: what it prints, and how it fails."""

import importlib
import os
import re
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch

import speedtransfer
from speedtransfer import __main__
from speedtransfer.cli import main
from speedtransfer.cuda import CudaStatus

NO_CUPY = "CuPy is not installed; pip install 'cupy-cuda13x[ctk]'"
NO_HEADERS = "CuPy 14.2 cannot compile; pip install 'x[ctk]'"
NO_CUDA = "torch is built without CUDA; install a CUDA build"
NO_DRIVER = "this machine has no NVIDIA driver; install one"
# What is not there, the version of CuPy, the devices, whether they are calibrated; and the last line.
STATES = [
    (NO_CUPY, None, ("H200",), False, "next: `pip install 'cupy-cuda1"),
    (NO_HEADERS, "14.2", ("H200",), False, "next: pip install 'x[ctk]'; or stay on the CPU"),
    (NO_CUDA, None, (), False, "next: install a CUDA build; or stay on the CPU"),
    (NO_DRIVER, None, None, False, "next: `speedtransfer word2vec demo -o demo` trains vectors on the CPU"),
    ("", "14.2", ("H200",), False, "next: `speedtransfer calibrate` measures"),
    ("", "14.2", ("H200",), True, "next: `speedtransfer plan --rows 1e9 --dim 128 --lookups 65536`, or measure"),
]


@pytest.mark.parametrize(("reason", "cupy", "devices", "calibrated", "words"), STATES)
def test_info_ends_with_what_to_do_next(run, monkeypatch, reason, cupy, devices, calibrated, words):
    from speedtransfer import cli

    status = CudaStatus(not reason, reason, cupy, "13.0", None if devices is None else "13.0", devices or ())
    monkeypatch.setattr("speedtransfer.cuda.cuda_status", lambda: status)
    monkeypatch.setattr("speedtransfer.cuda.resolve_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr("speedtransfer.engines.calibration.load", lambda device: object() if calibrated else None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1, 2))
    monkeypatch.setattr(cli, "_link", lambda number: "link")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3 if calibrated else 1)
    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith(words)
    for there in (torch.__version__, "host memory", reason.partition(";")[0]):
        assert there in " ".join(out.split())
    assert re.search(r"\b3 threads *\n" if calibrated else r"\b1 thread *\n", out)


def test_calibrate_says_before_it_measures_that_nothing_can_be_kept(run, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("speedtransfer.engines.calibrate_device", lambda *args: pytest.fail("measured"))
    code, out, err = run("calibrate", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.endswith("; let SPEEDTRANSFER_CACHE name a folder that you may write to\n")


def test_version(run):
    assert run("--version") == (0, f"speedtransfer {speedtransfer.__version__}\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.sweep
@pytest.mark.parametrize("argument", ["--help", "--version", pytest.param("info", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_has_no_room_is_one_line(argument, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-m", "speedtransfer", argument]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("speedtransfer: error: cannot write the output (No space left on device);")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_during_an_import_is_one_line(monkeypatch, capsys):
    """The import of the command line itself takes a tenth of a second, that of torch by a command seconds."""

    class Interrupted(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name in ("speedtransfer.cli", "numpy.interrupted"):
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["speedtransfer", "info"])
    monkeypatch.setattr("speedtransfer.cli._rows", lambda: importlib.import_module("numpy.interrupted"))
    for run in (main, __main__.main):
        with pytest.raises(SystemExit) as stop:
            run()
        assert (stop.value.code, *capsys.readouterr()) == (130, "", "speedtransfer: aborted\n")
        monkeypatch.delitem(sys.modules, "speedtransfer.cli", raising=False)


BAD = """
word2vec train missing.txt -o out -> missing.txt
word2vec train one.txt -o out -> leaves 1 of 1 distinct words
word2vec train good.txt -o taken -> taken
word2vec train good.txt -o out --memory pined -> pinned
word2vec train good.txt -o out --dim x -> integer
word2vec train good.txt -> -o
word2vec train good.txt -o out --dimm 3 -> --dimm
word2vec nearest good.txt river -> good.txt
word2vec nearest LONG river -> is too long for the file system; choose a shorter one
trian -> trian
calibrate --device tpu -> pass --device cpu or --device cuda:0
bench transfr -> 'transfer'
bench transfer --table-bytes 65535 -> --table-bytes is 65535 but must be a number from 65536 on
bench step --table-bytes 1e9 -> --table-bytes means nothing to suite 'step'; it is for transfer
bench transfer --json taken -> name the file
bench all --json good.txt -> cannot write 'good.txt/transfer.json'
bench transfer --plot good.txt/plots -> cannot write 'good.txt/plots/report.md'
"""


@pytest.mark.parametrize("bad", BAD.strip().splitlines())
def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch, bad):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("speedtransfer.benchmark.commands.run_suite", lambda *given: pytest.fail("measured"))
    texts = {"one.txt": b"word " * 1000, "good.txt": b"the river and the bank of stone " * 200}
    texts |= {"taken/vectors.bin": b"precious"}
    (tmp_path / "taken").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    arguments, words = bad.split(" -> ")
    code, out, err = run(*arguments.replace("LONG", "x" * 999).split())
    assert code == 2, out + err
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert words in line
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in files} == texts, "nothing is written"


def test_help_imports_neither_torch_nor_numpy():
    commands = ["", "info", "plan", "word2vec", "word2vec train", "word2vec nearest"]
    code = f"""
import sys
from speedtransfer.cli import main
for command in {commands}:
    sys.argv[1:] = [*command.split(), "--help"]
    try:
        main()
    except SystemExit:
        print({{"numpy", "numba", "rich.progress", "torch"}} & {{*sys.modules}})
"""
    argv = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.count("Usage:") == result.stdout.count("\nset()\n") == len(commands)


def test_calibrate(run, monkeypatch, tmp_path):
    from speedtransfer import engines as package
    from speedtransfer.engines import HostEngine, ReferenceEngine, timing

    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path))
    plane, engines = torch.zeros(1 << 16, dtype=torch.uint8), {"host": HostEngine(), "reference": ReferenceEngine()}

    def calibrate(device, progress):
        return timing.calibrate(engines, device, plane, (16, 512), (10, 100), progress)

    monkeypatch.setattr(package, "calibrate_device", calibrate)
    code, _, err = run("calibrate", "--device", "cpu", "--show")
    assert (code, err.count("\n")) == (2, 1)
    assert "cpu has not been measured with these versions; run `speedtransfer calibrate`" in err
    code, measured, err = run("calibrate", "--device", "cpu")
    assert (code, err) == (0, "")
    assert all(word in measured for word in ("one large copy", "gather", "scatter", "reference, GB/s", str(tmp_path)))
    assert run("calibrate", "--device", "cpu", "--show") == (0, measured, "")
