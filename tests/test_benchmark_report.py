"""Tables, sentences and pictures, from recorded JSON alone."""

from __future__ import annotations

import functools
import json
import struct

import pytest

from speedtransfer.benchmark.report import group_table, groups_of, headlines, markdown, missing, plot, summary_tables
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.units import format_count, format_ratio, format_seconds, format_share

# By parts of names.
KINDS = {
    "check=False": "unchecked",
    "engine": "engine",
    "CuPy": "view",
    "t[idx]": "plain",
    "empty": "empty",
    "=exact": "exact",
}


def case(name, role="other", seconds=1e-3, payload=0, **fields):
    kind = next((kind for part, kind in KINDS.items() if part in name), "checked" if name == "speedtransfer" else "")
    return CaseResult(name, role, payload, [seconds] * 3, [seconds / 2] * 3, kind=kind, **fields)


def methods(direction, row_bytes, kind="ways", **fields):
    params = {
        "kind": kind, "direction": direction, "memory": "pinned", "rows": 1000, "row_bytes": row_bytes, "ids": "uniform",
        "headline": row_bytes == 512, **fields,
    }  # fmt: skip
    payload = 1000 * row_bytes
    put = direction == "scatter"
    cases = [
        case("speedtransfer", "ours", payload / 50e9, payload),
        case("speedtransfer, check=False", "ours", payload / 52e9, payload),
        case("engine: mapped", "ours", payload / 51e9, payload),
        case(
            "copy to pinned + index_copy_" if put else "index_select(out=pinned) + copy",
            "other",
            payload / 20e9,
            payload,
        ),
        case("t[idx] = rows.cpu()" if put else "t[idx].to(device)", "other", payload / 1e9, payload),
        case("CuPy rows", "other", payload / 25e9, payload),
        case("one cudaMemcpy", "roof", payload / 54e9, payload),
    ]
    return GroupResult(f"{direction} 1,000 rows of {row_bytes} B", params, cases)


def transfer():
    groups = [methods(d, size) for d in ("gather", "scatter") for size in (512, 64, 4096)]
    over = methods("gather", 512, "overhead")
    over.title = "overhead: gather 1,000 rows"
    over.cases[2].device_s = 4e-6
    over.cases.append(case("empty launch", seconds=3e-6, device_s=2e-6))
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


def prefetch():
    methods = {"without prefetch": 50e-3, "prefetch, depth 1": 30e-3, "prefetch, depth 2": 20e-3}
    cases = [case(name, "ours", seconds, 1 << 20) for name, seconds in methods.items()]
    cases += [
        case("table in memory", seconds=10e-3),
        case("reads of the same pages on 8 threads", "roof", 8e-3, 1 << 20),
    ]
    return [
        GroupResult(title, {"experiment": title, "rows": 1000, "lookups": 100}, list(cases))
        for title in ("training", "evaluation")
    ]


def cache():
    cases = [case("without a cache", "ours", 50e-3)]
    for share, seconds in (("1%", 40e-3), ("10%", 30e-3)):
        figures = {"hit_share": 0.5, "computed_share": 0.6}
        cases.append(case(f"cache of {share} of the rows, by use", "ours", seconds, figures=figures))
    return [GroupResult("step", {"rows": 1000, "dim": 64, "lookups": 100}, cases)]


SUITES = {
    "transfer": transfer,
    "step": step,
    "precision": precision,
    "memory": memory,
    "prefetch": prefetch,
    "cache": cache,
}


