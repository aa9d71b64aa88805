"""bench/record.py: the parts of a run, and the list of results; a whole run needs a device."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path

import psutil
import pytest

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.cuda import CudaStatus, cuda_status

BENCH = Path(__file__).resolve().parents[1] / "bench"
SCRIPT = BENCH / "record.py"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def record():
    return importlib.import_module("record")


@pytest.fixture
def running():
    return importlib.import_module("experiment")


@pytest.fixture
def store():
    return importlib.import_module("store")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working tree of a few files, outside of git."""
    for name in ("tests/gpu/test_device.py", "bench/record.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    """A device that is only claimed."""
    facts = {"device": "NVIDIA H200", "cuda": True, "date": "2026-01-02T03:04:05+00:00", "versions": {}}
    monkeypatch.setattr("speedtransfer.benchmark.environment.environment", lambda: dict(facts))
    return facts


def tool(code, found="0 errors", ran=True):
    """What a tool of the sanitizer left."""
    return {"exit": code, "summary": [f"========= ERROR SUMMARY: {found}"] if found else [], "ran": ran}


CONTENT = {
    "tests": {"passed": 12, "failed": 3, "skipped": 1},
    "sanitizer": {"absent": False, "tools": {"memcheck": tool(0), "racecheck": tool(86, "1 hazard")}},
}
SUITE = {
    "quick": False,
    "failures": {},
    "groups": [GroupResult("a", {}).to_json()],
}


def put(store, tree, part, run="", **changes):
    """Write a result."""
    environment = {"device": "NVIDIA H200", "cuda": True, "date": "2026-01-02T03:04:05+00:00"}
    environment.update(commit="0123456789abcdef0123", dirty=False)
    result = {"environment": environment, "complete": True}
    path = store.path_of(tree, "NVIDIA H200", part, run)
    store.write(path, {**result, **CONTENT.get(part, SUITE), **changes})
    return path


def listed(record, tree, capsys):
    capsys.readouterr()
    assert record.status(tree) == 0
    return capsys.readouterr().out.splitlines()


def run(record, tree, *parts, quick=False, seconds=100.0, archive=None):
    """Run parts of a recording."""
    tasks = [record.Task(part, seconds, quick) for part in parts]
    return record.record(tasks, time.monotonic() + seconds, tree, archive)


# --- status -------------------------------------------------------------------------------------------------------------


def test_nothing_yet(record, tree, capsys):
    (line,) = listed(record, tree, capsys)
    assert line.startswith("no results yet; run `make gpu`")


def test_every_part_is_listed(record, store, tree, capsys):
    put(store, tree, "tests", files={"test_device": 12})
    put(store, tree, "sanitizer")
    put(store, tree, "transfer")
    put(store, tree, "step", complete=False, quick=True, failures={"a": "why"})
    put(store, tree, "gpu", groups=[*SUITE["groups"], GroupResult("b", {}, skipped="needs CUDA").to_json()])
    (tree / "tests/gpu/test_bulk.py").touch()
    empty, device, *lines = listed(record, tree, capsys)
    assert (empty, device) == ("", "NVIDIA H200")
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[:5]]
    assert cells == [
        [part, "2026-01-02", "0123456789ab", text]
        for part, text in (
            ("tests", "12 passed, 3 failed, 1 skipped"),
            ("sanitizer", "memcheck clean, racecheck NOT CLEAN"),
            ("transfer", "1 groups measured"),
            ("step", "1 groups measured, 1 FAILED, quick, INCOMPLETE"),
            ("gpu", "1 groups measured, 1 not"),
        )
    ]
    assert lines[5:] == ["", "no recorded run on a GPU has passed a test of", "  tests/gpu/test_bulk.py"]


@pytest.mark.parametrize("content", ["", "[]", '{"environment": {}}'])
def test_an_unreadable_result(record, store, tree, capsys, content):
    put(store, tree, "tests").write_text(content)
    _, _, line, *_ = listed(record, tree, capsys)
    assert "unreadable" in line
    assert "record it again" in line


def test_every_recorded_result_of_this_repository_is_readable(record, capsys):
    assert record.status() == 0
    assert "unreadable" not in capsys.readouterr().out


def test_folder_of_a_device(store, tmp_path):
    path = store.path_of(tmp_path, "NVIDIA GeForce RTX 4090 (Laptop)", "step")
    assert path.relative_to(tmp_path).as_posix() == "bench/results/nvidia-geforce-rtx-4090-laptop/step.json"


# --- the parts of a run -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_gpu_tests(record, store, tree, gpu, monkeypatch):
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tree / "tests/gpu/test_device.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.fixture\ndef broken(): raise ValueError('no')\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip('why')\n"
    )
    monkeypatch.setenv("COMMIT", "abc+changes")  # a copy of the tree without git cannot know it
    assert run(record, tree, "tests") == 1
    found = store.read(store.path_of(tree, gpu["device"], "tests"))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["files"] == {"test_device": 1}
    assert found["failures"]["tests/gpu/test_device.py::test_bad"] == "assert 1 == 2"
    assert (found["environment"]["commit"], found["environment"]["dirty"]) == ("abc", True)
    logs = store.path_of(tree, gpu["device"], "").parent / "logs"
    assert '"ValueError: no"' in (logs / "tests.jsonl").read_text()
    printed = (logs / "parts.log").read_text()
    # When it happens: a run that is stopped has no summary.
    assert "tests/gpu/test_device.py::test_bad, call:" in printed.partition("= FAILURES =")[0]
    assert "tests/gpu/test_device.py::test_error, setup:" in printed.partition("= FAILURES =")[0]


@pytest.mark.slow
def test_some_gpu_tests_run_alone_after_the_others(record, store, tree, gpu, monkeypatch):
    """And a test that outlives its worker's time, or its worker, costs no other."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tree / "tests/gpu/test_device.py").write_text(
        "import os, pathlib, pytest, time\npytestmark = pytest.mark.gpu\n"
        "def test_before(): assert not pathlib.Path('alone').exists()\n"
        "def test_crashes(): os._exit(3)\n"
        "@pytest.mark.parametrize('number', range(4))\ndef test_good(number): pass\n"
    )
    (tree / "tests/gpu/test_bulk.py").write_text(
        "import os, pathlib, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_alone():\n"
        "    assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
        "    pathlib.Path('alone').touch()\n"
    )
    assert run(record, tree, "tests") == 1
    found = store.read(store.path_of(tree, gpu["device"], "tests"))
    assert (found["files"], found["failed"]) == ({"test_device": 5, "test_bulk": 1}, 1)
    assert "crashed while running" in found["failures"]["tests/gpu/test_device.py::test_crashes"]


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="tests run in one process")
def test_a_test_that_hangs_in_the_device_ends_with_its_worker(record, store, tree, gpu, monkeypatch):
    """It hears no signal, as a host that waits for a kernel does not."""
    monkeypatch.setattr(importlib.import_module("device_tests"), "TEST_S", 1)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tree / "tests/gpu/test_device.py").write_text(
        "import pytest, signal, time\npytestmark = pytest.mark.gpu\n"
        "def test_hangs():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n"
        "    time.sleep(1000)\n"
        "def test_good(): pass\n"
    )
    assert run(record, tree, "tests") == 1
    found = store.read(store.path_of(tree, gpu["device"], "tests"))
    assert (found["passed"], list(found["failures"])) == (1, ["tests/gpu/test_device.py::test_hangs"])


