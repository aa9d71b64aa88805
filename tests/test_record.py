"""bench/record.py: digests, summaries and the list of results; a run itself needs a device."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedtransfer.device import CudaStatus, cuda_status

SCRIPT = Path(__file__).parents[1] / "bench" / "record.py"


@pytest.fixture(scope="module")
def record():
    spec = importlib.util.spec_from_file_location("bench_record", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """A working tree of a few files."""
    for name in (
        "speedtransfer/device.py",
        "speedtransfer/kernels/rows.cu",
        "tests/gpu/test_device.py",
        "tests/test_other.py",
        "bench/bench_rows.py",
        "bench/record.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def write(record, tree, what, **changes):
    result = {
        "what": what,
        "device": "NVIDIA H200",
        "cuda": True,
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef0123",
        "dirty": False,
        "digest": record.digest(tree, what),
        "passed": 12,
        "failed": 0,
    }
    result.update(changes)
    path = tree / "bench/results/nvidia-h200" / f"{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return path


def listed(record, tree, capsys):
    assert record.status(tree) == 0
    return capsys.readouterr().out.splitlines()


def test_nothing_yet(record, tree, capsys):
    assert listed(record, tree, capsys) == ["no GPU results yet; run `make gpu` on a machine with a CUDA device"]


def test_current(record, tree, capsys):
    write(record, tree, "tests")
    write(record, tree, "benchmarks", failed=3, dirty=True)
    heading, benchmarks, tests = listed(record, tree, capsys)
    assert heading.split() == ["device", "what", "date", "commit", "passed", "failed", "state"]
    assert tests.split() == [
        "NVIDIA",
        "H200",
        "tests",
        "2026-01-02T03:04:05+00:00",
        "0123456789ab",
        "12",
        "0",
        "current",
    ]
    assert benchmarks.split()[4:] == ["0123456789ab+changes", "12", "3", "current"]


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("speedtransfer/device.py", {"tests", "benchmarks"}),
        ("speedtransfer/kernels/rows.cu", {"tests", "benchmarks"}),
        ("speedtransfer/new.py", {"tests", "benchmarks"}),
        ("tests/gpu/test_device.py", {"tests"}),
        ("bench/bench_rows.py", {"benchmarks"}),
        ("bench/record.py", set()),
        ("tests/test_other.py", set()),
    ],
)
def test_stale_after_a_change(record, tree, capsys, changed, stale):
    for what in record.WHAT:
        write(record, tree, what)
    (tree / changed).write_text("changed")
    for line in listed(record, tree, capsys)[1:]:
        assert line.endswith("STALE (sources changed since)") == (line.split()[2] in stale)


def test_a_renamed_file_changes_the_digest(record, tree):
    before = record.digest(tree, "tests")
    (tree / "speedtransfer/device.py").rename(tree / "speedtransfer/devices.py")
    assert record.digest(tree, "tests") != before


@pytest.mark.parametrize("content", ["", "[]", '{"device": "NVIDIA H200"}'])
def test_an_unreadable_result(record, tree, capsys, content):
    write(record, tree, "tests").write_text(content)
    (_, line) = listed(record, tree, capsys)
    assert "unreadable" in line
    assert "run `make gpu` again" in line


def test_slug(record):
    assert record.slug("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop"


def test_commit_outside_of_git(record, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit_of(tmp_path) == ("unknown", None)


def test_summary(record, tmp_path):
    source = tmp_path / "test_some.py"
    source.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.fixture\ndef broken(): raise ValueError('no')\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip('why')\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(source),
        f"--junitxml={tmp_path / 'j.xml'}",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    found = record.summary(tmp_path / "j.xml")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"]["test_some.test_bad"] == ["assert 1 == 2"]


def test_run_records_both_suites(record, tmp_path, monkeypatch, capsys):
    """A whole run over two small suites, on a device that is only claimed."""
    found = CudaStatus(True, "", "14.2", "13.0", "13.0", ("NVIDIA Test 1",))
    monkeypatch.setattr("speedtransfer.device.cuda_status", lambda: found)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tmp_path / "tests/gpu/test_one.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
    )
    (tmp_path / "bench/test_speed.py").write_text(
        "def test_speed(benchmark): benchmark.pedantic(sum, ([1, 2],), rounds=3)\n"
    )
    assert record.run(tmp_path) == 1  # one test fails
    folder = tmp_path / "bench/results/nvidia-test-1"
    tests, benchmarks = (json.loads((folder / f"{what}.json").read_text()) for what in record.WHAT)
    assert (tests["passed"], tests["failed"], list(tests["failures"])) == (1, 1, ["tests.gpu.test_one.test_bad"])
    assert (benchmarks["passed"], benchmarks["failed"]) == (1, 0)
    assert len(benchmarks["benchmarks"][0]["stats"]["data"]) == 3  # raw samples
    for result in (tests, benchmarks):
        assert (result["device"], result["driver"], result["commit"], result["dirty"]) == (
            "NVIDIA Test 1",
            "13.0",
            "unknown",
            None,
        )
        assert set(result["versions"]) == {"python", "torch", "torch_cuda", "cupy", "numpy", "speedtransfer"}
    capsys.readouterr()
    states = [line.split()[-1] for line in listed(record, tmp_path, capsys)[1:]]
    assert states == ["current", "current"]


@pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")
def test_run_without_cuda_refuses_in_one_line():
    done = subprocess.run([sys.executable, str(SCRIPT), "gpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line == f"error: the GPU tests and benchmarks need CUDA, but {cuda_status().reason}"


@pytest.mark.parametrize(
    ("cuda", "extras"),
    [(None, "dev"), ("11.8", "dev"), ("12.4", "dev,cuda12"), ("13.0", "dev,cuda13"), ("14.1", "dev,cuda13")],
)
def test_make_picks_the_cuda_extra_of_the_driver(tmp_path, cuda, extras):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + (f"echo '| Driver Version: 1 CUDA Version: {cuda} |'\n" if cuda else "exit 1\n"))
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    argv = ["make", "-n", "VENV=does-not-exist", "does-not-exist/.ready"]
    done = subprocess.run(argv, cwd=SCRIPT.parents[1], env=environment, capture_output=True, text=True, check=True)
    assert f'".[{extras}]"' in done.stdout
