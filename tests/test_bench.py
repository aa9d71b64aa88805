"""What bench/ has recorded gets into the docs; examples are recorded; make passes on what it is given."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from speedtransfer.benchmark.results import CaseResult, GroupResult, to_text

ROOT = Path(__file__).resolve().parents[1]
TINY = "--steps 6 --batch 2 --context 8 --vocabulary 40 --width 8 --layers 2 --attention-heads 2 --rows 50 --dim 4"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a script of bench/ by its name."""
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # `make test` tells its children so
        monkeypatch.delenv(name, raising=False)
    for folder in ("examples", "bench"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


def a_result() -> dict:
    """A recorded suite of one group."""
    cases = [CaseResult(name, "other", 0, samples_s=[1e-3], host_s=[1e-3]) for name in ("NumPy", "on the device")]
    environment = {"device": "NVIDIA Test 1 (Laptop)", "cuda": True, "commit": "0123456789abcdef", "dirty": False}
    environment |= {"date": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13", "cupy": "14.2"}}
    groups = [GroupResult("a product", {"experiment": "matmul", "size": 50}, cases).to_json()]
    return {"suite": "tax", "quick": False, "options": {}, "environment": environment, "groups": groups, "seconds": 1.0}


def page(root: Path, section) -> Path:
    """The page of a section, with its marks."""
    made = root / section.page
    made.parent.mkdir(exist_ok=True)
    made.write_text(f"before\n{section.begin}\nold figures\n{section.end}\nafter\n")
    return made


def test_a_case_is_a_line_of_json():
    text = to_text(a_result())
    assert json.loads(text) == a_result()
    lines = [line for line in text.splitlines() if '"samples_s"' in line]
    assert len(lines) == 2
    assert all(line.strip().startswith('{"name": ') for line in lines)


def test_pages_show_what_is_recorded(tmp_path, bench, capsys):
    """Not what is of a quick or a stopped run, and no file that is unreadable."""
    store, readme = bench("store"), bench("readme")
    shown = page(tmp_path, readme.FIGURES)
    before = shown.read_text()
    assert readme.main(check=False, root=tmp_path) == 0
    assert shown.read_text() == before  # nothing is recorded
    result = a_result()
    path = store.path_of(tmp_path, result["environment"]["device"], "tax")
    assert path.relative_to(tmp_path).as_posix() == "bench/results/nvidia-test-1-laptop/tax.json"
    store.write(path, result)
    for run in (store.QUICK, store.PARTIAL):
        store.write(store.path_of(tmp_path, "A quick GPU", "tax", run), result)
    path.with_name("step.json").write_text("{")
    assert readme.main(check=True, root=tmp_path) == 1
    assert readme.main(check=False, root=tmp_path) == 0
    assert readme.main(check=True, root=tmp_path) == 0
    assert "step.json is unreadable" in capsys.readouterr().err
    text = shown.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    for part in ("### NVIDIA Test 1", "0123456789ab", "(../bench/results/nvidia-test-1-laptop/tax.png)"):
        assert part in text
    assert "old figures" not in text
    assert "a-quick-gpu" not in text
    assert 1000 < path.with_suffix(".png").stat().st_size < 150_000


def test_every_section_has_its_marks(bench):
    for section in bench("readme").SECTIONS:
        text = (ROOT / section.page).read_text(encoding="utf-8")
        assert text.index(section.begin) < text.index(section.end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["parallel", "--quick", "--steps", "6"], "| DDP, sharded | (32, 5) | 50 | "),
        (["ngram_lm", *TINY.split(), "--only", "dense", "exact"], '| speedtransfer, idle="exact" | '),
    ],
)
def test_an_example_is_recorded_and_shown(bench, tmp_path, arguments, shown):
    store, readme = bench("store"), bench("readme")
    if arguments[0] == "ngram_lm":
        data = tmp_path / "text.txt"
        data.write_text("\n".join(f"a b c{number % 7} d e{number % 3}" for number in range(200)), encoding="utf-8")
        arguments = [*arguments, "--data", str(data)]
    assert bench("record_examples").main(arguments, tmp_path) == 0
    ((part, path),) = store.recorded(tmp_path)
    assert store.read(path)["complete"]
    (section,) = [section for section in readme.SECTIONS if section.parts == (part,)]
    text = page(tmp_path, section)
    assert readme.main(check=False, root=tmp_path) == 0
    assert shown in text.read_text()
    assert f"](../{path.with_suffix('.png').relative_to(tmp_path).as_posix()})" in text.read_text()


def test_what_an_example_refuses_is_not_recorded(bench, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(SystemExit) as stop:
        bench("record_examples").main(["ngram_lm", *TINY.split(), "--data", str(tmp_path / "none.txt")], root)
    assert stop.value.code == 2
    assert not root.exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git counts them")
def test_lines_are_counted(bench, capsys):
    count = bench("count")
    assert count.main() == 0
    rows = {line[:26].strip(): line[26:].split() for line in capsys.readouterr().out.splitlines()}
    assert int(rows["bench"][0]) == len(list((ROOT / "bench").rglob("*.py")))
    assert count.main("0123abc") == 2


@needs_make
def test_make_passes_arguments_on(bench):
    argv = ["make", "-n", "--no-print-directory", "gpu", "PY=python3", "ARGS=--only tests --quick"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("; ") == [
        "python3 bench/record.py gpu --only tests --quick",
        "status=$?",
        "python3 bench/readme.py && exit $status\n",
    ]


@needs_make
@pytest.mark.parametrize(("record", "readme", "error"), [(3, 0, 3), (0, 4, 4), (0, 0, 0)])
def test_make_writes_the_readme_also_after_a_failure(bench, tmp_path, record, readme, error):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $1"\n[ "$1" = bench/record.py ] && exit {record} || exit {readme}\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-s", "bench", f"PY={python}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ran bench/record.py", "ran bench/readme.py"]
    assert done.returncode == (2 if error else 0)
    assert (f"Error {error}" in done.stderr) == bool(error)


@needs_make
@pytest.mark.parametrize(
    ("cuda", "extras"),
    [(None, "dev"), ("11.8", "dev"), ("12.4", "dev,cuda13"), ("13.0", "dev,cuda13"), ("14.1", "dev,cuda13")],
)
def test_make_picks_the_cuda_extra_of_the_torch_that_it_installs(bench, tmp_path, cuda, extras):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + (f"echo '| Driver Version: 1 CUDA Version: {cuda} |'\n" if cuda else "exit 1\n"))
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    argv = ["make", "-n", "VENV=does-not-exist", "does-not-exist/.ready-dev"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert f'".[{extras}]"' in done.stdout
    # A build of torch that this driver can run: the package index has one for CUDA 13.
    assert ("pass TORCH_INDEX=" in done.stderr) == (cuda == "12.4")
    named = [*argv, "TORCH_INDEX=https://example.org/cu12"]
    done = subprocess.run(named, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "--extra-index-url https://example.org/cu12" in done.stdout
    assert f'".[{extras.replace("13", "12")}]"' in done.stdout
    assert "TORCH_INDEX" not in done.stderr