@pytest.fixture
def up_when(running, monkeypatch):
    """Return a function of a path: a program's time is up once that exists, however busy the machine is."""

    def wait_for(path):
        class Process(subprocess.Popen):
            def wait(self, timeout=None):
                if timeout is not None and timeout > running.GRACE_S:
                    while not path.exists() and self.poll() is None:
                        time.sleep(0.02)
                    raise subprocess.TimeoutExpired(self.args, 0)
                return super().wait(timeout)

        monkeypatch.setattr(running.subprocess, "Popen", Process)

    return wait_for


@pytest.mark.parametrize(
    "interrupts",
    [signal.default_int_handler, pytest.param(signal.SIG_IGN, marks=pytest.mark.slow)],
    ids=["heard", "ignored"],
)
def test_gpu_tests_that_hang_leave_those_before(record, store, tree, gpu, capsys, up_when, fresh_signals, interrupts):
    """Also in a background job of a script, which has SIGINT ignored."""
    signal.signal(signal.SIGINT, interrupts)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tree / "tests/gpu/test_device.py").write_text(
        "import os, pathlib, pytest, time\npytestmark = pytest.mark.gpu\ndef test_good(): pass\n"
        "def test_hangs():\n"
        "    outcomes = pathlib.Path(os.environ['OUTCOMES'])\n"
        "    while not (outcomes.exists() and 'test_good' in outcomes.read_text()): time.sleep(0.02)\n"
        "    pathlib.Path('hangs').touch()\n"
        "    time.sleep(1000)\n"
    )
    up_when(tree / "hangs")
    assert run(record, tree, "tests", seconds=1000) == 1
    assert capsys.readouterr().err == "tests: stopped at its time limit\n"
    found = store.read(store.path_of(tree, gpu["device"], "tests", ".partial"))
    assert (found["passed"], found["failed"], found["complete"]) == (1, 0, False)
    assert not store.path_of(tree, gpu["device"], "tests").exists()
    assert "1 passed, 0 failed, 0 skipped, INCOMPLETE" in listed(record, tree, capsys)[2]


