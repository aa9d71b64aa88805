"""The commands ``speedtransfer word2vec train | demo | ...``: options in, a few lines out, no logic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from speedtransfer.errors import InvalidValueError, format_bytes
from speedtransfer.word2vec import commands_vectors
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.demo import run_demo
from speedtransfer.word2vec.output import VECTORS, OutputFolder, check_format, save_run
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.text import find_files
from speedtransfer.word2vec.trainer import Trainer

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended, as shells have it

app = typer.Typer(
    help="Word vectors: train them on text, look at them.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    """Turn ``["momentum=0.9", "betas=[0.9, 0.98]"]`` into arguments of an optimizer: values are JSON, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise InvalidValueError(f"option {pair!r} is no name=value; pass for instance --option momentum=0.9")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


@app.command()
def train(
    corpus: Annotated[
        str,
        typer.Argument(metavar="CORPUS", help="Text file (.gz and .xz too), folder of them, or - for standard input."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for vectors, vocabulary and settings.")],
    dim: Annotated[int, typer.Option(help="Numbers in a vector.")] = Settings.dim,
    optimizer: Annotated[str, typer.Option(help="Any row-by-row optimizer of torch.optim.")] = Settings.optimizer,
    lr: Annotated[float | None, typer.Option(help="First learning rate.", show_default="the optimizer's")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Optimizer argument, name=value.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the corpus.")] = Settings.epochs,
    window: Annotated[int, typer.Option(help="Largest window to each side.")] = Settings.window,
    negative: Annotated[int, typer.Option(help="Negatives a pair.")] = Settings.negative,
    min_count: Annotated[int, typer.Option(help="Leave out words that occur less often.")] = Settings.min_count,
    max_words: Annotated[int | None, typer.Option(help="Keep so many frequent words.", show_default="all")] = None,
    sample: Annotated[float, typer.Option(help="Threshold of subsampling; 0 for none.")] = Settings.sample,
    block_words: Annotated[int, typer.Option(help="Words a step.")] = Settings.block_words,
    shared_negatives: Annotated[int, typer.Option(help="Negatives drawn a step.")] = Settings.shared_negatives,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = Settings.seed,
    memory: Annotated[str, typer.Option(help="auto, pinned, pageable, mmap or device.")] = Settings.memory,
    path: Annotated[
        Path | None, typer.Option(help="Folder for the tables of --memory mmap.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="Compute device.", show_default="cuda if there is one")] = None,
    format: Annotated[str, typer.Option(help="Of the vectors: txt, vec, bin or safetensors.")] = "txt",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train vectors on a corpus. Ctrl-C stops early and saves what there is (exit code 130)."""
    settings = Settings(
        dim=dim, optimizer=optimizer, lr=lr, options=_parse_options(option or []), epochs=epochs, window=window,
        negative=negative, min_count=min_count, max_words=max_words, sample=sample, block_words=block_words,
        shared_negatives=shared_negatives, seed=seed, memory=memory, path=path, device=device,
    )  # fmt: skip
    suffix = check_format(format)
    folder = OutputFolder(output, overwrite, remedy=" or pass --overwrite")
    if corpus != "-":
        find_files(corpus)
    with folder:
        with TrainingProgress(not quiet) as progress:
            trainer = Trainer(Corpus(corpus, min_count, max_words, progress.reading), settings)
            trainer.run(progress)
        save_run(folder.staging, trainer, corpus, suffix)
        folder.commit()
    to_device, back = trainer.moved_bytes
    typer.echo(
        f"{len(trainer.corpus.vocabulary):,} words, {trainer.elapsed_s:.1f} s of training, "
        f"{trainer.words_per_s:,.0f} words/s, loss {trainer.loss:.3f}; rows moved: {format_bytes(to_device)} in, "
        f"{format_bytes(back)} out"
    )
    typer.echo(f"vectors: {folder.path / (VECTORS + suffix)}")
    if trainer.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder; files of an earlier demo are replaced.")],
) -> None:
    """Train on the World Factbook, which comes with the package: one or two minutes on two cores."""
    if run_demo(output, show=typer.echo).interrupted:
        raise typer.Exit(INTERRUPTED)


commands_vectors.register(app)
