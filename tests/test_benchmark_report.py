"""Tables, sentences and pictures, from JSON alone: of a few cases by hand, and of what this repository has recorded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from speedtransfer.benchmark.report import (
    group_table,
    groups_of,
    headlines,
    markdown,
    missing,
    plot,
    provenance,
    series_tables,
)
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.suites import SUITES
from speedtransfer.units import format_count, format_ratio, format_seconds, format_share

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


def case(name, role="other", seconds=1e-3, payload=0, **fields):
    return CaseResult(name, role, payload, [seconds] * 3, [seconds / 2] * 3, **fields)


def moved(row_bytes, kind="ways"):
    """A group of suite `transfer`."""
    payload = 1000 * row_bytes
    cases = [
        case("speedtransfer", "ours", payload / 50e9, payload),
        case("speedtransfer, check=False", "ours", payload / 52e9, payload),
        case("t[idx].to(device)", "other", payload / 1e9, payload),
        case("one cudaMemcpy", "roof", payload / 54e9, payload),
    ]
    params = {"kind": kind, "direction": "gather", "row_bytes": row_bytes, "headline": kind == "overhead"}
    return GroupResult(f"{kind}: 1,000 rows of {row_bytes} B", params, cases)


def steps(rows, experiment="size"):
    """A group of suite `step`."""
    cases = [case("speedtransfer, pinned", "ours", 3e-3), case("nn.Embedding + AdamW", seconds=9e-3)]
    return GroupResult(f"AdamW step of {rows:,} rows", {"experiment": experiment, "rows": rows}, cases)


def test_a_group_as_a_table():
    table = group_table(moved(512))
    assert table.header == ["", "GB/s", "of roof", "x speedtransfer", "median", "quartiles"]
    by_name = {row[0]: row[1:] for row in table.rows}
    assert by_name["speedtransfer"] == ["50.0", "93%", "1.00x", "10.2 us", "10.2 us to 10.2 us"]
    assert by_name["one cudaMemcpy"][1:3] == ["roof", "0.93x"]
    assert [row[0] for row in table.rows][:2] == ["one cudaMemcpy", "speedtransfer, check=False"], "fastest first"
    assert table.ours == {"speedtransfer", "speedtransfer, check=False"}
    assert group_table(moved(512, "overhead")).header[-1] == "host"


def test_columns_follow_what_a_group_is_about():
    held = [case("ours", memory={"host_bytes": 5_100_000_000, "device_bytes": 10_000_000})]
    assert group_table(GroupResult("memory", {}, held)).header == ["", "host memory", "device memory"]
    (line,) = headlines(SUITES["memory"], [GroupResult("memory", {}, held)])
    assert line == "memory: ours 5.1 GB of the host, 10 MB of the device"
    trained = [case("FP32", figures={"moved_bytes": 4e6, "loss": 0.51}, memory={"host_bytes": 10**9})]
    table = group_table(GroupResult("a step", {}, trained))
    assert table.header == ["", "x FP32", "median", "quartiles", "moved bytes", "loss", "host memory"]
    alone = [CaseResult("lanes 4", "ours", 0, figures={"alone": 16.4, "words": 123456}), CaseResult("none", "ours", 0)]
    table = group_table(GroupResult("rates", {}, alone))
    assert (table.header, table.rows) == (["", "alone", "words"], [["lanes 4", "16.4", "123,456"]]), "without times"


def test_series_put_groups_side_by_side():
    (gather,) = series_tables(SUITES["transfer"], [moved(size) for size in (512, 64, 4096)])
    assert gather.header == ["", "64", "512", "4,096"]
    assert gather.rows[0] == ["speedtransfer", "50.0 (93%)", "50.0 (93%)", "50.0 (93%)"]
    groups = [steps(rows) for rows in (10**6, 10**7, 10**8)]
    groups[0].cases.append(case("in one group of three"))
    groups[2].cases[1] = CaseResult("nn.Embedding + AdamW", "other", 0, error="out of memory")
    (table,) = series_tables(SUITES["step"], groups)
    assert [row for row in table.rows if row[0] == "nn.Embedding + AdamW"] == [
        ["nn.Embedding + AdamW", "9.00 ms", "9.00 ms", ""]
    ]
    assert len(table.rows) == 2
    skipped = GroupResult("gather from mmap", {}, [], "no room on disk")
    result = {"groups": [group.to_json() for group in [*groups, skipped]]}
    assert missing(result) == [
        "gather from mmap: no room on disk",
        "AdamW step of 100,000,000 rows, nn.Embedding + AdamW: out of memory",
    ]


def test_groups_that_stand_alone_have_a_sentence():
    again = moved(512)  # of two groups of a series with one value the first is in it
    again.title, again.params["headline"] = "another", True
    overhead, other = headlines(SUITES["transfer"], [moved(512), moved(512, "overhead"), again])
    assert overhead.startswith("overhead: 1,000 rows of 512 B: speedtransfer 10.2 us (50.0 GB/s, 93% of the roof); ")
    assert "; t[idx].to(device) 50.0x (1.00 GB/s, 1.9% of the roof)" in overhead
    assert other.startswith("another: ")
    group = steps(1000, "idle rows")
    group.cases[1].samples_s = [1e-3, 2e-3, 3e-3]
    assert headlines(SUITES["step"], [group]) == [
        "AdamW step of 1,000 rows: speedtransfer, pinned 3.00 ms; nn.Embedding + AdamW 0.67x (noisy)"
    ]


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_recorded(suite):
    """Pictures also of one point, for which matplotlib once found no room at a power of ten, and of nothing."""
    path = next(RESULTS.glob(f"*/{suite}.json"))
    result = json.loads(path.read_text())
    assert GroupResult.from_json(groups_of(result)[0].to_json()) == groups_of(result)[0]
    text = markdown(result)
    short = markdown(result, short=True)
    assert len(short) < len(text)
    assert short.count("\n| --- |") <= 1
    assert provenance(result) in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block
    picture = plot(result)
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", picture[16:24])) > 200
    del result["groups"][1:], result["groups"][0]["cases"][1:]
    result["groups"][0]["cases"][0]["samples_s"] = [1e-6] * 5
    assert plot(result).startswith(b"\x89PNG")
    result["groups"][0]["cases"] = []
    assert plot(result) is None
    assert markdown(result)


def test_units():
    assert [format_seconds(s) for s in (2.5, 0.0999, 1e-3, 9.996e-6, 5e-9, None)] == [
        "2.50 s", "99.9 ms", "1.00 ms", "10.0 us", "5.00 ns", "",
    ]  # fmt: skip
    assert [format_share(share) for share in (1.234, 0.1, 0.034, None)] == ["123%", "10%", "3.4%", ""]
    assert [format_ratio(ratio) for ratio in (0.5, 41.04, 410.4)] == ["0.50x", "41.0x", "410x"]
    assert [format_count(count) for count in (999, 20_000, 1_500_000, 2e9)] == ["999", "20k", "1.5M", "2G"]