def is_dead(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # not yet waited for by whoever inherits it
    except psutil.NoSuchProcess:
        return True


def test_what_hangs_is_stopped_with_all_it_has_started(running, tmp_path, up_when):
    """Also where it does not listen."""
    deaf = "import os, pathlib, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    child = deaf + "pathlib.Path('new').write_text(str(os.getpid())); os.rename('new', 'child'); time.sleep(1000)"
    parent = (
        deaf + f"import subprocess, sys; print('begin', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    up_when(tmp_path / "child")
    found = running.run([sys.executable, "-c", parent], 1000, cwd=tmp_path)
    assert found == (None, "begin\n")
    child = int((tmp_path / "child").read_text())
    while not is_dead(child):  # the limit that every test has ends this where it lives on
        time.sleep(0.02)


def test_parts_that_get_no_time_are_named(record, tree, gpu, capsys):
    assert run(record, tree, "tests", "step", seconds=0) == 1
    assert capsys.readouterr().err.splitlines() == [f"{part}: no time was left for it" for part in ("tests", "step")]


def fake_sanitizer(folder, monkeypatch, code=86):
    """A compute-sanitizer that runs nothing; racecheck ends with `code`, by default that of a race."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        f'#!/bin/sh\necho "========= $2 SUMMARY: some errors"\necho 3 passed\n[ $2 = racecheck ] && exit {code} || exit 0\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_the_sanitizer(record, store, tree, gpu, monkeypatch):
    fake_sanitizer(tree, monkeypatch)
    assert run(record, tree, "sanitizer") == 1
    found = store.read(store.path_of(tree, gpu["device"], "sanitizer"))
    assert {tool: facts["exit"] for tool, facts in found["tools"].items()} == {"memcheck": 0, "racecheck": 86}
    assert found["tools"]["memcheck"]["summary"] == ["========= memcheck SUMMARY: some errors"]
    assert found["tools"]["memcheck"]["tests"][-1] == "3 passed"
    assert found["complete"]


def test_no_sanitizer(record, store, tree, gpu, monkeypatch):
    monkeypatch.setenv("PATH", str(tree))
    assert run(record, tree, "sanitizer") == 0
    found = store.read(store.path_of(tree, gpu["device"], "sanitizer"))
    assert (found["absent"], found["tools"], found["complete"]) == (True, {}, True)


def test_a_sanitizer_without_tests_is_no_failure(record, store, tree, gpu, monkeypatch, capsys):
    fake_sanitizer(tree, monkeypatch, 5)
    assert run(record, tree, "sanitizer") == 0
    assert "memcheck clean, racecheck no tests" in listed(record, tree, capsys)[2]


@pytest.mark.parametrize(
    ("code", "found", "verdict"),
    [
        (0, "0 errors", "clean"),
        (86, "3 errors", "NOT CLEAN"),
        (1, "3 errors", "NOT CLEAN"),  # the code is that of tests that fail as well
        (1, "0 errors", "tests ended with exit code 1"),
        (5, "0 errors", "no tests"),
        (1, "", "could not run"),
        (86, "", "could not run"),
        (None, "", "stopped at its time limit"),
    ],
)
def test_what_the_sanitizer_says(code, found, verdict):
    says = importlib.import_module("device_tests").verdict
    assert says(tool(code, found)) == verdict
    assert says(tool(0, "0 errors", ran=False)) == "could not run"  # all were skipped


def test_a_refused_device_costs_no_earlier_result(record, store, tree, gpu, monkeypatch, capsys):
    before = put(store, tree, "sanitizer").read_text()
    fake_sanitizer(tree, monkeypatch)
    (tree / "compute-sanitizer").write_text("#!/bin/sh\necho '========= Error: Device not supported'\nexit 1\n")
    assert run(record, tree, "sanitizer") == 1
    assert "memcheck could not run, racecheck could not run, INCOMPLETE" in listed(record, tree, capsys)[3]
    assert store.path_of(tree, gpu["device"], "sanitizer").read_text() == before


def test_only_a_complete_run_takes_the_place_of_another(record, store, tree, gpu, monkeypatch, capsys):
    """Interrupted and quick ones are listed beside it."""
    full = put(store, tree, "tax", commit="old")

    def suite(complete):
        def runner(root, path, about, limit_s, quick):
            store.write(path, {**about, **SUITE, "quick": quick, "complete": complete})
            return ""

        return runner

    before = full.read_text()
    for complete, quick in ((False, False), (True, True)):
        monkeypatch.setattr(record, "run_suite", suite(complete))
        assert run(record, tree, "tax", quick=quick) == 0
        assert full.read_text() == before
    results = [line for line in listed(record, tree, capsys) if line.startswith("tax")]
    assert len(results) == 3
    assert [("INCOMPLETE" in line, "quick" in line) for line in results] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    monkeypatch.setattr(record, "run_suite", suite(True))
    assert run(record, tree, "tax") == 0
    assert full.read_text() != before
    assert sorted(path.name for path in full.parent.glob("*.json")) == ["tax.json", "tax.quick.json"]


def test_every_part_goes_into_the_archive(record, store, tree, gpu, monkeypatch, capsys):
    archive, listings = tree / "out" / "results.tgz", []

    def suite(root, path, about, limit_s, quick):
        if archive.exists():
            with tarfile.open(archive) as file:
                listings.append(sorted(file.getnames()))
        store.write(path, {**about, **SUITE, "complete": about["part"] != "step"})
        path.with_name("tax.png").touch()
        return ""

    monkeypatch.setattr(record, "run_suite", suite)
    assert run(record, tree, "tax", "step", archive=archive) == 0
    with tarfile.open(archive) as file:
        listings.append(sorted(file.getnames()))
    log = "bench/results/nvidia-h200/logs/parts.log"
    first = [log, *(f"bench/results/nvidia-h200/tax.{kind}" for kind in ("json", "png"))]
    assert listings == [first, [log, "bench/results/nvidia-h200/step.partial.json", *first[1:]]]
    assert archive.with_suffix(".log").read_text() == (tree / log).read_text()

    (tree / "file").touch()
    assert run(record, tree, "tax", archive=tree / "file" / "results.tgz") == 0
    assert f"cannot write {tree / 'file' / 'results.tgz'}: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_suite(record, store, tree, gpu, capfd):
    """Of this package, on this machine, in a process of its own."""
    assert run(record, tree, "tax", quick=True, seconds=500) == 0
    found = store.read(store.path_of(tree, gpu["device"], "tax", ".quick"))
    assert not store.path_of(tree, gpu["device"], "tax").exists()
    assert (found["suite"], found["quick"], found["complete"], found["failures"]) == ("tax", True, True, {})
    assert found["environment"]["device"] == gpu["device"]
    groups = [GroupResult.from_json(item) for item in found["groups"]]
    assert all(len(g.ran) == 3 for g in groups)
    assert groups[-1].title in capfd.readouterr().out


def test_a_group_that_breaks_costs_no_other(record, store, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("a fault\nof ours")

    def wrong():
        raise AssertionError("row 3 differs")

    groups = [
        Group("fine", lambda: [Case("a", lambda: None, role="ours")]),
        Group("breaks", fail),
        Group("is wrong", lambda: [Case("a", lambda: None, wrong, role="ours")]),
        Group("fine too", lambda: [Case("a", lambda: None)]),
    ]
    module = types.SimpleNamespace(groups=lambda device, quick: groups)
    monkeypatch.setattr(type(store.suites()["step"]), "module", module)
    path = tmp_path / "step.json"
    job = {"about": {"part": "step", "more": 1}, "path": str(path), "quick": True, "seconds": 100.0}
    assert record.main(["suite", json.dumps(job)]) == 1
    found = store.read(path)
    assert [len(g["cases"]) for g in found["groups"]] == [1, 0, 0, 1]
    assert found["failures"]["breaks"] == "RuntimeError: a fault of ours"
    assert "row 3 differs" in found["failures"]["is wrong"]
    assert (found["complete"], found["more"]) == (True, 1)


# --- make gpu in parts --------------------------------------------------------------------------------------------------


def test_every_part_fits_into_a_lease(record, store):
    assert sorted(record.GPU_PARTS) == sorted(record.HOST_BYTES) == [1, 2, 3]
    assert record.PART_S < 600
    for tasks in record.GPU_PARTS.values():
        *limited, last = tasks
        assert last.limit_s >= record.PART_S, "the last one has all that is left"
        assert sum(task.limit_s for task in limited) < record.PART_S - record.SPARE_S
        assert all(task.name in (*store.CHECKS, *store.MEASURED) for task in tasks)
    assert all((BENCH.parent / name).exists() for name in importlib.import_module("device_tests").ALONE)


@pytest.fixture
def part(record, gpu, monkeypatch):
    """What the tasks of a part were run with: name, limit, quick; each fails, and leaves a line in the log."""
    asked = []

    def runner(root, path, about, limit_s, quick=None):
        asked.append((about["part"], limit_s, quick))
        record.log(f"this is {about['part']}\n")
        return "broken"

    for name in ("run_tests", "run_sanitizer", "run_suite"):
        monkeypatch.setattr(record, name, runner)
    monkeypatch.setattr(record, "STARTED", time.monotonic())
    for name in ("SPEEDTRANSFER_HOST_BYTES", "SPEEDTRANSFER_CACHE", "CUPY_CACHE_DIR"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    return asked


def test_a_part_goes_on_after_failures(record, tree, part, capsys):
    archive = tree / "out" / "part1.tgz"
    assert record.record_part(1, False, float("inf"), tree, archive) == 1
    assert [(name, quick) for name, _, quick in part] == [("tests", None), ("gpu", False)]
    assert part[-1][1] > 490, "what the others have left"
    assert float(os.environ["SPEEDTRANSFER_HOST_BYTES"]) > 0
    assert capsys.readouterr().err.splitlines()[-1] == "gpu: broken"
    with tarfile.open(archive) as file:
        (log,) = file.getnames()
        assert log.endswith("logs/part1.log")
        assert b"this is gpu" in file.extractfile(log).read()
    assert "this is tests" in archive.with_suffix(".log").read_text()


def test_what_was_calibrated_and_compiled_is_in_the_archive(record, store, tree, part, gpu):
    """The next machine then need not do it again; in a part of a shorter time."""
    folder = store.path_of(tree, gpu["device"], "").parent / "cache"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "rows.cubin").touch()
    record.record_part(3, True, 270.0, tree, tree / "part3.tgz")
    assert [(name, round(limit), quick) for name, limit, quick in part[:2]] == [
        ("sanitizer", 100, None),
        ("precision", 40, True),
    ]
    assert os.environ["SPEEDTRANSFER_CACHE"] == str(folder)
    assert Path(os.environ["CUPY_CACHE_DIR"]).parent == folder
    with tarfile.open(tree / "part3.tgz") as file:
        assert "bench/results/nvidia-h200/cache/kernels/rows.cubin" in file.getnames()


def test_what_is_there_is_kept_whatever_ends_the_run(record, store, tree, gpu, monkeypatch, fresh_signals):
    def stopped(*args):
        record.log("begun")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(record, "ROOT", tree)
    monkeypatch.setattr(record.record, "__defaults__", (tree, None, "parts"))
    monkeypatch.setattr(record, "run_suite", stopped)
    with pytest.raises(SystemExit) as ended:
        record.main(["here", "--only", "step", "--archive", str(tree / "all.tgz")])
    assert ended.value.code == 128 + signal.SIGTERM
    with tarfile.open(tree / "all.tgz") as file:
        (log,) = file.getnames()
        assert file.extractfile(log).read().endswith(b"begun")


@pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")
def test_launches_need_the_emulated_device(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launches.py"])
    assert importlib.import_module("launches").main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: this counts on the emulated GPU")


# --- the command line ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")
@pytest.mark.parametrize("options", [[], ["--only", "step"], ["--part", "1"]])
def test_gpu_without_cuda_refuses_in_one_line(record, capsys, options):
    assert record.main(["gpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line == f"error: the GPU tests and benchmarks need CUDA, but {cuda_status().reason}"


def test_options(record, store, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(record, "record", lambda tasks, end, archive: asked.append((list(tasks), archive)) or 0)
    found = CudaStatus(True, "", "14.2", "13.0", "13.0", ("NVIDIA Test 1",))
    monkeypatch.setattr("speedtransfer.cuda.cuda_status", lambda: found)
    assert record.main(["here", "--only", "step,tax", "--quick", "--limit", "60", "--total", "90"]) == 0
    assert record.main(["gpu", "--archive", "a.tgz"]) == 0
    usual = (*store.CHECKS, *store.SUITES, "tax", "mixed", "exchange", "gpu")
    assert asked == [
        ([record.Task(part, 60.0, True) for part in ("step", "tax")], None),
        ([record.Task(part, 300.0) for part in usual], Path("a.tgz")),
    ]
    with pytest.raises(SystemExit):
        record.main(["here", "--only", "tests"])
    assert "there is no part tests of here; choose from transfer, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cuda", "extras"),
    [(None, "dev"), ("11.8", "dev"), ("12.4", "dev,cuda13"), ("13.0", "dev,cuda13"), ("14.1", "dev,cuda13")],
)
def test_make_picks_the_cuda_extra_of_the_torch_that_it_installs(tmp_path, cuda, extras):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + (f"echo '| Driver Version: 1 CUDA Version: {cuda} |'\n" if cuda else "exit 1\n"))
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    argv = ["make", "-n", "VENV=does-not-exist", "does-not-exist/.ready-dev"]
    done = subprocess.run(argv, cwd=SCRIPT.parents[1], env=environment, capture_output=True, text=True, check=True)
    assert f'".[{extras}]"' in done.stdout
    # A build of torch that this driver can run: the package index has one for CUDA 13.
    assert ("pass TORCH_INDEX=" in done.stderr) == (cuda == "12.4")
    named = [*argv, "TORCH_INDEX=https://example.org/cu12"]
    done = subprocess.run(named, cwd=SCRIPT.parents[1], env=environment, capture_output=True, text=True, check=True)
    assert "--extra-index-url https://example.org/cu12" in done.stdout
    assert f'".[{extras.replace("13", "12")}]"' in done.stdout
    assert "TORCH_INDEX" not in done.stderr
