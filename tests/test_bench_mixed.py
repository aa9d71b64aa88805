"""bench/suite_pages.py: what suite `mixed` has found gets into the page on mixed precision."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from speedtransfer.benchmark.results import CaseResult, GroupResult

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def recorded():
    params = {"context": 4, "classes": 2000, "dim": 64, "hidden": 256, "layers": 2, "windows": 61_440, "epochs": 2}
    cases = [
        CaseResult(name, "ours", 0, [seconds] * 3, memory={"host_bytes": 10**8}, figures={"accuracy": 0.4, "loss": 3.7})
        for name, seconds in (("FP32", 2e-3), ("AMP, bfloat16", 1e-3))
    ]
    group = GroupResult("words", {"batch": 128, "held_out": 20_000, "hardware": {}, **params}, cases)
    environment = {
        "device": "CPU X, 2 threads",
        "cuda": False,
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.13", "cupy": None},
    }
    return {
        "suite": "mixed",
        "quick": False,
        "options": {},
        "environment": environment,
        "groups": [group.to_json()],
        "failures": {},
        "complete": True,
    }


def test_a_recorded_result_is_shown_with_its_picture(bench, tmp_path):
    store, readme = bench("store"), bench("readme")
    path = store.path_of(tmp_path, "CPU X, 2 threads", "mixed")
    store.write(path, recorded())
    page = tmp_path / readme.MIXED.page
    page.parent.mkdir()
    page.write_text(f"before\n\n{readme.MIXED.begin}\n\n{readme.MIXED.end}\n\nafter\n")
    assert readme.main(check=False, root=tmp_path) == 0
    assert path.with_suffix(".png").stat().st_size > 5000
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "hidden layers of 256 and 256 units, 2,000 words to choose from; 2 epochs of 61,440 windows" in text
    assert "](../bench/results/cpu-x-2-threads/mixed.png)" in text
    assert "- AMP, bfloat16: 0.50x the time of a step in FP32 at batch 128" in text
    assert "| **AMP, bfloat16** | 40.0% |" in text
    assert readme.main(check=True, root=tmp_path) == 0
    path.with_suffix(".png").unlink()
    assert "![" not in bench("suite_pages").markdown(recorded(), "")


def test_the_page_has_the_marks(bench):
    section = bench("readme").MIXED
    assert section in bench("readme").SECTIONS
    text = (ROOT / section.page).read_text(encoding="utf-8")
    assert text.index(section.begin) < text.index(section.end)
