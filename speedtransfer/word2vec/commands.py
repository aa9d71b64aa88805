"""The commands ``speedtransfer word2vec train | demo | ...``: options, files of settings and output, no logic.

What needs torch is imported when a command runs: ``--help`` answers without it.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.untrusted import parse_json
from speedtransfer.word2vec import commands_vectors
from speedtransfer.word2vec.settings import SETTINGS, Settings, check_setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_BYTES = 1 << 20  # of a file of settings

app = typer.Typer(
    help="Word vectors: train, evaluate and explore them.", no_args_is_help=True, pretty_exceptions_enable=False
)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in the TOML file at `path`, or of a ``.json`` file its object "settings", each checked by itself."""
    from speedtransfer.word2vec.formats_text import reading

    path = Path(path)
    where, checked, is_json = f"config {str(path)!r}", {}, path.suffix == ".json"
    with reading(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidValueError(f"{where} has over {_MOST_BYTES} bytes; pass a TOML file of settings")
    try:
        found = dict(parse_json(data)["settings"] if is_json else tomllib.loads(data.decode("utf-8-sig")))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = 'no JSON with an object "settings"' if is_json else "no TOML"
        raise InvalidValueError(f"{where} is {what}: {error}; pass TOML, or the settings.json of a run") from None
    for name, value in found.items():
        if name not in SETTINGS:
            raise InvalidValueError(f"{where} has {name!r}, not a setting{suggest(name, SETTINGS)}")
        try:
            checked[name] = check_setting(name, value)
        except (InvalidTypeError, InvalidValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    return checked


def described(name: str) -> str | None:
    """Return the description of a setting from the docstring of `Settings`; None where there are no docstrings (``-OO``)."""
    found = re.search(rf"^{name} : .*\n((?:    .*\n)+)", inspect.cleandoc(Settings.__doc__ or ""), re.MULTILINE)
    return " ".join(found[1].split()).replace("`", "") if found else None


def _folder(text: str) -> Path:
    """Return the path of a folder; of an empty text, as of a variable of the shell without a value, that would be this one."""
    if not text:
        raise InvalidValueError("output is empty; pass the path of a folder, . for this one")
    return Path(text)


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    """Turn ``["momentum=0.9", "betas=[0.9,0.98]"]`` into arguments of an optimizer: values of JSON or Python, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise InvalidValueError(f"option {pair!r} is no name=value; pass for instance --option momentum=0.9")
        options[name] = text
        for read in (ast.literal_eval, json.loads):
            with contextlib.suppress(ValueError, SyntaxError):
                options[name] = read(text)
    return options


_SHELL_TYPES: dict[str, Any] = {"path": Path | None, "vocabulary": Path | None, "device": str | None}
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")]


def _with_settings(function: Any) -> Any:
    """Show typer each setting in place of ``**flags``, but for `options`, which come as pairs."""
    *own, _ = inspect.signature(function, eval_str=True).parameters.values()
    by_name, shown = inspect.Parameter.KEYWORD_ONLY, []
    for name, kind in get_type_hints(Settings).items():
        default, about = SETTINGS[name].default, SETTINGS[name].metadata
        shown_type = str if about["choices"] else _SHELL_TYPES.get(name, kind)
        option = typer.Option(
            help=described(name),
            metavar="|".join(about["choices"]) or None,
            show_default=about["none"] or default is not None,
            rich_help_panel=about["panel"],
        )
        if name != "options":
            shown.append(inspect.Parameter(name, by_name, default=default, annotation=Annotated[shown_type, option]))
    shown += [parameter.replace(kind=by_name) for parameter in own]
    function.__signature__ = inspect.Signature(shown)
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


_CORPUS = "Text files (.gz, .xz, .parquet too), folders of them, or - for standard input."
_OUTPUT = "Folder of the run: vectors, vocabulary, settings, checkpoint."
_CONFIG = "TOML file of settings, or the settings.json of a run; flags win over it."
_RESUME = "Start the run in the output folder, or resume it; saves a checkpoint every epoch."
_OPTION = "Optimizer argument, name=value; repeatable."
_EVALUATE = "Similarity or analogy set to evaluate on during training; repeatable."
_FORMAT = "Format of the vectors: txt, vec, bin, safetensors, glove or kv."


@app.command()
@_with_settings
def train(
    ctx: typer.Context,
    corpus: Annotated[list[str], typer.Argument(metavar="CORPUS...", help=_CORPUS)],
    output: Annotated[Path, typer.Option("-o", "--output", help=_OUTPUT, parser=_folder, metavar="<path>")],
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
        output, corpus[0] if len(corpus) == 1 else corpus, settings, format, resume=resume, overwrite=overwrite,
        curves=curves, quiet=quiet, show=typer.echo, checkpoint_every=checkpoint_every, evaluate=evaluate or [],
        evaluate_every=evaluate_every,
    )  # fmt: skip
    _exit_after(stop_signal)


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the run.", parser=_folder, metavar="<path>")
    ],
    overwrite: _Overwrite = False,
) -> None:
    """Train on the World Factbook, which comes with the package: one or two minutes on two cores."""
    from speedtransfer.word2vec.run_folder import run_demo

    _exit_after(run_demo(output, overwrite, show=typer.echo))


def _exit_after(stop_signal: int | None) -> None:
    if stop_signal is not None:
        # The convention of shells. typer.Exit(130) would be reported as an abort, which it is not.
        raise SystemExit(128 + stop_signal)


for _command in commands_vectors.COMMANDS:
    app.command()(_command)
