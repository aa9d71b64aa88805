"""The command that computes what tables cost several processes."""

from __future__ import annotations

import sys

import pytest

from speedtransfer.cli import main

SIZES = ["--rows", "1e6", "--dim", "64", "--ranks", "4", "--lookups", "65536"]


@pytest.fixture
def run(monkeypatch, capfd):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speedtransfer", "plan", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return run


def lines(text: str) -> dict[str, list[str]]:
    """The cells of a table, by the first."""
    rows = [line for line in text.splitlines() if "  " in line]
    return {cells[0]: cells[1:] for cells in ([c for c in row.split("  ") if c.strip()] for row in rows)}


def test_bytes_and_times(run):
    given = ["--unique", "1000", "--distinct-share", "0.5", "--call-us", "10", "--network-gbps", "1", "--bus-gbps", "1"]
    code, out, _ = run(*SIZES, *given)
    assert code == 0
    assert "each looks up 1,000 distinct rows a step, 0.50 of these are distinct over all" in out
    assert "10 us a call, 1 GB/s of network, 1 GB/s of host bus" in out
    found = {name: [cell.strip() for cell in cells] for name, cells in lines(out).items()}
    # 750 rows of others: 8 bytes of id, 256 of row, 256 of gradient; 500 rows owned, with two planes of state.
    assert found["sharded"] == ["192 MB", "384 bytes", "6 kB", "192 kB", "192 kB", "5", "384 kB", "384 kB", "1.21 ms"]
    assert found['memory="shared"'] == ["192 MB", "768 bytes", "6 kB", "192 kB", "6", "640 kB", "384 kB", "1.28 ms"]
    assert found["nn.Embedding, DDP"] == ["1.02 GB", "384 MB", "1", "384 ms"]


def test_small_dtypes_are_small(run):
    small = ["--storage-dtype", "int8", "--comm-dtype", "bfloat16", "--state-dtype", "uint8", "--idle", "exact"]
    code, out, _ = run(*SIZES, *small)
    assert code == 0
    # 64 + 4 of weights, twice that of state, and the last step.
    assert lines(out)["sharded"][0].strip() == "52 MB"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--comm-dtype", "in8"], "--comm-dtype is 'in8'; did you mean 'int8'?"),
        (["--unique", "70000"], "--unique is 70000.0 but must be"),
        (["--distinct-share", "0.1"], "--distinct-share is 0.1 but must be from 1 / --ranks to 1"),
        (["--network-gbps", "0"], "network_bytes_per_s is 0"),
        (["--rows", "inf"], "--rows is inf"),
        (["--zipf", "-1"], "exponent is -1"),
        (["--ranks", "0"], "--ranks is 0 but must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(run, arguments, words):
    code, _, err = run(*SIZES, *arguments)
    assert code == 2
    assert words in err
