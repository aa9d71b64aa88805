"""Tables, sentences and pictures, from recorded JSON alone."""

from __future__ import annotations

import json
import struct

import pytest

from speedtransfer.benchmark.report import group_table, headlines, markdown, missing, plot, series_tables
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.suites import SUITES as BENCH
from speedtransfer.units import format_count, format_ratio, format_seconds, format_share


def case(name, role="other", seconds=1e-3, payload=0, **fields):
    return CaseResult(name, role, payload, [seconds] * 3, [seconds / 2] * 3, **fields)


def methods(direction, row_bytes, kind="ways", **fields):
    params = {
        "kind": kind, "direction": direction, "memory": "pinned", "rows": 1000, "row_bytes": row_bytes, "ids": "uniform",
        "headline": kind == "overhead", **fields,
    }  # fmt: skip
    payload = 1000 * row_bytes
    put = direction == "scatter"
    cases = [
        case("speedtransfer", "ours", payload / 50e9, payload),
        case("speedtransfer, check=False", "ours", payload / 52e9, payload),
        case("t[idx] = rows.cpu()" if put else "t[idx].to(device)", "other", payload / 1e9, payload),
        case("one cudaMemcpy", "roof", payload / 54e9, payload),
    ]
    return GroupResult(f"{direction} 1,000 rows of {row_bytes} B", params, cases)


def transfer():
    groups = [methods(d, size) for d in ("gather", "scatter") for size in (512, 64, 4096)]
    over = methods("gather", 512, "overhead")
    over.title = "overhead: gather 1,000 rows"
    lost = GroupResult("gather from mmap", {"kind": "ways", "direction": "gather"}, [], "no room on disk")
    return [*groups, over, lost]


def step():
    groups = [
        GroupResult(
            f"AdamW step of {rows:,} rows",
            {"experiment": "size", "rows": rows, "dim": 128},
            [
                case("speedtransfer, pinned", "ours", 3e-3),
                *([case("nn.Embedding + AdamW", seconds=1e-9 * rows)] if rows < 5e7 else []),
            ],
        )
        for rows in (10**6, 10**7, 10**8)
    ]
    groups[-1].cases.append(CaseResult("nn.Embedding + AdamW", "other", 0, error="out of memory"))
    exact = [case("speedtransfer, pinned, idle=exact", "ours", 4.5e-3), case("speedtransfer, pinned", "ours", 3e-3)]
    exact.append(case("nn.Embedding + AdamW", seconds=9e-3))
    params = {"experiment": "idle rows", "optimizer": "AdamW", "rows": 10**6, "dim": 128, "history": 300}
    groups.append(GroupResult("AdamW step with new ids", params, exact))
    return groups


def precision():
    def one(name, seconds, scale, loss):
        figures = {"moved_bytes": 4e6 * scale, "table_bytes": 1e9 * scale, "loss": loss}
        found = case(name, "ours", seconds, memory={"host_bytes": int(1e9 * scale)})
        found.figures = figures
        return found

    return [
        GroupResult(
            f"AdamW step, {batch} examples",
            {"batch": batch, "rows": 1000, "dim": 128, "steps": 100},
            [one("FP32", 1e-6 * batch, 1, 0.5), one("int8", 2e-6 * batch, 0.25, 0.51)],
        )
        for batch in (512, 2048)
    ]


def memory():
    cases = [
        case("speedtransfer, pinned", "ours", memory={"host_bytes": 5_100_000_000, "device_bytes": 10_000_000}),
        case("nn.Embedding + AdamW", memory={"host_bytes": 0, "device_bytes": 7_000_000_000}),
    ]
    params = {"rows": 3_300_000, "dim": 128, "optimizer": "AdamW", "planes_bytes": 5_000_000_000}
    return [GroupResult("memory of 3,300,000 x 128", params, cases)]


SUITES = {
    "transfer": transfer,
    "step": step,
    "precision": precision,
    "memory": memory,
}


