"""A run from the command line: all that it writes is in one folder.

``vectors.*``, ``vocab.txt``, ``settings.json`` and, of n-grams, ``ngrams.safetensors`` are written at the end, together;
``checkpoint/``, ``tables/`` (memory "mmap") and ``tensorboard/`` while training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from speedtransfer.checkpoint import manifest
from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, StorageError, check_no_url, format_bytes, printable
from speedtransfer.lazy import MissingPackageError
from speedtransfer.ranks import exchange_of, is_first, joined
from speedtransfer.system import keep_mode, program
from speedtransfer.tables.write_lock import lock_for_writing
from speedtransfer.version import __version__, version_of
from speedtransfer.word2vec import formats
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.formats_text import Stored
from speedtransfer.word2vec.model import SharedVectors, remove_tables
from speedtransfer.word2vec.plot import plot
from speedtransfer.word2vec.progress import StopOnSignal, TrainingProgress
from speedtransfer.word2vec.run import make_callbacks, remove_curves
from speedtransfer.word2vec.settings import Settings, check_writable, existing_folder
from speedtransfer.word2vec.text import find_files, in_all
from speedtransfer.word2vec.trainer import Trainer
from speedtransfer.word2vec.vectors import Vectors


def train_into(
    output: Path,
    corpus: str | list[str],
    settings: Settings,
    format: str = "txt",
    *,
    resume: bool = False,
    overwrite: bool = False,
    curves: bool = False,
    quiet: bool = False,
    show: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    evaluate: Sequence[Path] = (),
    evaluate_every: float = 1.0,
) -> int | None:
    """Train as the command ``train`` does, `show` each line of the report, and return the signal that stopped it, if any."""
    suffix = f".{format.lower().lstrip('.')}"
    formats.find_format(Path(formats.VECTORS + suffix))
    if suffix == ".glove" and settings.dim < 2:
        raise InvalidValueError("format is glove, which needs a dim of 2 at least, but dim is 1; save to txt")
    _check_output(output, overwrite or resume)
    tables_within = settings.path is not None and Path(settings.path) == output / formats.TABLES
    kept = {"when_stopped": not (resume or checkpoint_every), "own_tables": tables_within}
    checkpoints = Checkpoints(output / formats.CHECKPOINT, settings, checkpoint_every, resume, overwrite, **kept)
    board = output / formats.BOARD if curves else None
    callbacks = make_callbacks(settings, checkpoints, board, evaluate, evaluate_every)
    if resume and not checkpoints.resumes and not overwrite and _holds_a_run(output):
        raise InvalidValueError(
            f"output folder {str(output)!r} holds a run but there is no checkpoint in {str(checkpoints.path)!r} to resume; "
            "pass --overwrite to begin anew"
        )
    if corpus != "-":
        _check_apart(output, corpus)
    with joined(resolve_device(settings.device)) as others, contextlib.ExitStack() as saving:
        if others is not None and (curves or settings.path is not None):
            raise InvalidValueError("tensorboard and path are for one process; leave them out with torchrun")
        if others is None and settings.memory == "shared":
            raise InvalidValueError(
                "memory is 'shared' but this process is alone; start several (torchrun), or pass another"
            )
        exchange = None if others is None else exchange_of(others)
        # All raise where the first cannot.
        in_all(exchange, lambda: saving.enter_context(_alone(output)) if is_first() else None)
        with TrainingProgress(not quiet and is_first()) as progress:
            words = Corpus(corpus, report=progress.reading, settings=settings)
            if checkpoints.resumes:
                trainer = checkpoints.restore(words, progress)
            else:
                # Table files would be in the way; all else goes when there is nothing left to be refused.
                remove_tables(output / formats.TABLES)
                trainer = Trainer(words, settings)
                _clear(output, checkpoints)
            # From the first step until everything is saved a signal only ends training.
            stop = saving.enter_context(StopOnSignal())
            trainer.run(progress, callbacks, stop)
        shared = None if exchange is None else SharedVectors(trainer.model, exchange)
        save = _saver(trainer, shared, corpus, suffix, output)
        if shared is not None and not is_first():
            shared.serve()
            return stop.requested
        try:
            save_or_rescue(output, overwrite or resume, save)
        finally:
            if shared is not None:
                shared.end()
        _report(trainer, output, suffix, show)
    return stop.requested


def _check_output(path: Path, overwrite: bool) -> None:
    """Raise where the folder `path` cannot be written, or exists and may not be overwritten."""
    check_no_url(path, "output")
    if path.exists() and not path.is_dir():
        raise InvalidValueError(f"output folder {str(path)!r} exists and is a file; choose another folder")
    if path.exists() and not overwrite:
        stopped = os.path.lexists(path / formats.CHECKPOINT / manifest.NAME)
        remedy = ", or pass --resume to go on or --overwrite" if stopped else " or pass --overwrite"
        raise InvalidValueError(f"output folder {str(path)!r} exists; choose another folder{remedy}")
    check_writable(path, "vectors")


def _check_apart(output: Path, corpus: str | list[str]) -> None:
    """Raise where the corpus has no files, or the next run would read what this one writes as a part of it."""
    folder = output.resolve()
    files = [file.resolve() for file in find_files(corpus)]
    sources = [Path(source).resolve() for source in ([corpus] if isinstance(corpus, str) else corpus)]
    within = [source for source in sources if source.is_dir() and folder.is_relative_to(source)]
    within += [file for file in files if file.is_relative_to(folder)]
    if within:
        raise InvalidValueError(
            f"output folder {str(output)!r} and the corpus {str(within[0])!r} lie in each other, and vectors would be read as "
            "text; choose an output folder outside"
        )


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Keep other runs out of the folder: by a lock on a file beside it."""
    digest = hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:8]
    lock = existing_folder(output.parent) / f".{output.name}-{digest}.lock"
    with contextlib.suppress(OSError):
        lock.touch()
    try:
        held = lock_for_writing(lock)
    except StorageError:
        raise StorageError(
            f"another run is writing to {str(output)!r}; choose another folder, or wait until it has ended"
        ) from None
    try:
        yield
    finally:
        if held is not None:
            lock.unlink(missing_ok=True)


