"""bench/parallel_example.py and the figures of suite `exchange`: recorded, and shown in the documentation."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def test_a_run_is_recorded_and_shown(bench, tmp_path):
    example, store, readme = bench("parallel_example"), bench("store"), bench("readme")
    root = tmp_path / "root"
    assert example.main(["--quick", "--steps", "6"], root) == 0
    ((part, path),) = store.recorded(root)
    assert part == store.PARALLEL_EXAMPLE
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["complete"]
    assert result["digest"] == store.digest(ROOT)
    assert 5000 < path.with_suffix(".png").stat().st_size < 150_000
    (root / "docs").mkdir()
    page = root / readme.PARALLEL.page
    page.write_text(f"before\n\n{readme.PARALLEL.begin}\n\n{readme.PARALLEL.end}\n\nafter\n", encoding="utf-8")
    (root / "README.md").write_text(f"{readme.BEGIN}\n\n{readme.END}\n", encoding="utf-8")
    shown = readme.documents(root, [])[page]
    assert "| DDP, sharded | (32, 5) | 50 | " in shown
    assert "6 steps of 64 examples, 2 processes of DistributedDataParallel, table of 100 x 8; first loss " in shown
    assert f"](../{path.with_suffix('.png').relative_to(root).as_posix()})" in shown


def test_losses_that_differ_are_not_recorded(bench, tmp_path):
    example = bench("parallel_example")
    assert example.main(["--quick", "--batch", "63"], tmp_path / "root") == 2
    assert not (tmp_path / "root").exists()


def test_suite_exchange_is_shown(bench, tmp_path):
    results = bench("speedtransfer.benchmark.results")
    figures = {"sent_bytes": 1e6, "steps": 8.0, "loss": 0.5}
    cases = [
        results.CaseResult(name, "other", 0, [seconds], figures=figures)
        for name, seconds in (("all-reduce", 1.0), ("st.one_bit_hook", 2.0))
    ]
    cases.append(results.CaseResult("1 bit, errors dropped", "other", 0, error="did not come to a loss of 0.1"))
    group = results.GroupResult("train", {"kind": "gradients", "ranks": 2}, cases)
    environment = {
        "device": "CPU",
        "commit": "0" * 40,
        "dirty": False,
        "date": "2026-01-02",
        "versions": {"torch": "2"},
    }
    result = {"suite": "exchange", "quick": False, "environment": environment, "groups": [group.to_json()]}
    text = bench("suite_pages").markdown(result, "picture.png")
    assert "| all-reduce | 8 MB |" in text
    assert "- train, 1 bit, errors dropped: did not come to a loss of 0.1" in text
    assert "](picture.png)" in text
    assert (
        bench("experiment").save_picture(bench("speedtransfer.benchmark.report").plot, result, tmp_path / "p.png") == ""
    )
    assert (tmp_path / "p.png").stat().st_size > 2000


def test_the_pages_have_the_marks(bench):
    readme = bench("readme")
    for section in (readme.PARALLEL, readme.EXCHANGE):
        text = (ROOT / section.page).read_text(encoding="utf-8")
        assert text.index(section.begin) < text.index(section.end)
