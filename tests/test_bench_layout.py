"""bench/layout.py: every case runs, with small tables, and says what it has measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_case_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", "1e9")  # the bench sets it
    layout, out = importlib.import_module("layout"), tmp_path / "layout.json"
    few = layout.page_advice.FEW_ROWS
    assert layout.main(["--quick", "--dims", "8", "--folder", str(tmp_path), "--out", str(out)]) == 0
    assert few == layout.page_advice.FEW_ROWS
    result = json.loads(out.read_text())
    found = {(case["memory"], case["ids"], case["state"], case["operation"]) for case in result["cases"]}
    assert len(found) == len(result["cases"]) == 2 * (3 + 3 * 2 + 3 + 1)
    assert all(set(case["ms"]) == {"planes", "rows"} and min(case["ms"].values()) > 0 for case in result["cases"])
    assert result["digest"]
    assert capsys.readouterr().out.count("planes ") == len(found)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("argument", ["--dims", "--nothing"])
def test_wrong_arguments(monkeypatch, argument, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    with pytest.raises(SystemExit):
        importlib.import_module("layout").main([argument])
    assert "usage: bench/layout.py" in capsys.readouterr().err
