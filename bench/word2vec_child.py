"""What one process of bench/word2vec.py does: train by gensim, train by this package, or evaluate the vectors of either.

``python bench/word2vec_child.py JOB.json`` (see process.py). Only what a job needs is imported, before its clock
starts, so that its memory is its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from word2vec_data import ANALOGIES, MODELS, PAIRS, PARTS

GENSIM, OURS, EVALUATE = "gensim", "speedtransfer", "evaluate"


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_gensim(job: dict[str, Any]) -> dict[str, Any]:
    """Train as ``Word2Vec(corpus_file=...)`` does; vocabulary and training are timed apart."""
    from gensim.models import Word2Vec

    clock = _Clock()
    model = Word2Vec(
        sg=int(job["model"] == MODELS[0]),
        cbow_mean=1,
        hs=0,
        negative=job["negative"],
        vector_size=job["dim"],
        window=job["window"],
        sample=job["sample"],
        min_count=job["min_count"],
        epochs=job["epochs"],
        workers=cores(),
        seed=job["seed"],
    )
    model.build_vocab(corpus_file=job["corpus"])
    clock.vocabulary_is_done()
    model.train(
        corpus_file=job["corpus"],
        total_examples=model.corpus_count,
        total_words=model.corpus_total_words,
        epochs=model.epochs,
    )
    facts = clock.facts()
    words = model.wv.index_to_key
    counts = [model.wv.get_vecattr(word, "count") for word in words]
    return {**facts, **_keep(job, words, counts, model.wv.vectors)}


def train_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train with the package's defaults, except for the settings shared with gensim."""
    import torch

    for later in ("torch._dynamo", "numba"):  # imports that the first optimizer and the first block would make
        with contextlib.suppress(ImportError):
            importlib.import_module(later)
    from speedtransfer.cuda import resolve_device
    from speedtransfer.word2vec import Corpus, Settings, Trainer
    from speedtransfer.word2vec.progress import TrainingProgress

    same = ("model", "dim", "optimizer", "epochs", "window", "negative", "min_count", "sample", "seed")
    settings = Settings(**{name: job[name] for name in same})
    device = resolve_device(None)
    torch.zeros(1, device=device)  # a CUDA device takes seconds to initialize
    clock = _Clock()
    corpus = Corpus(job["corpus"], min_count=settings.min_count)
    clock.vocabulary_is_done()
    trainer = Trainer(corpus, settings)
    trainer.run(TrainingProgress(enabled=False))
    vectors = trainer.vectors()
    facts = clock.facts()
    if device.type == "cuda":
        facts["device_bytes"] = torch.cuda.max_memory_allocated(device)
    vocabulary = corpus.vocabulary
    return {**facts, "lr": settings.first_lr, **_keep(job, vocabulary.words, vocabulary.counts, vectors.matrix)}


def evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """Evaluate stored vectors on all sets, by the package's evaluator, whose figures are tested against gensim's.

    Words of equal count are sorted alphabetically first, so that all systems are evaluated on the same analogies.

    Returns
    -------
    dict
        ``scores`` and ``asked``, the known pairs or questions, by set; ``items``, the outcome of each, see `unpack`.
    """
    from speedtransfer.errors import InvalidValueError
    from speedtransfer.word2vec import Vectors
    from speedtransfer.word2vec import evaluate as score
    from speedtransfer.word2vec.evaluation import load_set

    folder = Path(job["folder"])
    matrix = np.load(folder / "vectors.npy")
    words, counts = _read_words(folder)
    order = sorted(range(len(words)), key=lambda row: (-counts[row], words[row]))
    vectors = Vectors([words[row] for row in order], matrix[order])
    scores: dict[str, float | None] = {}
    asked: dict[str, int] = {}
    items: dict[str, Any] = {}
    for name, kind, path in job["sets"]:
        keys = [name] if kind == PAIRS else [name, *(f"{name}, {part}" for part in PARTS)]
        scores.update(dict.fromkeys(keys))
        asked.update(dict.fromkeys(keys, 0))
        questions: Any = load_set(path)
        try:
            found: Any = score(vectors, questions, job["restrict"] if kind == ANALOGIES else len(words))
        except InvalidValueError:  # too few known words
            continue
        if kind == PAIRS:
            scores[name], asked[name] = found.spearman, found.num_pairs
            items[name] = pack_cosines(_cosines(vectors, questions.pairs))
            continue
        all_questions = [question for _, section in questions.sections for question in section]
        for key, part in zip(keys, (found.total, found.semantic, found.syntactic), strict=True):
            scores[key], asked[key] = part.accuracy, part.num_questions
            answers = dict.fromkeys(part.correct, 1) | dict.fromkeys(part.incorrect, 0)
            items[key] = pack_answers([answers.get(question, -1) for question in all_questions])
    return {"scores": scores, "asked": asked, "items": items}


