"""bench/record.py: what a run keeps, whatever happens, and the list of results; a whole run needs a device."""

import importlib
import json
import os
import signal
import tarfile
import time
import types
from pathlib import Path

import pytest

from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import GroupResult

BENCH = Path(__file__).resolve().parents[1] / "bench"
SUITE = {"quick": False, "failures": {}, "groups": [GroupResult("a", {}).to_json()]}


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("record")


@pytest.fixture
def store(record):
    return importlib.import_module("store")


@pytest.fixture
def tree(tmp_path, store, monkeypatch):
    """A working tree of a few files, outside of git, on a device that is only claimed."""
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "tests/gpu/test_device.py").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setenv("COMMIT", "abc+changes")  # a copy of the tree without git cannot know it
    facts = {"device": "NVIDIA H200", "cuda": True, "date": "2026-01-02T03:04:05+00:00", "versions": {}}
    facts.update(commit="unknown", dirty=None)
    monkeypatch.setattr("speedtransfer.benchmark.environment.environment", lambda: dict(facts))
    return tmp_path


def put(store, part, run="", **content):
    environment = {"device": "NVIDIA H200", "cuda": True, "date": "2026-01-02T03:04:05+00:00"}
    environment.update(commit="0123456789abcdef0123", dirty=False)
    path = store.folder_of("NVIDIA H200") / f"{part}{run}.json"
    store.write(path, {"environment": environment, "complete": True, **SUITE, **content})
    return path


def run(record, part, quick=False):
    return record.record([record.Task(part, 100.0, quick)], time.monotonic() + 100.0)


def test_every_recorded_result_of_this_repository_is_readable(record):
    assert record.status() == 0


# --- checks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "problem"), [(1, "1 failed"), (None, "stopped at its time limit")])
def test_outcomes_of_gpu_tests_are_counted(record, store, tree, monkeypatch, code, problem):
    """Of a run whose worker was killed, too."""
    module = importlib.import_module("device_tests")
    tests = [("passed", "a::x"), ("passed", "b::x"), ("failed", "a::y"), ("passed", "a::y"), ("skipped", "a::z")]
    lines = [json.dumps({"test": f"tests/gpu/test_{name}", "outcome": what, "message": "why"}) for what, name in tests]

    def pretend(command, limit_s, **given):
        Path(given["OUTCOMES"]).write_text("\n".join(lines))
        return code, ""

    monkeypatch.setattr(module, "run", pretend)
    assert module.run_tests(tree / "found.json", {"part": "tests"}, 100.0) == problem
    found = store.read(tree / "found.json")
    assert [found[key] for key in ("passed", "failed", "skipped", "complete")] == [2, 1, 1, code == 1]
    assert (found["files"], found["failures"]) == ({"test_a": 1, "test_b": 1}, {"tests/gpu/test_a::y": "why"})


# --- suites -------------------------------------------------------------------------------------------------------------


def test_a_suite_is_measured_and_a_stopped_run_goes_on(record, store, tmp_path, monkeypatch):
    """With the groups that were measured, if they are of the same code and the same options; as in a process of its own."""
    calls, path = [], tmp_path / "step.json"
    made = [Group(name, lambda name=name: calls.append(name) or []) for name in "ab"]
    made.append(Group("breaks", lambda: 1 / 0))
    monkeypatch.setattr(
        type(store.suites()["step"]), "module", types.SimpleNamespace(groups=lambda *about, rows, **given: made)
    )
    about = {"part": "step", "environment": {"commit": "abc", "dirty": False, "versions": {}}, "more": 1}
    job = {"about": about, "path": str(path), "quick": True, "seconds": 100.0, "options": {"rows": 5}, "resume": True}
    assert record.measure_here(**job) == 2, "there is nothing to go on with"
    assert record.measure_here(**{**job, "resume": False}) == 1
    found = store.read(path)
    assert found["failures"] == {"breaks": "ZeroDivisionError: division by zero"}
    assert (found["complete"], found["more"], found["environment"]) == (True, 1, about["environment"])
    found["groups"][1]["skipped"] = "the time was up"
    store.write(path, found)
    for others in ({"rows": 6}, {"rows": 5, "rosw": 5}):
        assert record.measure_here(**{**job, "options": others}) == 2
    made.pop()
    assert record.measure_here(**job) == 0
    assert calls == ["a", "b", "b"]
    assert [group["skipped"] for group in store.read(path)["groups"]] == ["", ""]


