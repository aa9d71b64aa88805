"""The numbers of README.md: one sentence from each of six recorded results, and one from a notebook."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from idle import DENSE, EXACT, LAZY, TOP
from store import IDLE, NGRAM_EXAMPLE, ROOT, WORD2VEC
from word2vec_report import OPTIMIZERS, OURS, WORSE, differences, ratio, systems

from speedtransfer.benchmark.report import commit_and_date
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.units import format_count

OVERSIZED = "notebooks/oversized.ipynb"
STEP, GPU, PEERS = "step", "gpu", "peers"  # of the suites
_OURS, _DENSE, _SPARSE = "speedtransfer, pageable", "nn.Embedding + AdamW", "nn.Embedding(sparse=True) + SparseAdam"


def markdown(result: dict[str, Any]) -> str:
    """Return the sentence that `result` gives README.md; after the one on steps comes that on a table in a file."""
    line = f"- {SENTENCES[result['part']](result)} ({result['environment']['device']}, {commit_and_date(result)})"
    return f"{line}\n\n{_oversized()}" if result["part"] == STEP else line


def _steps(result: dict[str, Any]) -> str:
    sizes = [GroupResult.from_json(group) for group in result["groups"] if group["params"]["experiment"] == "size"]
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
    groups = [GroupResult.from_json(group) for group in result["groups"]]
    found = {(g.params["tables"], g.params["dim"], g.params["bags"], g.params["optimizer"]): g for g in groups}

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
    groups = [GroupResult.from_json(group) for group in result["groups"] if group["params"]["experiment"] == "step"]
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
    curves = result["curves"]
    recall = {way: curves[way]["recall"][-1] for way in (DENSE, EXACT, LAZY)}
    return (
        f"**The numbers of dense training.** {result['data'].capitalize()}, recall@{TOP} after "
        f"{result['settings']['steps']:,} steps of AdamW: dense {recall[DENSE]:.3f}, ours {recall[EXACT]:.3f}, lazy "
        f"{recall[LAZY]:.3f}; weights differ by at most {curves[EXACT]['distance'][-1]:.0e} of the "
        "farthest that any moved."
    )


def _language_model(result: dict[str, Any]) -> str:
    found, settings = result["contenders"], result["settings"]
    loss = {way: found[way]["validation"][-1][1] for way in ("none", "dense", "exact", "sparse")}
    tokens = {way: settings["batch"] * settings["context"] / found[way]["step_s"] for way in ("dense", "exact")}
    return (
        f"**N-gram tables of a language model.** A small GPT's validation loss with {settings['heads']} rows a token: "
        f"{loss['exact']:.3f}, dense AdamW {loss['dense']:.3f}, SparseAdam {loss['sparse']:.3f}, without tables "
        f"{loss['none']:.3f}; {tokens['exact']:,.0f} tokens a second, dense {tokens['dense']:,.0f}."
    )


def _words(result: dict[str, Any]) -> str:
    system = next(system for system in systems(result) if system.system == OURS and system.model == "skipgram")
    beside = ratio(result, system)
    verdicts = [verdict for _, verdict in differences(result, system)]
    worse = verdicts.count(WORSE)
    quality = f"worse on {worse} of {len(verdicts)} sets" if worse else f"not worse on any of {len(verdicts)} sets"
    speed = "" if beside is None else f"{beside[0]:.1f} times gensim's words a second, "
    return (
        f"**word2vec.** Skip-gram of {system.dim} dimensions by {OPTIMIZERS[system.optimizer]} on two cores: "
        f"{speed}{quality} beyond the confidence interval."
    )


SENTENCES = {
    **{STEP: _steps, PEERS: _beside_others, GPU: _on_a_gpu},
    **{IDLE: _same_numbers, WORD2VEC: _words, NGRAM_EXAMPLE: _language_model},
}