def _cosines(vectors: Any, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return the cosine of each pair, nan where a word is unknown. Case does not matter, as in `evaluate`."""
    words = [word.upper() for word in vectors.words]
    row_of = dict(zip(reversed(words), range(len(words) - 1, -1, -1), strict=True))
    rows = np.array([[row_of.get(word.upper(), -1) for word in pair] for pair in pairs])
    first, second = (vectors.matrix[side].astype(np.float64) for side in rows.T)
    length = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(axis=1) / np.where(length > 0, length, 1)
    return np.where(rows.min(axis=1) >= 0, cosines, np.nan).astype("<f4")


def pack_cosines(cosines: np.ndarray) -> str:
    """Return float32 cosines as text, see `unpack`."""
    return base64.b64encode(cosines.astype("<f4").tobytes()).decode()


def pack_answers(answers: Sequence[int]) -> dict[str, str]:
    """Return answers, 1 right, 0 wrong, -1 unknown, as bits in hex, see `unpack`."""
    known, right = (np.packbits([answer in which for answer in answers]) for which in ((0, 1), (1,)))
    return {"known": known.tobytes().hex(), "right": right.tobytes().hex()}


def unpack(packed: str | dict[str, str]) -> np.ndarray:
    """Return the outcome of each item of a set, nan where a word is unknown.

    Returns
    -------
    numpy.ndarray
        Shape (items,), float64: the cosine of each pair; or 1 for each right and 0 for each wrong answer, with up to 7 nan
        behind the last.
    """
    if isinstance(packed, str):
        return np.frombuffer(base64.b64decode(packed), "<f4").astype(np.float64)
    known, right = (np.unpackbits(np.frombuffer(bytes.fromhex(packed[key]), np.uint8)) for key in ("known", "right"))
    return np.where(known, right, np.nan)


class _Clock:
    """Seconds of the two parts of a training, and what the process held before it."""

    def __init__(self) -> None:
        import psutil

        self._import_bytes = psutil.Process().memory_info().rss
        self._start = self._middle = time.perf_counter()

    def vocabulary_is_done(self) -> None:
        self._middle = time.perf_counter()

    def facts(self) -> dict[str, Any]:
        """Stop the clock."""
        end = time.perf_counter()
        return {
            "vocabulary_s": self._middle - self._start,
            "training_s": end - self._middle,
            "import_bytes": self._import_bytes,
        }


def _keep(job: dict[str, Any], words: Sequence[str], counts: Any, matrix: np.ndarray) -> dict[str, Any]:
    """Write the vectors to the folder of the job for `evaluate`, and return what identifies the vocabulary."""
    lines = [f"{word} {count}\n" for word, count in zip(words, counts, strict=True)]
    if job["folder"] is not None:
        np.save(Path(job["folder"], "vectors.npy"), matrix)
        Path(job["folder"], "words.txt").write_text("".join(lines), encoding="utf-8")
    same = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    return {"vocabulary": {"words": len(words), "occurrences": int(sum(counts)), "sha256": same}}


def _read_words(folder: Path) -> tuple[list[str], list[int]]:
    words, counts = [], []
    for line in folder.joinpath("words.txt").read_text(encoding="utf-8").split("\n")[:-1]:
        word, _, count = line.rpartition(" ")
        words.append(word)
        counts.append(int(count))
    return words, counts


JOBS = {GENSIM: train_gensim, OURS: train_ours, EVALUATE: evaluate}


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(described["result"]).write_text(json.dumps(JOBS[described["task"]](described)), encoding="utf-8")
