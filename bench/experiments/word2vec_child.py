"""What one process of experiments/word2vec.py does: train by gensim, train by this package, or evaluate the vectors of either.

Only what a job needs is imported, before its clock starts, so that its memory is its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("skipgram", "cbow")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_gensim(job: dict[str, Any]) -> dict[str, Any]:
    """Train as ``Word2Vec(corpus_file=...)`` does; vocabulary and training are timed apart."""
    from gensim.models import Word2Vec

    same = {key: job[key] for key in ("negative", "window", "sample", "min_count", "epochs", "seed")}
    start = time.perf_counter()
    sg = int(job["model"] == MODELS[0])
    model = Word2Vec(sg=sg, cbow_mean=1, hs=0, vector_size=job["dim"], workers=cores(), **same)
    model.build_vocab(corpus_file=job["corpus"])
    middle = time.perf_counter()
    counts = {"total_examples": model.corpus_count, "total_words": model.corpus_total_words}
    model.train(corpus_file=job["corpus"], epochs=model.epochs, **counts)
    times = {"vocabulary_s": middle - start, "training_s": time.perf_counter() - middle}
    words = model.wv.index_to_key
    return {**times, **_keep(job, words, [model.wv.get_vecattr(word, "count") for word in words], model.wv.vectors)}


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
    torch.zeros(1, device=resolve_device(None))  # a CUDA device takes seconds to initialize
    start = time.perf_counter()
    corpus = Corpus(job["corpus"], min_count=settings.min_count)
    middle = time.perf_counter()
    trainer = Trainer(corpus, settings)
    trainer.run(TrainingProgress(enabled=False))
    vectors = trainer.vectors()
    times = {"vocabulary_s": middle - start, "training_s": time.perf_counter() - middle}
    return {**times, **_keep(job, corpus.vocabulary.words, corpus.vocabulary.counts, vectors.matrix)}


def evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """Evaluate stored vectors on all sets, by the package's evaluator, whose figures are tested against gensim's.

    Words of equal count are sorted alphabetically first, so that all systems are evaluated on the same analogies. Returns by
    set the ``scores``, how many pairs or questions are known (``asked``), and the outcome of each of the ``items``: the cosine
    of a pair, 1 for a right answer and 0 for a wrong one, None where a word is unknown.
    """
    from speedtransfer.errors import InvalidValueError
    from speedtransfer.word2vec import Vectors
    from speedtransfer.word2vec import evaluate as score
    from speedtransfer.word2vec.evaluation import SimilaritySet, load_set

    folder = Path(job["folder"])
    matrix, lines = np.load(folder / "vectors.npy"), (folder / "words.txt").read_text(encoding="utf-8").split("\n")[:-1]
    words = [(word, int(count)) for word, _, count in (line.rpartition(" ") for line in lines)]
    order = sorted(range(len(words)), key=lambda row: (-words[row][1], words[row][0]))
    vectors = Vectors([words[row][0] for row in order], matrix[order])
    found: dict[str, dict[str, Any]] = {"scores": {}, "asked": {}, "items": {}}
    for name, path in job["sets"]:
        questions: Any = load_set(path)
        pairs = isinstance(questions, SimilaritySet)
        keys = [name] if pairs else [name, f"{name}, semantic", f"{name}, syntactic"]
        found["scores"].update(dict.fromkeys(keys))
        found["asked"].update(dict.fromkeys(keys, 0))
        try:
            result: Any = score(vectors, questions, len(words) if pairs else job["restrict"])
        except InvalidValueError:  # too few known words
            continue
        if pairs:
            measured = [(result.spearman, result.num_pairs, _cosines(vectors, questions.pairs))]
        else:
            parts = (result.total, result.semantic, result.syntactic)
            measured = [(part.accuracy, part.num_questions, _answers(part, questions)) for part in parts]
        for key, values in zip(keys, measured, strict=True):
            for what, value in zip(found, values, strict=True):
                found[what][key] = value
    return found


def _answers(part: Any, questions: Any) -> list[float | None]:
    known = dict.fromkeys(part.correct, 1.0) | dict.fromkeys(part.incorrect, 0.0)
    return [known.get(question) for _, section in questions.sections for question in section]


def _cosines(vectors: Any, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
    """Return the cosine of each pair, None where a word is unknown. Case does not matter, as in `evaluate`."""
    words = [word.upper() for word in vectors.words]
    row_of = dict(zip(reversed(words), range(len(words) - 1, -1, -1), strict=True))
    rows = np.array([[row_of.get(word.upper(), -1) for word in pair] for pair in pairs])
    first, second = (vectors.matrix[side].astype(np.float64) for side in rows.T)
    length = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(axis=1) / np.where(length > 0, length, 1)
    return [float(one) if known else None for one, known in zip(cosines, rows.min(axis=1) >= 0, strict=True)]


def _keep(job: dict[str, Any], words: Sequence[str], counts: Any, matrix: np.ndarray) -> dict[str, Any]:
    """Write the vectors to the folder of the job for `evaluate`, and return what identifies the vocabulary, and memory."""
    lines = [f"{word} {count}\n" for word, count in zip(words, counts, strict=True)]
    status = Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else ""
    peak = 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    np.save(Path(job["folder"], "vectors.npy"), matrix)
    Path(job["folder"], "words.txt").write_text("".join(lines), encoding="utf-8")
    same = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    about = {"words": len(words), "occurrences": int(sum(counts)), "sha256": same}
    return {"vocabulary": about, "peak_bytes": peak}