def _holds_a_run(path: Path) -> bool:
    return any((path / name).exists() for name in formats.OWN_FILES)


def _clear(folder: Path, checkpoints: Checkpoints) -> None:
    """Remove what an earlier run left in the folder that this one does not go on from, but for its tables."""
    remove_curves(folder / formats.BOARD)
    checkpoints.remove()
    for name in formats.OWN_FOLDERS:
        with contextlib.suppress(OSError):  # it does not exist, or has something else in it
            (folder / name).rmdir()


def _saver(
    trainer: Trainer, shared: SharedVectors | None, corpus: str | list[str], suffix: str, run_folder: Path
) -> Callable[[Path], None]:
    """Return what writes vectors, those of n-grams if any, vocabulary and settings of a run into a folder."""
    vocabulary, ngrams = trainer.corpus.vocabulary, trainer.model.ngram_vectors() if trainer.settings.buckets else None
    matrix: Any = trainer.model.word_vectors().numpy() if shared is None else shared
    settings = trainer.settings.as_dict()
    if trainer.settings.path == run_folder / formats.TABLES:
        settings["path"] = None  # another run with these settings has table files in a folder of its own
    facts: dict[str, Any] = {
        # What the bits of the vectors depend on.
        "versions": {"speedtransfer": __version__} | {name: version_of(name) for name in ("torch", "numpy", "numba")},
        "device": str(trainer.model.input.table.device),
        "threads": torch.get_num_threads(),
        "processes": trainer.processes,
        "corpus": corpus,
        "settings": settings,
        "corpus_words": trainer.corpus.num_raw_words,
        "vocabulary_words": len(vocabulary),
        "steps": trainer.step,
        "of_steps": trainer.num_steps,
        "loss": trainer.loss if math.isfinite(trainer.loss) else None,  # JSON has no nan
        "training_s": round(trainer.elapsed_s, 3),
        "words_per_s": round(trainer.words_per_s),
    }

    def save(folder: Path) -> None:
        path = folder / (formats.VECTORS + suffix)
        formats.find_format(path).write(path, Stored(vocabulary.words, matrix, vocabulary.counts))
        vocabulary.save(folder / formats.VOCABULARY)
        if ngrams is not None:
            ngrams.save(folder / formats.NGRAMS)
        (folder / formats.SETTINGS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    return save


def save_or_rescue(folder: Path, overwrite: bool, save: Callable[[Path], None]) -> None:
    """Have `save` write into `folder`; where that fails, into a new folder for temporary files, which the error names."""
    try:
        _fill(folder, overwrite, save)
    except OSError as error:
        problem = f"cannot write the vectors to {str(folder)!r} ({error.strerror or error})"
        problem = str(error) if isinstance(error, StorageError) else problem
        kept = None
        try:
            kept = tempfile.mkdtemp(prefix="speedtransfer-vectors-")
            save(Path(kept))
        except OSError:
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
            raise StorageError(
                f"{problem}, nor to {tempfile.gettempdir()!r}; make room, and --resume the checkpoint if there is one"
            ) from error
        raise StorageError(f"{problem}; the vectors are in {kept!r} instead") from error


def _fill(folder: Path, overwrite: bool, save: Callable[[Path], None]) -> None:
    """Have `save` write files beside `folder`, and move them into place, where those of an earlier run go."""
    staging = Path(tempfile.mkdtemp(dir=existing_folder(folder.parent), prefix=f".{folder.name}."))
    try:
        save(staging)
        if not overwrite and _holds_a_run(folder):
            raise StorageError(f"another run has filled the folder {str(folder)!r} meanwhile")
        folder.mkdir(parents=True, exist_ok=True)
        written = os.listdir(staging)
        for name in written:
            keep_mode(staging / name, folder / name)
            os.replace(staging / name, folder / name)
        for name in formats.OWN_FILES.difference(written):
            (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _report(trainer: Trainer, folder: Path, suffix: str, show: Callable[[str], None]) -> None:
    to_device, back = trainer.moved_bytes
    each = "" if trainer.processes == 1 else f"{trainer.processes} x "
    show(
        f"{len(trainer.corpus.vocabulary):,} words, {trainer.num_steps:,} steps of {each}{trainer.block_words:,} words "
        f"(epochs: {trainer.epochs}), {trainer.elapsed_s:.1f} s of training, "
        f"{trainer.words_per_s:,.0f} words/s, loss {trainer.loss:.4g}; rows moved: {format_bytes(to_device)} in, "
        f"{format_bytes(back)} out"
    )
    show(printable(f"vectors: {folder / (formats.VECTORS + suffix)}"))
    if trainer.settings.buckets:
        show(printable(f"n-grams: {folder / formats.NGRAMS}, for words outside the vocabulary"))


def run_demo(output: Path, overwrite: bool = False, settings: Settings | None = None, show: Any = print) -> int | None:
    """Train on the World Factbook (CIA, public domain, CC0), and write vectors and a picture; otherwise as `train_into`."""
    settings = settings or Settings(dim=64, epochs=25)  # a small corpus: many passes
    with resources.as_file(resources.files(__package__).joinpath("corpora", "world_factbook.words.txt.gz")) as corpus:
        stop_signal = train_into(output, str(corpus), settings, overwrite=overwrite, show=show)
    vectors, picture = Vectors.load(output), str(output / formats.PICTURE)
    for word in ("france", "coffee", "copper", "river", "march", "navy"):
        if word in vectors:
            show(f"  {word:8} -> {', '.join(near for near, _ in vectors.most_similar(word, 6))}")
    try:
        plot(vectors, picture)
    except MissingPackageError as error:
        picture = f"none ({error})"
    show(printable(f"picture: {picture}"))
    show(printable(f"next: {program()} word2vec analogy {shlex.quote(str(output))} china chinese france"))
    return stop_signal