def recorded(suite):
    """A result as it lies in a file."""
    environment = {
        "device": "NVIDIA <H200>", "cuda": True, "driver": "13.0", "cpu": "CPU", "host_bytes": 10**11,
        "versions": {"torch": "2.13.0", "cupy": None}, "commit": "0123456789abcdef", "dirty": True,
        "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    groups = [group.to_json() for group in SUITES[suite]()]
    result = {"suite": suite, "quick": False, "environment": environment, "groups": groups, "seconds": 1.0}
    return json.loads(json.dumps(result))


def test_a_group_as_a_table():
    table = group_table(methods("gather", 512))
    assert table.header == ["", "GB/s", "of roof", "x speedtransfer", "median", "quartiles"]
    by_name = {row[0]: row[1:] for row in table.rows}
    assert by_name["speedtransfer"] == ["50.0", "93%", "1.00x", "10.2 us", "10.2 us to 10.2 us"]
    assert by_name["one cudaMemcpy"][1:3] == ["roof", "0.93x"]
    assert [row[0] for row in table.rows][:2] == ["one cudaMemcpy", "speedtransfer, check=False"], "fastest first"
    assert table.ours == {"speedtransfer", "speedtransfer, check=False"}


def test_columns_follow_what_a_group_is_about():
    assert group_table(memory()[0]).header == ["", "host memory", "device memory"]
    table = group_table(precision()[0])
    assert table.header == ["", "x FP32", "median", "quartiles", "moved bytes", "table bytes", "loss", "host memory"]
    assert table.rows[1][0::6] == ["int8", "0.51"]
    assert group_table(transfer()[-2]).header[-1] == "host"
    alone = [CaseResult("lanes 4", "ours", 0, figures={"alone": 16.4, "words": 123456}), CaseResult("none", "ours", 0)]
    table = group_table(GroupResult("rates", {}, alone))
    assert (table.header, table.rows) == (["", "alone", "words"], [["lanes 4", "16.4", "123,456"]]), "without times"


def test_series_put_groups_side_by_side():
    gather, scatter = series_tables(BENCH["transfer"], transfer()[:-1])
    assert gather.header == ["", "64", "512", "4,096"]
    assert gather.rows[0] == ["speedtransfer", "50.0 (93%)", "50.0 (93%)", "50.0 (93%)"]
    assert ["t[idx] = rows.cpu()", *["1.00 (1.9%)"] * 3] in scatter.rows
    groups = step()
    groups[0].cases.append(case("in one group of three"))
    (steps,) = series_tables(BENCH["step"], groups)
    assert len(steps.rows) == 2
    assert steps.rows[1] == ["nn.Embedding + AdamW", "1.00 ms", "10.0 ms", ""]
    assert [table.title for table in series_tables(BENCH["precision"], precision())] == [
        f"{what}, by examples of a batch" for what in ("a step", "moved a step", "memory", "loss reached")
    ]


def test_of_two_groups_of_a_series_with_one_value_the_first_is_in_it():
    more = methods("gather", 512)
    more.title, more.params["headline"] = "another", True
    assert [line.partition(":")[0] for line in headlines(BENCH["transfer"], [methods("gather", 512), more])] == [
        "another"
    ]


def lines(suite):
    return headlines(BENCH[suite], SUITES[suite]())


def test_groups_that_stand_alone_have_a_sentence():
    (overhead,) = lines("transfer")
    assert overhead.startswith("overhead: gather 1,000 rows: speedtransfer 10.2 us (50.0 GB/s, 93% of the roof); ")
    assert "; t[idx].to(device) 50.0x (1.00 GB/s, 1.9% of the roof)" in overhead
    assert lines("step") == [
        "AdamW step with new ids: speedtransfer, pinned, idle=exact 4.50 ms; speedtransfer, pinned 0.67x; "
        "nn.Embedding + AdamW 2.00x"
    ]
    (said,) = lines("memory")
    assert said.endswith("pinned 5.1 GB of the host, 10 MB of the device; nn.Embedding + AdamW 7 GB of the device")


def test_noise_is_named():
    group = step()[-1]
    group.cases[1].samples_s = [1e-3, 2e-3, 3e-3]
    (line,) = headlines(BENCH["step"], [group])
    assert "; speedtransfer, pinned 0.44x (noisy); " in line


def test_what_did_not_run_is_named():
    assert missing(recorded("transfer")) == ["gather from mmap: no room on disk"]
    assert missing(recorded("step")) == ["AdamW step of 100,000,000 rows, nn.Embedding + AdamW: out of memory"]


@pytest.mark.parametrize("suite", SUITES)
def test_markdown_and_pictures(suite):
    """Also of one point, for which matplotlib once found no room at a power of ten, and of nothing."""
    result = recorded(suite)
    text = markdown(result)
    assert len(markdown(result, short=True)) < len(text)
    assert "commit 0123456789ab with changes, 2026-01-02" in text
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
