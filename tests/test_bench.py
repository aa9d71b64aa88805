"""What bench/ has recorded gets into the docs; examples are recorded; make passes on what it is given."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from speedtransfer.benchmark.results import CaseResult, GroupResult, to_text

ROOT = Path(__file__).resolve().parents[1]
TINY = "--steps 6 --batch 2 --context 8 --vocabulary 40 --width 8 --layers 2 --attention-heads 2 --rows 50 --dim 4"


@pytest.fixture(autouse=True)
def no_make(monkeypatch):
    """`make test` tells its children so, and a make that is tested would say more."""
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a script of bench/ by its name."""
    for folder in ("examples", "bench"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


def a_result() -> dict:
    """A recorded suite of one group."""
    cases = [CaseResult(name, "other", 0, samples_s=[1e-3], host_s=[1e-3]) for name in ("NumPy", "on the device")]
    environment = {
        "device": "NVIDIA Test 1",
        "cuda": True,
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.13", "cupy": "14.2"},
    }
    groups = [GroupResult("a product", {"experiment": "matmul", "size": 50}, cases).to_json()]
    return {"suite": "tax", "quick": False, "options": {}, "environment": environment, "groups": groups, "seconds": 1.0}


def page(root: Path) -> Path:
    """The page that shows suites."""
    (root / "docs").mkdir(exist_ok=True)
    return root / "docs" / "results.md"


def test_a_case_is_a_line_of_json():
    text = to_text(a_result())
    assert json.loads(text) == a_result()
    lines = [line for line in text.splitlines() if '"samples_s"' in line]
    assert len(lines) == 2
    assert all(line.strip().startswith('{"name": ') for line in lines)


def test_pages_show_what_is_recorded(tmp_path, bench):
    store, readme = bench("store"), bench("readme")
    section = readme.SECTIONS[0]
    text = f"before\n{section.begin}\nold figures\n{section.end}\nafter\n"
    page(tmp_path).write_text(text)
    assert readme.main(check=False, root=tmp_path) == 0
    assert page(tmp_path).read_text() == text  # nothing is recorded

    path = store.path_of(tmp_path, "NVIDIA Test 1", "tax")
    store.write(path, a_result())
    assert readme.main(check=True, root=tmp_path) == 1
    assert readme.main(check=False, root=tmp_path) == 0
    assert readme.main(check=True, root=tmp_path) == 0

    shown = page(tmp_path).read_text()
    assert shown.startswith("before\n")
    assert shown.endswith("after\n")
    assert "old figures" not in shown
    for part in ("### NVIDIA Test 1", "0123456789ab", "(../bench/results/nvidia-test-1/tax.png)"):
        assert part in shown
    assert 1000 < path.with_suffix(".png").stat().st_size <= bench("experiment").PLOT_BYTES


def test_what_cannot_be_shown_is_left_out(tmp_path, bench, monkeypatch, capsys):
    store, readme = bench("store"), bench("readme")
    monkeypatch.setattr(bench("experiment"), "PLOT_BYTES", 100)
    page(tmp_path).write_text(f"{readme.SECTIONS[0].begin}\n{readme.SECTIONS[0].end}\n")
    store.write(store.path_of(tmp_path, "NVIDIA Test 1", "tax"), a_result())
    for name, content in (("step", "{"), ("memory", "[]"), ("transfer", '{"environment": {"cuda": true}}')):
        store.path_of(tmp_path, "NVIDIA Test 1", name).write_text(content)
    for run in (store.QUICK, store.PARTIAL):
        store.write(store.path_of(tmp_path, "A quick GPU", "tax", run), a_result())
    assert readme.main(check=False, root=tmp_path) == 0
    lines = [line.partition(" ")[0].rpartition("/")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["transfer.json", "step.json", "memory.json", "tax.png"]
    shown = page(tmp_path).read_text()
    assert "tax.png" in shown
    assert "quick GPU" not in shown


def test_every_section_has_its_marks(bench):
    for section in bench("readme").SECTIONS:
        text = (ROOT / section.page).read_text(encoding="utf-8")
        assert text.index(section.begin) < text.index(section.end)


def recorded_as(bench, root: Path, part: str, name: str) -> tuple[dict, str]:
    """What an example has recorded, and the page with the section that shows it."""
    store, readme = bench("store"), bench("readme")
    ((found, path),) = store.recorded(root)
    assert found == part
    assert 5000 < path.with_suffix(".png").stat().st_size < 150_000
    (section,) = [section for section in readme.SECTIONS if section.name == name]
    page(root).write_text(f"before\n\n{section.begin}\n\n{section.end}\n\nafter\n", encoding="utf-8")
    text = readme.documents(root, [])[page(root)]
    assert f"](../{path.with_suffix('.png').relative_to(root).as_posix()})" in text
    return json.loads(path.read_text(encoding="utf-8")), text


@pytest.mark.slow
def test_the_parallel_example_is_recorded_and_shown(bench, tmp_path):
    assert bench("record_examples").main(["parallel", "--quick", "--steps", "6"], tmp_path) == 0
    result, shown = recorded_as(bench, tmp_path, "parallel_example", "parallel example")
    assert result["complete"]
    assert "| DDP, sharded | (32, 5) | 50 | " in shown
    assert "6 steps of 64 examples, 2 processes of DistributedDataParallel, table of 100 x 8; first loss " in shown


@pytest.mark.slow
def test_the_ngram_example_is_recorded_and_shown(bench, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"a b c{number % 7} d e{number % 3}" for number in range(200)), encoding="utf-8")
    arguments = ["ngram_lm", *TINY.split(), "--data", str(text), "--only", "dense", "exact"]
    assert bench("record_examples").main(arguments, tmp_path) == 0
    result, shown = recorded_as(bench, tmp_path, "ngram_example", "ngram example")
    assert [len(one["losses"]) for one in result["contenders"].values()] == [6, 6]
    assert '| speedtransfer, idle="exact" | ' in shown


def test_what_an_example_refuses_is_not_recorded(bench, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(SystemExit) as stop:
        bench("record_examples").main(["ngram_lm", *TINY.split(), "--data", str(tmp_path / "none.txt")], root)
    assert stop.value.code == 2
    assert not root.exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_passes_arguments_on():
    argv = ["make", "-n", "--no-print-directory", "gpu", "PY=python3", "ARGS=--only tests --quick"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("; ") == [
        "python3 bench/record.py gpu --only tests --quick",
        "status=$?",
        "python3 bench/readme.py && exit $status\n",
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(("record", "readme", "error"), [(3, 0, 3), (0, 4, 4), (0, 0, 0)])
def test_make_writes_the_readme_also_after_a_failure(tmp_path, record, readme, error):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $1"\n[ "$1" = bench/record.py ] && exit {record} || exit {readme}\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-s", "bench", f"PY={python}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ran bench/record.py", "ran bench/readme.py"]
    assert done.returncode == (2 if error else 0)
    assert (f"Error {error}" in done.stderr) == bool(error)