def test_only_a_complete_run_takes_the_place_of_another(record, store, tree, monkeypatch, capsys):
    full, complete = put(store, "tax", commit="old"), []

    def suite(path, about, limit_s, task):
        store.write(path, {**about, **SUITE, "quick": task.quick, "complete": complete[-1]})
        return ""

    monkeypatch.setattr(record, "run_suite", suite)
    before = full.read_text()
    for done, quick in ((False, False), (True, True)):
        complete.append(done)
        assert run(record, "tax", quick=quick) == 0
        assert full.read_text() == before
    capsys.readouterr()
    record.status()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tax")]
    assert [line.rpartition(" measured")[2] for line in said] == ["", ", INCOMPLETE", ", quick"]
    assert run(record, "tax") == 0
    before = full.read_text()
    assert json.loads(before)["environment"]["commit"] == "abc"
    assert sorted(path.name for path in full.parent.glob("*.json")) == ["tax.json", "tax.quick.json"]
    put(store, "tax", store.PARTIAL, commit="old")
    monkeypatch.setattr(record, "run_suite", lambda *about: "stopped before it wrote anything")
    assert run(record, "tax") == 1
    assert full.read_text() == before, "what an earlier run has left is not this one's"


def test_a_part_goes_on_after_failures_and_its_archive_has_all(record, store, tree, monkeypatch, capsys):
    """Also what was calibrated and compiled, which the next machine then need not do again."""
    folder, archive, asked = store.folder_of("NVIDIA H200"), tree / "out" / "part3.tgz", []
    (folder / "cache/kernels").mkdir(parents=True)
    (folder / "cache/kernels/rows.cubin").touch()

    def runner(path, about, limit_s, task=None):
        if asked:  # written after each task: a part that is killed loses no more than its last
            with tarfile.open(archive) as file:
                assert any(f"/{asked[-1][0]}." in name for name in file.getnames())
        asked.append((about["part"], round(limit_s), task and task.quick))
        record.store.log(f"this is {about['part']}\n")
        store.write(path, {**about, **SUITE, "tools": {}, "absent": True})
        return "broken"

    monkeypatch.setattr(record, "run_suite", runner)
    monkeypatch.setattr(importlib.import_module("device_tests"), "run_sanitizer", runner)
    monkeypatch.setattr(record, "STARTED", time.monotonic())
    for name in ("SPEEDTRANSFER_HOST_BYTES", "SPEEDTRANSFER_CACHE", "CUPY_CACHE_DIR"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    assert record.record_part(3, True, 270.0, archive) == 1
    assert asked[:2] == [("sanitizer", 100, None), ("precision", 40, True)]
    assert asked[-1][0] == "memory"
    assert asked[-1][1] > 200, "what the others have left"
    assert float(os.environ["SPEEDTRANSFER_HOST_BYTES"]) > 0
    assert os.environ["SPEEDTRANSFER_CACHE"] == str(folder / "cache")
    assert capsys.readouterr().err.splitlines()[-1] == "memory: broken"
    with tarfile.open(archive) as file:
        names = {name.removeprefix("bench/results/nvidia-h200/") for name in file.getnames()}
        log = file.extractfile("bench/results/nvidia-h200/logs/part3.log").read()
    assert {"cache/kernels/rows.cubin", "precision.quick.json", "sanitizer.partial.json"} <= names
    assert b"this is memory" in log
    assert archive.with_suffix(".log").read_bytes().startswith(log)


def test_what_is_there_is_kept_whatever_ends_the_run(record, tree, monkeypatch, fresh_signals):
    def stopped(*args):
        record.store.log("begun")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(record, "run_suite", stopped)
    with pytest.raises(SystemExit) as ended:
        record.main(["here", "--only", "step", "--archive", str(tree / "all.tgz")])
    assert ended.value.code == 128 + signal.SIGTERM
    with tarfile.open(tree / "all.tgz") as file:
        _, log = file.getnames()
        assert file.extractfile(log).read().endswith(b"begun")
