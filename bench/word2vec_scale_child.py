"""What one process of bench/word2vec_scale.py does: steps of word2vec over a vocabulary of so many words.

``python bench/word2vec_scale_child.py JOB.json`` (see process.py).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store import ROOT

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from speedtransfer.cuda import resolve_device
from speedtransfer.word2vec import Corpus, Settings, Trainer, Vocabulary

_CHUNK = 1 << 20
_TABLES = ("input", "output")


class Numbers(Sequence[Any]):
    """Words spelled as their numbers, made when they are read: fifty million strings would take gigabytes."""

    def __init__(self, number: int) -> None:
        self._numbers = range(number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        found = self._numbers[index]
        return str(found) if isinstance(found, int) else [str(number) for number in found]


BLOCK_WORDS = 2048  # of a step, so that steps compare with those recorded earlier


def zipf_counts(rows: int) -> np.ndarray:
    """Return counts in inverse proportion to the rank, the least frequent once: int64, shape (rows,)."""
    return rows // np.arange(1, rows + 1)


def draw_ids(counts: np.ndarray, number: int, seed: int = 1) -> np.ndarray:
    """Draw `number` words in proportion to `counts`, by the inverse of their distribution: int32, shape (number,)."""
    generator, ends = np.random.default_rng(seed), np.cumsum(counts)
    ids = np.empty(number, dtype=np.int32)
    for first in range(0, number, _CHUNK):
        part = ids[first : first + _CHUNK]
        part[:] = np.searchsorted(ends, generator.integers(0, ends[-1], len(part)), side="right")
    return ids


def measure(job: dict[str, Any]) -> None:
    """Make the tables and take the steps over the same blocks: rows are touched first, again, and after they were written.

    The system is left to write the first weights to the disk before the clock starts: it would go on for a minute beside the
    steps, and take its share of each. A page that was written is protected, and to change it again costs a fault.

    What was found is written before the tables go: to delete the scattered pages of sparse files may take a disk minutes.
    """
    device = resolve_device(None)
    if device.type == "cuda" and job["device_gb"] is not None:
        all_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["device_gb"] * 1e9 / all_bytes), device)
    settings = Settings(
        dim=job["dim"],
        optimizer=job["optimizer"],
        epochs=1,
        block_words=BLOCK_WORDS,
        memory=job["memory"],
        path=Path(job["folder"]) if job["memory"] == "mmap" else None,
    )
    counts = zipf_counts(job["rows"])
    vocabulary, steps = Vocabulary(Numbers(len(counts)), counts), job["warm"] + job["steps"]
    kept = float((counts * vocabulary.keep_probability(settings.sample)).sum()) / vocabulary.num_words
    ids = draw_ids(counts, steps * round(BLOCK_WORDS / kept))
    start = time.perf_counter()
    trainer = Trainer(Corpus.from_ids(ids, vocabulary), settings)
    start_s = time.perf_counter() - start
    touched: list[tuple[int, int]] = []
    _write_back()
    first, again = (_take_steps(trainer, steps, device, touched) for _ in range(2))
    _write_back()
    written = _take_steps(trainer, steps, device, touched)
    files = [Path(job["folder"], f"{name}.safetensors").stat() for name in _TABLES] if job["memory"] == "mmap" else []
    facts = {
        "start_s": start_s,
        "first": _medians(first, job["warm"]),
        "again": _medians(again, job["warm"]),
        "written": _medians(written, job["warm"]),
        "touched": [statistics.median(column) for column in zip(*touched, strict=True)],
        "words": len(ids),
        "table_bytes": trainer.model.input.table.nbytes + trainer.model.output.table.nbytes,
        "weight_files": {"bytes": sum(s.st_size for s in files), "on_disk": sum(s.st_blocks for s in files) * 512},
        "device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }
    Path(job["result"]).write_text(json.dumps({**facts, **_resident()}), encoding="utf-8")


def _take_steps(
    trainer: Trainer, steps: int, device: torch.device, touched: list[tuple[int, int]]
) -> list[tuple[float, float]]:
    """Return the seconds to draw each block and find its rows, and those to train on it."""
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        block = trainer.model.prepare(trainer.sampler.block(step))
        _wait(device)
        drawn = time.perf_counter()
        trainer.model.deposit_gradients(block, with_loss=False)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        _wait(device)
        seconds.append((drawn - start, time.perf_counter() - drawn))
        contexts = torch.cat([block.words, block.negatives.flatten()])
        touched.append((len(block.words.unique()), len(contexts.unique())))
    return seconds


def _write_back() -> None:
    """Have the system write changed pages to the disk, where it offers that."""
    if hasattr(os, "sync"):
        os.sync()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _medians(seconds: list[tuple[float, float]], warm: int) -> dict[str, float]:
    block, step = zip(*seconds[warm:], strict=True)
    return {
        "block_s": statistics.median(block),
        "step_s": statistics.median(step),
        "mean_step_s": statistics.fmean(step),
    }


def _resident() -> dict[str, int]:
    """Return resident memory of the process and of mapped files; empty where the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    fields = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "RssFile", "RssShmem"))
    }
    return {name.lower() + "_bytes": int(value) * 1024 for name, value in fields.items()}


if __name__ == "__main__":
    measure(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
