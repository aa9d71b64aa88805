"""Tables, sentences, pictures and the HTML page, from recorded JSON alone."""

from __future__ import annotations

import functools
import json
import struct
from html.parser import HTMLParser

import pytest

from speedtransfer.benchmark import html, report
from speedtransfer.benchmark.report import group_table, groups_of, headlines, markdown, missing, plot, summary_tables
from speedtransfer.benchmark.results import CaseResult, GroupResult, kind_of
from speedtransfer.benchmark.suites import module_of
from speedtransfer.units import format_count, format_ratio, format_seconds, format_share


def case(name, role="other", seconds=1e-3, payload=0, **fields):
    return CaseResult(name, role, payload, [seconds] * 3, [seconds / 2] * 3, kind=kind_of(name), **fields)


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
        case("CuPy t[idx]", "other", payload / 25e9, payload),
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


def speedtorch():
    return [
        GroupResult(
            f"{kind}, 131,072 rows of 128 float32, {place} table",
            {"kind": kind, "memory": place, "published": {f"PyTorch, {place}": seconds}},
            [
                case(f"speedtransfer ({place})", "ours", payload=10**8),
                case(f"speedtransfer, check=False ({place})", "ours", 5e-4, payload=10**8),
                case(f"PyTorch t[idx] ({place})", seconds=0.03),
            ],
        )
        for place in ("pinned", "cuda")
        for kind, seconds in (("to", 0.0478), ("from", 2.6641), ("sum", 2.7119))
    ]


def tax():
    return [
        GroupResult(
            f"{experiment} of {size}",
            {"experiment": experiment, "size": size, "cuda": True},
            [
                case("NumPy", seconds=1e-9 * size**2),
                case("on the device", seconds=1e-5),
                case("device, copies both ways", seconds=3e-5 + 1e-10 * size**2),
            ],
        )
        for experiment in ("matmul", "mlp")
        for size in (32, 64, 128, 256, 512)
    ]


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
    limit = [case("large", "ours", 3.3e-3), case("small", "ours", 3e-3)]
    exact = [case("speedtransfer, pinned, idle=exact", "ours", 4.5e-3), case("speedtransfer, pinned", "ours", 3e-3)]
    exact.append(case("nn.Embedding + AdamW", seconds=9e-3))
    params = {"experiment": "idle rows", "optimizer": "AdamW", "rows": 10**6, "dim": 128, "history": 300}
    groups.append(GroupResult("AdamW step with new ids", params, exact))
    return [*groups, GroupResult("5 GB of GPU memory", {"experiment": "gpu limit", "rows": 10**8, "dim": 128}, limit)]


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


