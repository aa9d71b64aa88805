"""The commands ``speedtransfer word2vec train | demo | ...``: options and output, no logic.

What needs torch is imported when a command runs: ``--help`` answers without it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec import commands_vectors
from speedtransfer.word2vec.config import described, read_config
from speedtransfer.word2vec.settings import SETTINGS, Settings

app = typer.Typer(
    help="Word vectors: train, evaluate and explore them.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    """Turn ``["momentum=0.9", "betas=0.9,0.98"]`` into arguments of an optimizer: values are JSON, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise InvalidValueError(f"option {pair!r} is no name=value; pass for instance --option momentum=0.9")
        options[name] = text
        for written in (text, f"[{text}]"):  # numbers with commas between them are a list
            with contextlib.suppress(json.JSONDecodeError):
                options[name] = json.loads(written)
                break
    return options


_SHELL_TYPES: dict[str, Any] = {"path": Path | None, "device": str | None}
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")]
# The groups of `train --help` after the first one, in this order.
_PANELS = ["Corpus", "Model", "Training", "Optimizer", "Memory", "Evaluation", "Output"]


class _InGroups(TyperCommand):
    """A command whose help has the groups of `_PANELS`."""

    def get_params(self, ctx: Any) -> list[Any]:
        order = [None, *_PANELS]
        return sorted(super().get_params(ctx), key=lambda param: order.index(getattr(param, "rich_help_panel", None)))


def _as_option(name: str, kind: Any) -> Any:
    """Return how typer takes a setting."""
    about = SETTINGS[name].metadata
    choices = about["choices"]
    return Annotated[
        str if choices else _SHELL_TYPES.get(name, kind),
        typer.Option(
            help=described(name),
            metavar="|".join(choices) or None,
            show_default=about["none"] or SETTINGS[name].default is not None,
            rich_help_panel=about["panel"],
        ),
    ]


def _with_settings(function: Any) -> Any:
    """Show typer each setting in place of ``**flags``, but for `options`, which come as pairs."""
    signature = inspect.signature(function, eval_str=True)
    *shown, _ = signature.parameters.values()
    for name, kind in get_type_hints(Settings).items():
        if name != "options":
            option, default = _as_option(name, kind), SETTINGS[name].default
            shown.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option))
    function.__signature__ = signature.replace(parameters=shown)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return function


def _read_settings(
    ctx: typer.Context, config: Path | None, options: list[str], flags: dict[str, Any], output: Path
) -> Settings:
    """Return the settings: flags that were given win over the file, and the file over the defaults.

    Table files have their place in the folder `output`, unless another is named.
    """
    values = {} if config is None else read_config(config)
    for name, value in flags.items():
        source = ctx.get_parameter_source(name)
        if source is None or not source.name.startswith("DEFAULT"):
            values[name] = value
    if values.get("memory") == "mmap" and values.get("path") is None:
        from speedtransfer.word2vec.formats import TABLES

        values["path"] = output / TABLES
    values["options"] = {**(values.get("options") or {}), **_parse_options(options)}
    return Settings(**values)


_CORPUS = "Text file (.gz and .xz too), folder of them, or - for standard input."
_OUTPUT = "Folder of the run: vectors, vocabulary, settings, checkpoint."
_CONFIG = "TOML file of settings, or the settings.json of a run; flags win over it."
_RESUME = "Start the run in the output folder, or resume it; saves a checkpoint every epoch."
_OPTION = "Optimizer argument, name=value; repeatable."
_EVALUATE = "Similarity or analogy set to evaluate on during training; repeatable."
_FORMAT = "Format of the vectors: txt, vec, bin, safetensors, glove or kv."


@app.command(cls=_InGroups)
@_with_settings
def train(
    ctx: typer.Context,
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help=_CORPUS)],
    output: Annotated[Path, typer.Option("-o", "--output", help=_OUTPUT)],
    config: Annotated[Path | None, typer.Option(help=_CONFIG)] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    overwrite: _Overwrite = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    option: Annotated[list[str] | None, typer.Option(help=_OPTION, rich_help_panel="Optimizer")] = None,
    evaluate: Annotated[list[Path] | None, typer.Option(help=_EVALUATE, rich_help_panel="Evaluation")] = None,
    evaluate_every: Annotated[
        float, typer.Option(help="Epochs between evaluations.", rich_help_panel="Evaluation")
    ] = 1.0,
    format: Annotated[str, typer.Option(help=_FORMAT, rich_help_panel="Output")] = "txt",
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between checkpoints.",
            show_default="an epoch with --resume, else at Ctrl-C and SIGTERM",
            rich_help_panel="Output",
        ),
    ] = None,
    curves: Annotated[
        bool,
        typer.Option("--curves", help="Write TensorBoard's curves into the output folder.", rich_help_panel="Output"),
    ] = False,
    **flags: Any,
) -> None:
    """Train vectors on a corpus. Ctrl-C and SIGTERM stop early and save the vectors so far (exit codes 130 and 143).

    All files of the run are in the output folder. The same command with --resume goes on after a stop or a crash.
    """
    from speedtransfer.word2vec.run_folder import train_into

    settings = _read_settings(ctx, config, option or [], flags, output)
    stop_signal = train_into(
        output, corpus, settings, format, resume=resume, overwrite=overwrite, curves=curves, quiet=quiet, show=typer.echo,
        checkpoint_every=checkpoint_every, evaluate=evaluate or [], evaluate_every=evaluate_every,
    )  # fmt: skip
    _exit_after(stop_signal)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run.")], overwrite: _Overwrite = False
) -> None:
    """Train on the World Factbook, which comes with the package: one or two minutes on two cores."""
    from speedtransfer.word2vec.run_folder import run_demo

    _exit_after(run_demo(output, overwrite, show=typer.echo))


def _exit_after(stop_signal: int | None) -> None:
    if stop_signal is not None:
        # The convention of shells. typer.Exit(130) would be reported as an abort, which it is not.
        raise SystemExit(128 + stop_signal)


commands_vectors.register(app)