def recorded(suite, quick=False):
    """A result as it lies in a file."""
    environment = {
        "device": "NVIDIA <H200>", "cuda": True, "driver": "13.0", "cpu": "CPU", "host_bytes": 10**11,
        "versions": {"torch": "2.13.0", "cupy": None}, "commit": "0123456789abcdef", "dirty": True,
        "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    groups = [group.to_json() for group in SUITES[suite]()]
    result = {"suite": suite, "quick": quick, "environment": environment, "groups": groups, "seconds": 1.0}
    return json.loads(json.dumps(result))


def test_a_group_as_a_table():
    table = group_table(methods("gather", 512))
    assert table.header == ["", "GB/s", "of roof", "time / ours", "median", "quartiles"]
    by_name = {row[0]: row[1:] for row in table.rows}
    assert by_name["speedtransfer"] == ["50.0", "93%", "1.00x", "10.2 us", "10.2 us to 10.2 us"]
    assert by_name["one cudaMemcpy"][1:3] == ["roof", "0.93x"]
    assert [row[0] for row in table.rows][:2] == ["one cudaMemcpy", "speedtransfer, check=False"], "fastest first"
    assert table.ours == {"speedtransfer", "speedtransfer, check=False", "engine: mapped"}


def test_columns_follow_what_a_group_is_about():
    assert group_table(memory()[0]).header == ["", "host memory", "device memory"]
    table = group_table(precision()[0])
    assert table.header == ["", "time / FP32", "median", "quartiles", "moved", "loss", "host memory"]
    assert table.rows[1][0::5] == ["int8", "0.5100"]
    assert group_table(transfer()[-2]).header[-2:] == ["host", "device"]


def test_summaries_put_groups_side_by_side():
    gather, scatter = summary_tables(recorded("transfer"))
    assert gather.header == ["", "64 B", "512 B", "4,096 B"]
    assert gather.rows[0] == ["speedtransfer", "50.0 (93%)", "50.0 (93%)", "50.0 (93%)"]
    assert ["t[idx] = rows.cpu()", *["1.00 (1.9%)"] * 3] in scatter.rows
    steps, idle = summary_tables(recorded("step"))
    assert [row[0] for row in idle.rows][:2] == ["speedtransfer, pinned", "speedtransfer, pinned, idle=exact"]
    assert steps.rows[1] == ["nn.Embedding + AdamW", "1.00 ms", "10.0 ms", ""]


def lines(suite):
    return headlines(suite, groups_of(recorded(suite)))


def test_sentences_name_shares_and_ratios():
    gather, _, overhead = lines("transfer")
    assert "50.0 GB/s, 93% of one cudaMemcpy, 96% with check=False and 94% by engine: mapped" in gather
    assert "2.50x the speed of index_select(out=pinned) + copy, 50.0x of t[idx].to(device), 2.00x of CuPy" in gather
    assert overhead.endswith("on the device engine: mapped 4.00 us, an empty launch 2.00 us")
    assert "noisy" not in gather
    exact, *_ = lines("step")
    assert exact == (
        "AdamW step with new ids: 4.50 ms with idle=exact, 1.50x the 3.00 ms with lazy, 0.50x of nn.Embedding + AdamW"
    )
    assert "speedtransfer, pinned: 3.00 ms a step, 1.00x from 1M to 100M rows" in lines("step")
    assert "5.1 GB, 1.02x the 5 GB of its planes" in lines("memory")[0]
    assert lines("precision") == [
        "int8 to FP32, 2,048 examples a step: 2.00x the time, 0.25x the memory of the table, 0.25x the bytes moved, loss "
        "0.5100 against 0.5000"
    ]


@pytest.mark.parametrize("name", ["speedtransfer", "one cudaMemcpy", "t[idx].to(device)"])
def test_noise_is_named(name):
    group = methods("gather", 512)
    (noisy,) = (case for case in group.cases if case.name == name)
    noisy.samples_s = [1e-3, 2e-3, 3e-3]
    assert headlines("transfer", [group])[0].endswith(" (noisy)")


def test_what_did_not_run_is_named():
    assert missing(recorded("transfer")) == ["gather from mmap: no room on disk"]
    assert missing(recorded("step")) == ["AdamW step of 100,000,000 rows, nn.Embedding + AdamW: out of memory"]


@pytest.mark.parametrize("suite", SUITES)
def test_markdown(suite):
    text = markdown(recorded(suite))
    assert "commit 0123456789ab with changes, 2026-01-02" in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


@functools.cache
def picture_of(suite):
    return plot(recorded(suite, quick=True))


@pytest.mark.parametrize("suite", SUITES)
def test_pictures(suite):
    picture = picture_of(suite)
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert min(width, height) > 200


@pytest.mark.sweep
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("seconds", [1e-7, 1e-6, 1e-3, 1.0])
def test_a_picture_of_one_point(suite, seconds):
    """Whatever its value: on a power of ten matplotlib once found no room around it, and warned."""
    result = recorded(suite)
    del result["groups"][1:]
    for one in result["groups"][0]["cases"][:]:
        one["samples_s"] = [seconds] * 5
    del result["groups"][0]["cases"][1:]
    picture = plot(result)
    assert picture is None or picture.startswith(b"\x89PNG")  # some suites show nothing of one case


@pytest.mark.parametrize("suite", SUITES)
def test_no_picture_of_nothing(suite):
    result = recorded(suite)
    for group in result["groups"]:
        group["cases"] = []
    assert plot(result) is None
    assert markdown(result)


def test_units():
    assert [format_seconds(s) for s in (2.5, 0.0999, 1e-3, 9.996e-6, 5e-9, None)] == [
        "2.50 s", "99.9 ms", "1.00 ms", "10.0 us", "5.00 ns", "",
    ]  # fmt: skip
    assert [format_share(share) for share in (1.234, 0.1, 0.034, None)] == ["123%", "10%", "3.4%", ""]
    assert [format_ratio(ratio) for ratio in (0.5, 41.04, 410.4)] == ["0.50x", "41.0x", "410x"]
    assert [format_count(count) for count in (999, 20_000, 1_500_000, 2e9)] == ["999", "20k", "1.5M", "2G"]
