"""What gpu.py has found, as docs/gpu.md shows it."""

from __future__ import annotations

from typing import Any

from experiment import blocks_of, markdown_table, provenance

Case = dict[str, Any]


def markdown(result: Case, picture: str) -> str:
    """Return the tables of all experiments that have found something; `picture` is not used, as there is none."""
    found = {name: [case for case in cases if "error" not in case] for name, cases in result["experiments"].items()}
    blocks = [_TABLES[name](cases) for name, cases in found.items() if cases and name in _TABLES]
    return blocks_of("", "", "## Measured", f"{provenance(result)}; rows of 512 bytes in host memory.", *blocks)


def _titled(title: str, *rows: list[str]) -> str:
    return f"{title}\n\n{markdown_table(rows)}"


def _number(case: Case, key: str, digits: int = 1) -> str:
    return f"{case[key]:,.{digits}f}" if key in case else "-"


# Steps in several kernels, in one, and of the host.
_TIMES = {"ms": "several kernels", "fused_ms": "one kernel", "host_ms": "host, several", "fused_host_ms": "host, one"}


def _steps(cases: list[Case]) -> str:
    dense = {(case["rows"], case["optimizer"]): case for case in cases if case.get("dense")}
    rows = [
        [
            f"{case['rows']:,}",
            *(case[key] for key in ("optimizer", "idle", "layout")),
            *(_number(case, key, 2) for key in _TIMES),
            _number(dense.get((case["rows"], case["optimizer"]), {}), "ms", 2),
        ]
        for case in cases
        if not case.get("dense")
    ]
    title = f"A step of {cases[0]['lookups']:,} lookups, ms; beside it `nn.Embedding` on the GPU, its AdamW with `fused=True`:"
    return _titled(title, ["rows", "optimizer", "idle", "layout", *_TIMES.values(), "dense"], *rows)


def _many(cases: list[Case]) -> str:
    rows = [
        [
            "MultiEmbedding" if case["together"] else f"{case['tables']} Embeddings",
            *(case[key] for key in ("optimizer", "idle")),
            *(_number(case, key) for key in _TIMES),
        ]
        for case in cases
    ]
    title = f"A step of {cases[0]['tables']} tables of {cases[0]['rows']:,} rows, {cases[0]['lookups']:,} lookups in all, ms:"
    return _titled(title, ["modules", "optimizer", "idle", *_TIMES.values()], *rows)


def _profile(cases: list[Case]) -> str:
    columns = {
        f"{case['idle']}{', in one kernel' if key.startswith('fused') else ''}": case[key]
        for case in cases
        for key in ("us", "fused_us")
        if key in case
    }
    most = {
        name: max(times.get(name, 0.0) for times in columns.values()) for times in columns.values() for name in times
    }
    kernels = sorted(most, key=lambda name: -most[name])[:8]
    rows = [[f"`{name}`", *(f"{times.get(name, 0):,.0f}" for times in columns.values())] for name in kernels]
    title = f"The device's time of a step of AdamW, {cases[0]['rows']:,} rows, {cases[0]['lookups']:,} lookups, us by kernel:"
    return _titled(title, ["kernel", *columns], *rows)


def _both_ways(cases: list[Case]) -> str:
    best = sorted(cases, key=lambda case: -sum(case["at_once"]))
    kernels = [case for case in best if "copy" not in (case["read"], case["written"])]
    copies = [case for case in best if case["read"] == case["written"] == "copy"]
    rows = [
        [f"{count:,}", case["read"], case["written"]] + [f"{rate:.1f}" for rate in (*case["alone"], *case["at_once"])]
        for count in sorted({case["rows"] for case in cases})
        for case in [
            *[one for one in kernels if one["rows"] == count][:3],
            *[one for one in copies if one["rows"] == count],
        ]
    ]
    heading = ["rows", "read by", "written by", "read alone", "written alone", "read at once", "written at once"]
    return _titled("Rows read beside rows written, GB/s, by the best launches and by plain copies:", heading, *rows)


def _few(cases: list[Case]) -> str:
    rows = [
        [
            f"{case['kernel']} {case['blocks'] or ''}".strip(),
            *(_number(case, key) for key in ("alone", "beside", "tflop_per_s")),
        ]
        for case in cases
    ]
    title = f"Rows read from a table of {cases[0]['rows']:,}, GB/s, alone and beside a product of matrices:"
    return _titled(title, ["kernel and blocks", "alone", "beside", "product, TFLOP/s"], *rows)


def _host(cases: list[Case]) -> str:
    rows = [[case["optimizer"], case["idle"], _number(case, "ms", 2), _number(case, "host_ms", 2)] for case in cases]
    title = f"A step of {cases[0]['tables']} small tables, {cases[0]['lookups']:,} lookups each, ms:"
    return _titled(title, ["optimizer", "idle", "step", "host"], *rows)


def _words(cases: list[Case]) -> str:
    rows = [[case["device"], case["model"], f"{case['words_per_s']:,}"] for case in cases]
    return _titled("word2vec, 100 dimensions, window 5:", ["device", "model", "words a second"], *rows)


def _pages(cases: list[Case]) -> str:
    allocators = list(dict.fromkeys(case["allocator"] for case in cases))
    cells = {(case["gb"], case["launch"], case["allocator"]): case for case in cases}
    rows = [
        [f"{gb:g} GB", launch]
        + [_number(cells.get((gb, launch, one), {}), way) for one in allocators for way in ("gather", "scatter")]
        for gb, launch in dict.fromkeys((case["gb"], case["launch"]) for case in cases)
    ]
    heading = ["table", "kernel and blocks", *(f"{way}, {one}" for one in allocators for way in ("gather", "scatter"))]
    return _titled("Rows anywhere in a table, GB/s, by `SPEEDTRANSFER_PINNED`:", heading, *rows)


_TABLES = {
    "step": _steps,
    "fbgemm": _many,
    "profile": _profile,
    "both_ways": _both_ways,
    "few_blocks": _few,
    "host": _host,
    "words": _words,
    "pages": _pages,
}
