"""The numbers of README.md, a sentence from each of six results and one from a notebook; and a table of docs/results.md."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any

from experiments import word2vec
from experiments.gpu import DIM, MANY_DISTINCT, Scale, Uniform, many
from experiments.idle import DENSE, DISTANCE, EXACT, LAZY, RECALL
from store import ROOT

from examples.ngram_lm import WAYS
from speedtransfer.benchmark.report import TextTable, commit_and_date, groups_of, markdown_table
from speedtransfer.planning.estimate import HOST, estimate_step
from speedtransfer.planning.footprint import DEVICE, PINNED, Form, moved
from speedtransfer.planning.machine import load_machines
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.zipf import expected_unique
from speedtransfer.units import format_count

OVERSIZED = "notebooks/oversized.ipynb"
_OURS, _DENSE, _SPARSE = "speedtransfer, pageable", "nn.Embedding + AdamW", "nn.Embedding(sparse=True) + SparseAdam"


def markdown(result: dict[str, Any]) -> str:
    """Return the sentence that `result` gives README.md; after the one on steps comes that on a table in a file."""
    line = f"- {SENTENCES[result['part']](result)} ({result['environment']['device']}, {commit_and_date(result)})"
    return f"{line}\n\n{_oversized()}" if result["part"] == "step" else line


def _steps(result: dict[str, Any]) -> str:
    sizes = [group for group in groups_of(result) if group.params["experiment"] == "size"]
    times = {group.params["rows"]: {case.name: 1e3 * case.median_s for case in group.ran} for group in sizes}
    rows = max(rows for rows, found in times.items() if {_OURS, _DENSE, _SPARSE} <= found.keys())
    most = max(rows for rows, found in times.items() if _OURS in found)
    found, what = times[rows], sizes[0].title.split(" in ")[0]
    return (
        f"**Speed.** {what} in {format_count(rows)} x {sizes[0].params['dim']}: {found[_OURS]:.0f} ms; dense training "
        f"{found[_DENSE]:.0f} ms, SparseAdam {found[_SPARSE]:.0f} ms. In {format_count(most)} rows "
        f"{times[most][_OURS]:.0f} ms."
    )


def _beside_others(result: dict[str, Any]) -> str:
    """Return times on the large table, and on many small ones the optimizer with which others are fastest."""
    keys = ("tables", "dim", "bags", "optimizer")
    found = {tuple(group.params[key] for key in keys): group for group in groups_of(result)}

    def ms(tables: int, dim: int, optimizer: str, name: str) -> str:
        case = found[tables, dim, 0, optimizer].by_name[name]
        return f"{1e3 * case.median_s:.{0 if tables == 1 else 1}f} ms"

    adagrad, adamw = (functools.partial(ms, 1, 128, optimizer) for optimizer in ("Adagrad", "AdamW"))
    exact, large = adamw('Embedding, idle="exact"'), found[1, 128, 0, "AdamW"].params
    return (
        f"**Beside others, on a CPU.** Adagrad step, {large['ids']:,} lookups in {format_count(large['rows'])} x 128: "
        f"{adagrad('Embedding')}, FBGEMM {adagrad('FBGEMM')}; AdamW: {exact}, SparseAdam {adamw('torch SparseAdam')}, "
        f"DeepSpeed {adamw('DeepSpeed CPUAdam')}. SGD step of 26 small tables: {ms(26, 16, 'SGD', 'MultiEmbedding')}, "
        f"FBGEMM {ms(26, 16, 'SGD', 'FBGEMM')}. [More](docs/results.md#beside-others)."
    )


def _on_a_gpu(result: dict[str, Any]) -> str:
    groups = [group for group in groups_of(result) if group.params["experiment"] == "step"]
    group = max(groups, key=lambda group: group.params["size"])
    (lookups,) = re.findall(r"step of ([\d,]+) lookups", group.title)
    several, one = "several kernels", "one kernel"
    lazy, exact = (group.by_name[f"AdamW, {idle}, rows"].figures for idle in ("lazy", "exact"))
    dense = group.by_name["nn.Embedding, AdamW"].figures[several]
    return (
        f"**On a GPU.** AdamW step, {lookups} lookups in {format_count(group.params['size'])} x 128 in host memory, with "
        f'`layout="rows"`: idle rows lazy {lazy[one]:.1f} ms, exact {exact[several]:.1f} ms; dense '
        f"training in the memory of the GPU {dense:.1f} ms. [More](docs/results.md#on-a-gpu)."
    )


def _oversized() -> str:
    """Return what the notebook on a table larger than the machine printed when it was executed."""
    cells = json.loads((ROOT / OVERSIZED).read_text(encoding="utf-8"))["cells"]
    text = "".join(line for cell in cells for out in cell.get("outputs", []) for line in out.get("text", []))
    machine, memory = re.findall(r"^(.+); (\d+) GB of memory$", text, re.MULTILINE)[0]
    rows, size, first, again = re.findall(
        r"^([\d,]+) rows, +([\d.]+) GB: +(\S+) ms at first, +(\S+) ms", text, re.MULTILINE
    )[-1]
    return (
        f"- **Larger than the machine.** {format_count(int(rows.replace(',', '')))} rows, {float(size):.0f} GB with AdamW's "
        f"state, in a file on a machine with {memory} GB: {again} ms a step, {first} ms where rows are touched for the first "
        f"time ([notebook]({OVERSIZED}), {machine})"
    )


def _same_numbers(result: dict[str, Any]) -> str:
    (group,) = groups_of(result)
    dense, exact, lazy = (group.by_name[way].figures for way in (DENSE, EXACT, LAZY))
    return (
        f"**The numbers of dense training.** {group.title.partition(',')[0].capitalize()}, {RECALL} after "
        f"{group.params['steps']:,} steps of AdamW: dense {dense[RECALL]:.3f}, ours {exact[RECALL]:.3f}, lazy "
        f"{lazy[RECALL]:.3f}; weights differ by at most {exact[DISTANCE]:.0e} of the farthest that any moved."
    )


def _language_model(result: dict[str, Any]) -> str:
    (group,) = groups_of(result)
    none, dense, sparse, exact = (group.by_name[WAYS[way].title] for way in ("none", "dense", "sparse", "exact"))
    loss = {case.name: f"{case.figures['validation']:.3f}" for case in (none, dense, sparse, exact)}
    tokens = [group.params["batch"] * group.params["context"] / case.median_s for case in (exact, dense)]
    return (
        f"**N-gram tables of a language model.** A small GPT's validation loss with {group.params['heads']} rows a token: "
        f"{loss[exact.name]}, dense AdamW {loss[dense.name]}, SparseAdam {loss[sparse.name]}, without tables "
        f"{loss[none.name]}; {tokens[0]:,.0f} tokens a second, dense {tokens[1]:,.0f}."
    )


def _words(result: dict[str, Any]) -> str:
    group = next(group for group in groups_of(result) if group.params["model"] == "skipgram")
    case = next(case for case in group.ran if case.role == "ours")
    found = [verdict for _, verdict in word2vec.verdicts(case)]
    worse = found.count(word2vec.WORSE)
    quality = f"worse on {worse} of {len(found)} sets" if worse else f"not worse on any of {len(found)} sets"
    return (
        f"**word2vec.** Skip-gram of {group.params['dim']} dimensions by {case.name.rpartition(', ')[2]} on two cores: "
        f"{word2vec.ratio(group, case):.1f} times gensim's words a second, {quality} beyond the confidence interval."
    )


SENTENCES = {
    **{"step": _steps, "peers": _beside_others, "gpu": _on_a_gpu},
    **{"idle": _same_numbers, "ngram_example": _language_model, "word2vec": _words},
}


# --- the least that a step on a GPU can take ----------------------------------------------------------------------------

MACHINES = ("h200", "gh200", "gb200")


def roofs(result: dict[str, Any]) -> str:
    """Return a table of the least that steps of tables in page-locked memory take, planned (docs/plan.md), beside `result`.

    That is one of the suite `gpu`.
    """
    machines = [load_machines(name)[0] for name in MACHINES]
    heads = ["AdamW and SGD", "MB up", "MB down", "launches", *(f"{name}, ms" for name in MACHINES)]
    heads += ["h200's memory, ms", "measured, ms"]
    rows = list[list[str]]()
    for group in groups_of(result):
        if group.params["experiment"] not in ("step", "fbgemm"):
            continue
        ten = group.params["experiment"] == "fbgemm"
        count = group.params.get("size", Scale().small)
        for case in group.cases:
            optimizer, idle, *layout = case.name.removeprefix("MultiEmbedding, ").split(", ")
            if case.name.startswith(("nn.", "10 ")) or layout == ["rows"] or not case.figures:
                continue
            tables, lookups, distinct = (
                (10, many(Scale()), MANY_DISTINCT) if ten else (1, Scale().lookups, Uniform.distinct)
            )
            sizes, trainer = [(count, DIM)] * tables, optimizer_given(optimizer)
            work = make_workload(sizes, trainer, lookups // tables, 1, 0.0, None, idle)
            # As `Uniform` draws them: so many anywhere, and the rest of the lookups again of these.
            unique = expected_unique(count, 0.0, round(distinct * lookups / tables))
            work = replace(work, tables=tuple(replace(table, unique=unique) for table in work.tables))
            times = [estimate_step(work, Form(), PINNED, machine) for machine in machines]
            times.append(estimate_step(work, Form(), DEVICE, machines[0]))
            cells = [
                f"{optimizer}, {idle}, {tables} x {count:,}",
                *(f"{number / 1e6:,.0f}" for number in moved(work, Form())[:2]),
                f"{HOST[idle].first_launches:.0f}",
                *(f"{1e3 * (one.seconds if one else 0):.3g}" for one in times),
                f"{min(case.figures['several kernels'], case.figures['one kernel']):.3g}",
            ]
            rows.append(cells)
    names = ", ".join(f"`{name}`" for name in MACHINES)
    about = (
        f"**The least that a step can take**, by rates of the bus and counted calls ({names} of `speedtransfer plan`), and "
        f"what it took on {result['environment']['device']}. One table, or a MultiEmbedding of ten, in page-locked memory; "
        "beside them tables in the GPU's memory."
    )
    table = markdown_table(TextTable(heads[0], heads, rows, frozenset(row[0] for row in rows)))
    return f"{about}\n\n{table}"
