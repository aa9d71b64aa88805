"""The commands ``speedtransfer word2vec evaluate | nearest | analogy | plot | convert``: for trained vectors.

What needs torch is imported when a command runs: ``--help`` answers without it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speedtransfer import word2vec  # imports its parts when they are used
from speedtransfer.errors import InvalidValueError, printable

if TYPE_CHECKING:
    import numpy as np


_SHOW_UNKNOWN = 20

_Vectors = Annotated[
    Path, typer.Argument(metavar="VECTORS", help="Vector file, or the folder that train wrote.", show_default=False)
]
_WORDS = "Draw these words, separated by commas, and their neighbours."
_TARGET = "Ends in .txt, .vec, .bin, .safetensors, .glove or .kv."
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


def _unseen(path: Path, words: list[str], known: word2vec.Vectors) -> dict[str, np.ndarray]:
    """Return the vectors of those of `words` that only have n-grams; raise one `UnknownWordError` for all without a vector."""
    from speedtransfer.word2vec.formats import NGRAMS, find_vectors

    file, found = find_vectors(path).with_name(NGRAMS), {}
    ngrams = word2vec.NgramVectors.load(file) if file.exists() else None
    for word in words:
        if ngrams is not None and word not in known:
            with contextlib.suppress(word2vec.UnknownWordError):  # too short to have n-grams
                found[word] = ngrams[word]
    known[[word for word in words if word not in found]]
    return found


def _check_new(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise InvalidValueError(f"{str(path)!r} is a folder; pass the name of a file in it")
    if path.exists() and not overwrite:
        raise InvalidValueError(f"{str(path)!r} exists; choose another name or pass --overwrite")


def evaluate(
    vectors: _Vectors,
    sets: Annotated[
        list[Path],
        typer.Argument(metavar="SETS...", help="Files of scored word pairs or of analogies.", show_default=False),
    ],
    restrict: Annotated[int, typer.Option(min=1, help="Only the first N words.")] = 300_000,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.", show_default=False)
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Evaluate vectors on similarity and analogy sets; the results are those of gensim's evaluators."""
    from rich.console import Console

    from speedtransfer.system import replace_file
    from speedtransfer.text_table import text_table

    if json_file is not None:
        _check_new(json_file, overwrite)
    loaded = [word2vec.load_set(path) for path in sets]  # malformed sets raise before vectors are read
    known = word2vec.Vectors.load(vectors)
    results = [word2vec.evaluate(known, one, restrict) for one in loaded]
    if json_file is not None:
        facts = {"vectors": str(vectors), "restrict": restrict, "sets": [result.as_dict() for result in results]}
        with replace_file(json_file) as file:
            # A byte of a path that is no UTF-8 is escaped as JSON escapes it.
            file.write((json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    pairs = [result for result in results if isinstance(result, word2vec.Similarity)]
    if pairs:
        rows = [
            (one.name, f"{one.num_pairs:,}", f"{one.num_unknown:,} ({one.oov_ratio:.1f}%)", f"{one.spearman:.4f}",
             "{:.3f} to {:.3f}".format(*one.interval), f"{one.pearson:.4f}") for one in pairs
        ]  # fmt: skip
        columns = "similarity set", "pairs", "left out", "Spearman", "95% interval", "Pearson"
        console.print(text_table(columns, rows))
    for result in results:
        if isinstance(result, word2vec.Analogies):
            parts = list[tuple[str, ...]]()
            for part in (*result.sections, result.semantic, result.syntactic, result.total):
                shown = "-" if part.accuracy is None else f"{part.accuracy:.4f}"
                interval = "-" if part.accuracy is None else "{:.3f} to {:.3f}".format(*part.interval)
                parts.append((part.name, f"{len(part.correct):,}", f"{part.num_questions:,}", shown, interval))
            parts.append(("left out", "", f"{result.num_unknown:,}", f"({result.oov_ratio:.1f}%)", ""))
            console.print(text_table((result.name, "correct", "questions", "accuracy", "95% interval"), parts))
    for result in results:
        if unknown := result.unknown_words:
            more = f" and {len(unknown) - _SHOW_UNKNOWN} more" if len(unknown) > _SHOW_UNKNOWN else ""
            words = ", ".join(unknown[:_SHOW_UNKNOWN])
            typer.echo(printable(f"{result.name}: {len(unknown)} unknown words: {words}{more}"))


def nearest(
    vectors: _Vectors,
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words to look up.", show_default=False)],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of neighbours.")] = 10,
) -> None:
    """Show the words nearest to each WORD, with their cosines; of a run with --buckets, WORD may be any.

    A word that the corpus did not have gets its vector from its character n-grams.
    """
    loaded = word2vec.Vectors.load(vectors)
    unseen = _unseen(vectors, words, loaded)
    for word in words:
        typer.echo(printable(f"{word}: {_listed(loaded.most_similar(unseen.get(word, word), number))}"))


def _listed(found: list[tuple[str, float]]) -> str:
    return ", ".join(f"{near} {cosine:.3f}" for near, cosine in found)


def analogy(
    vectors: _Vectors,
    a: Annotated[str, typer.Argument(metavar="A", help="for instance man", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="for instance king", show_default=False)],
    c: Annotated[str, typer.Argument(metavar="C", help="for instance woman", show_default=False)],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of answers.")] = 10,
) -> None:
    """A is to B as C is to what? Show the nearest answers, with their cosines."""
    loaded = word2vec.Vectors.load(vectors)
    typer.echo(printable(f"{a} : {b} = {c} : {_listed(loaded.analogy(a, b, c, number))}"))


def plot(
    vectors: _Vectors,
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture, .png.", show_default=False)],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Draw the first N words of the file.")] = 200,
    words: Annotated[str | None, typer.Option(help=_WORDS, show_default="frequent words")] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Draw words as a map: words with similar vectors are close together."""
    from speedtransfer.word2vec.plot import plot as draw

    _check_new(output, overwrite)
    given = None if words is None else [word.strip() for word in words.split(",") if word.strip()]
    draw(word2vec.Vectors.load(vectors), output, number, words=given)
    typer.echo(printable(f"picture: {output}"))


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Vector file, or the folder that train wrote.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help=_TARGET)],
    max_words: Annotated[int | None, typer.Option(min=1, help="Only the first N words.", show_default="all")] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Write vectors in another format: word2vec text or binary, safetensors, GloVe text, gensim KeyedVectors.

    Also reads .txt.gz, .vec.gz, .glove.gz and .bin.gz. A .kv file is a pickle: read only those that you trust.
    """
    from speedtransfer.word2vec.formats import find_format

    find_format(target)
    _check_new(target, overwrite)
    loaded = word2vec.Vectors.load(source, max_words)
    loaded.save(target)
    typer.echo(printable(f"{len(loaded):,} words, dim {loaded.dim}: {target}"))


COMMANDS = evaluate, nearest, analogy, plot, convert
