"""bench/ngram_example.py: the example is recorded when it has come to its end, and shown in the documentation."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = "--steps 6 --batch 2 --context 8 --vocabulary 40 --width 8 --layers 2 --attention-heads 2 --rows 50 --dim 4"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"a b c{number % 7} d e{number % 3}" for number in range(200)), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_is_recorded_and_shown(bench, text, tmp_path):
    example, store = bench("ngram_example"), bench("store")
    root = tmp_path / "root"
    arguments = [*TINY.split(), "--data", str(text), "--only", "dense", "exact"]
    assert example.main(arguments, root) == 0
    ((part, path),) = store.recorded(root)
    assert part == store.NGRAM_EXAMPLE
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["complete"]
    assert result["digest"] == store.digest(ROOT)
    assert [len(one["losses"]) for one in result["contenders"].values()] == [6, 6]
    assert 5000 < path.with_suffix(".png").stat().st_size < 150_000

    readme = bench("readme")
    (root / "docs").mkdir()
    section = readme.EXAMPLE
    page = root / section.page
    page.write_text(f"before\n\n{section.begin}\n\n{section.end}\n\nafter\n", encoding="utf-8")
    shown = readme.documents(root, [])[page]
    assert shown.startswith("before")
    assert shown.endswith("after\n")
    assert "text.txt, " in shown
    assert '| speedtransfer, idle="exact" | ' in shown
    assert '- speedtransfer, idle="exact" and nn.Embedding + AdamW: losses ' in shown
    assert f"](../{path.with_suffix('.png').relative_to(root).as_posix()})" in shown


def test_what_has_not_come_to_its_end_is_not_recorded(bench, text, tmp_path, monkeypatch):
    example = bench("ngram_example")
    assert example.main([*TINY.split(), "--data", str(tmp_path / "none.txt")], tmp_path / "root") == 2
    monkeypatch.setattr(example.run, "available_bytes", lambda: 1)
    arguments = [*TINY.split(), "--data", str(text), "--only", "dense"]
    assert example.main(arguments, tmp_path / "root") == 1
    assert not (tmp_path / "root").exists()


def test_the_page_has_the_marks(bench):
    section = bench("readme").EXAMPLE
    text = (ROOT / section.page).read_text(encoding="utf-8")
    assert text.index(section.begin) < text.index(section.end)
