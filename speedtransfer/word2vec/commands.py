"""The commands ``speedtransfer word2vec train | demo | ...``: options in, a few lines out, no logic.

What needs torch is imported when a command runs: ``--help`` answers without it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from speedtransfer.errors import InvalidValueError, format_bytes
from speedtransfer.word2vec import commands_vectors
from speedtransfer.word2vec.config import read_config
from speedtransfer.word2vec.settings import SETTINGS, Settings
from speedtransfer.word2vec.signature import described, shows_settings

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


_SHELL_TYPES: dict[str, Any] = {"path": Path | None, "device": str | None}
_NONE_MEANS = {
    "lr": "the optimizer's",
    "epochs": "chosen from the corpus; 5 ordinarily",
    "block_words": "chosen from the corpus; 16384 ordinarily",
    "max_words": "all",
    "device": "cuda if there is one",
}
# The groups of `train --help` after the first one, in this order, with the settings in each.
_PANELS = {
    "Corpus": ("kind", "min_count", "max_words", "phrases", "phrase_threshold", "walks", "walk_length", "p", "q"),
    "Model": ("model", "dim", "window", "negative", "buckets", "min_n", "max_n"),
    "Training": ("epochs", "sample", "block_words", "shared_negatives", "seed"),
    "Optimizer": ("optimizer", "lr", "clip"),
    "Memory": ("memory", "path", "device"),
    "Evaluation": (),
    "Output": (),
}


class _InGroups(TyperCommand):
    """A command whose help has the groups of `_PANELS`."""

    def get_params(self, ctx: Any) -> list[Any]:
        order = [None, *_PANELS]
        return sorted(super().get_params(ctx), key=lambda param: order.index(getattr(param, "rich_help_panel", None)))


def _as_option(name: str, kind: Any) -> Any:
    """Return how typer takes a setting; `options` comes as pairs."""
    if name == "options":
        return None
    return Annotated[
        _SHELL_TYPES.get(name, kind),
        typer.Option(
            help=described(name),
            metavar="|".join(SETTINGS[name].metadata.get("choices", ())) or None,
            show_default=_NONE_MEANS.get(name, SETTINGS[name].default is not None),
            rich_help_panel=next(panel for panel, names in _PANELS.items() if name in names),
        ),
    ]


def _read_settings(ctx: typer.Context, config: Path | None, options: list[str], flags: dict[str, Any]) -> Settings:
    """Return the settings: flags that were given win over the file, and the file over the defaults."""
    values = {} if config is None else read_config(config)
    for name, value in flags.items():
        source = ctx.get_parameter_source(name)
        if source is None or not source.name.startswith("DEFAULT"):
            values[name] = value
    values["options"] = {**(values.get("options") or {}), **_parse_options(options)}
    return Settings(**values)


@app.command(cls=_InGroups)
@shows_settings(_as_option)
def train(
    ctx: typer.Context,
    corpus: Annotated[
        str,
        typer.Argument(metavar="CORPUS", help="Text file (.gz and .xz too), folder of them, or - for standard input."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for vectors, vocabulary and settings.")],
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings, or the settings.json of a run; flags win over it.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Optimizer argument, name=value; repeatable.", rich_help_panel="Optimizer"),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder to save the state of training in; at Ctrl-C, SIGTERM and the end, too.")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between saves.", show_default="an epoch")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the checkpoint, if there is one, with the same settings."),
    ] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard: curves, frequent words.")] = None,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option(
            help="Similarity or analogy set to evaluate on during training; repeatable.", rich_help_panel="Evaluation"
        ),
    ] = None,
    evaluate_every: Annotated[
        float, typer.Option(help="Epochs between evaluations.", rich_help_panel="Evaluation")
    ] = 1.0,
    format: Annotated[
        str,
        typer.Option(help="Format of the vectors: txt, vec, bin, safetensors, glove or kv.", rich_help_panel="Output"),
    ] = "txt",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    **flags: Any,
) -> None:
    """Train vectors on a corpus. Ctrl-C and SIGTERM stop early and save what there is (exit codes 130 and 143)."""
    from speedtransfer.cuda import resolve_device
    from speedtransfer.ranks import is_first, joined
    from speedtransfer.word2vec.output import VECTORS, OutputFolder, check_apart, check_format
    from speedtransfer.word2vec.progress import TrainingProgress
    from speedtransfer.word2vec.rescue import save_or_rescue, warn_of_little_room
    from speedtransfer.word2vec.run import Run, Watching
    from speedtransfer.word2vec.stopping import StopOnSignal
    from speedtransfer.word2vec.tablefiles import table_files
    from speedtransfer.word2vec.text import find_files
    from speedtransfer.word2vec.trainer import Trainer

    settings = _read_settings(ctx, config, option or [], flags)
    suffix = check_format(format)
    if checkpoint is not None:
        check_apart("output", output, checkpoint)
    folder = OutputFolder(
        output,
        overwrite or resume,
        remedy=" or pass --overwrite",
        only_own=resume and not overwrite,  # the run that is resumed has left its files there when it was interrupted
        within=[path for path in (checkpoint, tensorboard) if path is not None] + table_files(settings.path),
    )
    run = Run(
        settings,
        Watching(checkpoint, checkpoint_every, resume, tensorboard, evaluate or [], evaluate_every, overwrite),
    )
    if resume and not run.resumes and not overwrite and folder.holds_a_run:
        raise InvalidValueError(
            f"output folder {str(output)!r} holds a run but there is no checkpoint in {str(checkpoint)!r} to resume; check "
            "the path of the checkpoint, or pass --overwrite to begin anew"
        )
    if corpus != "-":
        find_files(corpus)
    with folder, ExitStack() as saving:
        others = saving.enter_context(joined(resolve_device(settings.device)))
        if others is not None and (tensorboard is not None or settings.path is not None):
            raise InvalidValueError("tensorboard and path are for one process; leave them out with torchrun")
        stop = StopOnSignal()

        def begin(trainer: Trainer) -> None:
            # From the first step until all is saved a signal ends nothing but training.
            saving.enter_context(stop)
            if is_first():
                warn_of_little_room(folder, trainer, suffix, progress.say)

        with TrainingProgress(not quiet and is_first()) as progress:
            trainer = run.train(corpus, progress, begin)
        # All processes have some of the vectors, one writes them.
        trainer.keep_vectors()
        first = is_first()
        if first:
            save_or_rescue(folder, trainer, corpus, suffix)
    if not first:
        _exit_after(stop.requested)
        return
    to_device, back = trainer.moved_bytes
    typer.echo(
        f"{len(trainer.corpus.vocabulary):,} words, {trainer.num_steps:,} steps of {trainer.block_words:,} words (epochs: "
        f"{trainer.epochs}), {trainer.elapsed_s:.1f} s of training, "
        f"{trainer.words_per_s:,.0f} words/s, loss {trainer.loss:.3f}; rows moved: {format_bytes(to_device)} in, "
        f"{format_bytes(back)} out"
    )
    typer.echo(f"vectors: {folder.path / (VECTORS + suffix)}")
    _exit_after(stop.requested)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder; files of an earlier demo are replaced.")],
) -> None:
    """Train on the World Factbook, which comes with the package: one or two minutes on two cores."""
    from speedtransfer.word2vec.demo import run_demo

    _exit_after(run_demo(output, show=typer.echo).stop_signal)


def _exit_after(stop_signal: int | None) -> None:
    if stop_signal is not None:
        from speedtransfer.word2vec.stopping import exit_code

        raise SystemExit(exit_code(stop_signal))  # typer.Exit(130) would be reported as an abort, and this is none


commands_vectors.register(app)
