"""bench/roof.py: bytes and times of steps that were computed by hand, beside what was counted and measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def roof(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("roof")


def printed(roof, capsys, results, *arguments):
    """The cells of the lines that are printed."""
    assert roof.main(list(arguments), results) == 0
    return [[cell for cell in line.split("  ") if cell] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("optimizer", "idle", "layout", "row_bytes"),
    [
        ("SGD", "lazy", "planes", 512),
        ("SGD with momentum", "lazy", "rows", 1024),
        ("AdamW", "lazy", "planes", 1536),
        ("AdamW", "exact", "planes", 1536 + 32),
        ("AdamW", "exact", "rows", 1536 + 4),
    ],
)
def test_bytes_of_a_row(roof, optimizer, idle, layout, row_bytes):
    step = roof.Step(1_000_000, 128, 131_072, 1000, optimizer, idle, layout, 3)
    assert step.num_bytes == 3000 * row_bytes


def test_times(roof):
    """Ten tables of 43,372 distinct rows, with AdamW's state: 666 MB each way."""
    step = roof.Step(1_500_000, 128, 104_857, 43_372, "AdamW", "lazy", "planes", 10)
    assert step.num_bytes == pytest.approx(666.2e6, rel=1e-4)
    in_turn, at_once = roof.LINKS["PCIe 5 x16"].ms(step.num_bytes)
    assert in_turn == pytest.approx(666.2 / 51.5 + 666.2 / 52.5, rel=1e-3)
    assert at_once == pytest.approx(2 * 666.2 / 77, rel=1e-3), "both directions share the link"
    in_turn, at_once = roof.LINKS["HBM3e"].ms(step.num_bytes)
    assert in_turn == at_once, "memory has no directions"


def test_expected_rows(roof):
    assert roof.distinct_rows(10**9, 1000) == 1000
    assert roof.distinct_rows(1000, 1000) == 632
    assert roof.distinct_rows(10, 1e6) == 10


def test_a_step_of_given_tables(roof, capsys, tmp_path):
    options = [
        "--rows",
        "1000",
        "--dim",
        "64",
        "--lookups",
        "500",
        "--distinct",
        "900",
        "--tables",
        "2",
        "--idle",
        "lazy",
    ]
    _, cells = printed(roof, capsys, tmp_path, *options)
    assert cells[0].strip() == "2 x 1,000 x 64, 500 lookups, AdamW, lazy, planes"
    assert [cell.strip() for cell in cells[1:3]] == ["0.8", "-"], "no more rows than lookups; nothing was counted"
    with pytest.raises(SystemExit):
        roof.main(["--rows", "0"])


def test_the_steps_of_the_experiments_beside_what_was_measured(roof, capsys, tmp_path, monkeypatch):
    """Sizes and names are those of bench/experiments/gpu.py."""
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", "1e12")  # tables of the full size
    scale, steps = importlib.import_module("experiments.gpu_rows"), importlib.import_module("experiments.gpu_steps")
    cases = {"step": [], "fbgemm": []}
    for name, found in cases.items():
        for number, (facts, _) in enumerate(getattr(steps, name)(scale.Scale()), start=1):
            found.append({**facts, "ms": number + 0.5, "fused_ms": number + 0.25})
    environment = {"device": "NVIDIA Test", "cuda": True, "date": "2026-01-02"}
    folder = tmp_path / "results" / "nvidia-test"
    folder.mkdir(parents=True)
    (folder / "experiments.json").write_text(json.dumps({"environment": environment, "experiments": cases}))
    forms = {"lazy": {"launches": {"a": 20, "b": 2}}, "exact, 26 tables": {"launches": {"a": 260}}}
    (tmp_path / "launches.json").write_text(json.dumps({"forms": forms}))
    _, *lines = printed(roof, capsys, tmp_path / "results")
    assert len(lines) == 5 + 5 + 3
    assert [line[-3].strip() for line in lines] == ["NVIDIA Test"] * len(lines)
    assert [line[-2].strip() for line in lines[:5]] == ["1.50", "2.50", "3.50", "4.50", "5.50"]
    assert lines[-1][-1].strip() == "5.25", "one table of all ten is another step"
    by_name = {line[0].strip(): line[2].strip() for line in lines}
    assert by_name["1,000,000 x 128, 131,072 lookups, AdamW, lazy, planes"] == "22"
    assert by_name["10 x 1,000,000 x 128, 104,857 lookups, AdamW, exact, planes"] == "100"