def mixed():
    def one(name, seconds, share, accuracy):
        figures = {"accuracy": accuracy, "loss": 3.7} if accuracy else {"would_take_s": 99.0}
        return case(name, "ours", seconds, memory={"host_bytes": int(1e8 * share)}, figures=figures)

    return [
        GroupResult(
            f"next word, {batch} windows",
            {"batch": batch, "hardware": {"bfloat16": ["amx_bf16"], "float16": []}},
            [
                one("FP32", 1e-5 * batch, 1, 0.4),
                one("BF16, all of it", 5e-6 * batch, 0.5, 0.38),
                one("AMP, bfloat16", 6e-6 * batch, 0.9, 0.4),
                one("AMP, float16 + GradScaler", 2e-4 * batch, 0.9, 0.0),
            ],
        )
        for batch in (512, 128)
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


def ranks():
    found = []
    for count in (1, 2):
        cases = [case("speedtransfer, one process", "ours", 10e-3)]
        cases.append(case("speedtransfer, sharded", "ours", 20e-3, figures={"sent_bytes": 3e6} if count > 1 else {}))
        figures = {"computed_sent_bytes": 256e6} if count > 1 else {}
        cases.append(case("nn.Embedding + AdamW", "other", 90e-3, figures=figures))
        found.append(GroupResult(f"AdamW step, {count} processes", {"ranks": count, "rows": 1000}, cases))
    return found


def ngram():
    times = {"speedtransfer, idle=lazy": 12e-3, "speedtransfer, idle=lazy, prefetch": 10.3e-3}
    cases = [case("no tables", "other", 10e-3)]
    cases += [case(name, "ours", seconds, figures={"moved_bytes": 2e6}) for name, seconds in times.items()]
    return [GroupResult("step", {"rows": 1000, "dim": 8}, [*cases, case("nn.Embedding + AdamW", "other", 50e-3)])]


SUITES = {
    "transfer": transfer,
    "speedtorch": speedtorch,
    "tax": tax,
    "step": step,
    "precision": precision,
    "mixed": mixed,
    "memory": memory,
    "prefetch": prefetch,
    "cache": cache,
    "ranks": ranks,
    "ngram": ngram,
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
    assert group_table(tax()[0]).header == ["", "median", "quartiles"]
    assert group_table(memory()[0]).header == ["", "host memory", "device memory"]
    table = group_table(precision()[0])
    assert table.header == ["", "time / FP32", "median", "quartiles", "moved", "loss", "host memory"]
    assert table.rows[1][0::5] == ["int8", "0.5100"]
    assert group_table(transfer()[-2]).header[-2:] == ["host", "device"]
    assert ["published (K80, 2019): PyTorch, pinned", "", "", "47.8 ms", ""] in group_table(speedtorch()[0]).rows


def test_summaries_put_groups_side_by_side():
    gather, scatter = summary_tables(recorded("transfer"))
    assert gather.header == ["", "64 B", "512 B", "4,096 B"]
    assert gather.rows[0] == ["speedtransfer", "50.0 (93%)", "50.0 (93%)", "50.0 (93%)"]
    assert ["t[idx] = rows.cpu()", *["1.00 (1.9%)"] * 3] in scatter.rows
    steps, idle, limit = summary_tables(recorded("step"))
    assert [row[0] for row in idle.rows][:2] == ["speedtransfer, pinned", "speedtransfer, pinned, idle=exact"]
    assert steps.rows[1] == ["nn.Embedding + AdamW", "1.00 ms", "10.0 ms", ""]
    assert limit.title == "5 GB of GPU memory"
    assert [table.title.split(",")[0] for table in summary_tables(recorded("tax"))] == ["matmul", "mlp"]


def test_precisions_are_shown_by_batch():
    times, held, accuracy = summary_tables(recorded("mixed"))
    assert times.rows[1] == ["BF16, all of it", "2.56 ms", "640 us"]
    assert held.rows[1] == ["BF16, all of it", "50 MB", "50 MB"]
    assert accuracy.rows[1] == ["BF16, all of it", "38.0%", "38.0%"]
    assert accuracy.rows[3] == ["AMP, float16 + GradScaler", "", ""]
    assert group_table(mixed()[0]).header == [
        "",
        "time / FP32",
        "median",
        "quartiles",
        "loss",
        "accuracy",
        "host memory",
    ]


def test_what_processes_send_is_counted_or_computed():
    times, sent = summary_tables(recorded("ranks"))
    assert times.header == ["", "1", "2"]
    assert ["speedtransfer, sharded", "", "3 MB"] in sent.rows
    assert ["nn.Embedding + AdamW", "", "256 MB (computed)"] in sent.rows
    assert group_table(ranks()[1]).header[-1] == "sent a step"
    assert lines("ranks") == [
        "2 processes, speedtransfer, sharded: 20.0 ms a step, 2.00x the 10.0 ms of one process; a process sends 3 MB",
        "2 processes, nn.Embedding + AdamW: 90.0 ms a step, 9.00x the 10.0 ms of one process; a process sends 256 MB "
        "(computed)",
    ]


def lines(suite):
    return headlines(suite, groups_of(recorded(suite)))


def test_sentences_name_shares_and_ratios():
    gather, _, overhead = lines("transfer")
    assert "50.0 GB/s, 93% of one cudaMemcpy, 96% with check=False and 94% by engine: mapped" in gather
    assert "2.50x the speed of index_select(out=pinned) + copy, 50.0x of t[idx].to(device), 2.00x of CuPy" in gather
    assert overhead.endswith("on the device engine: mapped 4.00 us, an empty launch 2.00 us")
    assert "noisy" not in gather
    to = lines("speedtorch")[3]
    assert (
        "table: speedtransfer (cuda) 1.00 ms, speedtransfer, check=False (cuda) 500 us; 30.0x the speed of PyTo" in to
    )
    assert "pinned" not in to
    assert lines("tax")[:2] == [
        "matmul: on the device pays from size 100 on",
        "matmul: device, copies both ways pays from size 185 on",
    ]
    exact, large, *_ = lines("step")
    assert exact == (
        "AdamW step with new ids: 4.50 ms with idle=exact, 1.50x the 3.00 ms with lazy, 0.50x of nn.Embedding + AdamW"
    )
    assert "the large one takes 1.10x the time" in large
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


def test_nothing_pays_where_the_cpu_is_the_device():
    groups = tax()
    for group in groups:
        group.params["cuda"] = False
    assert headlines("tax", groups) == []


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
    if suite == "speedtorch":
        assert "pytorch#24083" in text


@functools.cache
def picture_of(suite):
    return plot(recorded(suite, quick=True))


@pytest.mark.parametrize("suite", SUITES)
def test_pictures(suite):
    picture = picture_of(suite)
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert min(width, height) > 200


def labels(monkeypatch, result):
    """Return the legend of the picture of `result`."""
    found = []
    module = module_of(result["suite"])
    monkeypatch.setattr(module, "legend_below", lambda figure, axes: found.extend(axes.get_legend_handles_labels()[1]))
    assert plot(result)
    return found


def test_legends_name_what_is_there(monkeypatch):
    result = recorded("memory")
    assert labels(monkeypatch, result) == ["host", "device"]
    for one in result["groups"][0]["cases"]:
        one["memory"]["device_bytes"] = 0
    assert labels(monkeypatch, result) == ["host"]
    assert labels(monkeypatch, recorded("speedtorch")) == ["to", "from", "sum"]
    steps = ["speedtransfer, pinned", "nn.Embedding + AdamW (left out beyond 10M rows)"]
    assert labels(monkeypatch, recorded("step")) == steps


@pytest.mark.parametrize("cuda", [True, False])
def test_crossings_are_drawn_where_there_is_a_device(monkeypatch, cuda):
    marks = []
    monkeypatch.setattr(module_of("tax"), "_mark", lambda axes, size, *line: marks.append(round(size)))
    result = recorded("tax")
    for group in result["groups"]:
        group["params"]["cuda"] = cuda
    plot(result)
    assert marks == ([100, 185] * 2 if cuda else [])


def test_lines_that_leave_the_axis_are_marked(monkeypatch):
    figures = []
    make = report.require_matplotlib()
    monkeypatch.setattr(report, "require_matplotlib", lambda: lambda *size: figures.append(make(*size)) or figures[-1])
    result = recorded("transfer")
    assert plot(result)
    ours = next(group for group in result["groups"] if len(group["params"]) > 1)["cases"][0]
    ours["samples_s"] = [second / 1000 for second in ours["samples_s"]]
    assert plot(result)
    before, after = ([axes.texts for axes in figure.axes] for figure in figures)
    assert not any(before)
    (mark,) = [text for texts in after for text in texts]
    assert float(mark.get_text().replace(",", "")) > 160
    assert all(axes.get_ylim()[1] <= 160 for axes in figures[1].axes[2:])


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
    assert html.page([result], {})


class Page(HTMLParser):
    """Notes the texts and sources, and that every tag is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.sources = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.sources += [values[name] for name in ("src", "href") if name in values]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_is_whole_and_needs_no_network():
    results = [recorded(suite) for suite in SUITES]
    pictures = {suite: picture_of(suite) for suite in SUITES}
    page = Page(html.page(results, pictures))
    assert not page.open
    assert len(page.sources) == len(SUITES)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    text = " ".join(page.texts)
    for part in (
        "NVIDIA <H200>",
        "no room on disk",
        "Where 110x and 410x came from",
        "index_select(out=pinned) + copy",
    ):
        assert part in text


def test_units():
    assert [format_seconds(s) for s in (2.5, 0.0999, 1e-3, 9.996e-6, 5e-9, None)] == [
        "2.50 s", "99.9 ms", "1.00 ms", "10.0 us", "5.00 ns", "",
    ]  # fmt: skip
    assert [format_share(share) for share in (1.234, 0.1, 0.034, None)] == ["123%", "10%", "3.4%", ""]
    assert [format_ratio(ratio) for ratio in (0.5, 41.04, 410.4)] == ["0.50x", "41.0x", "410x"]
    assert [format_count(count) for count in (999, 20_000, 1_500_000, 2e9)] == ["999", "20k", "1.5M", "2G"]
