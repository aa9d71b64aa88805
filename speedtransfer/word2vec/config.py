"""Settings from keyword arguments, TOML files and the `settings.json` of a run."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypedDict

from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.untrusted import parse_json
from speedtransfer.word2vec.settings import SETTINGS, Kind, Memory, Model, Settings, check_setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_MOST_BYTES = 1 << 20
# What gensim's Word2Vec calls settings that are here too.
_OF_GENSIM = {"vector_size": "dim", "sg": "model", "alpha": "lr", "max_final_vocab": "max_words"}


class CorpusSettings(TypedDict, total=False):
    """For type checkers: the settings that :class:`Corpus` takes by name only."""

    kind: Kind
    phrases: int
    phrase_threshold: float
    walks: int
    walk_length: int
    p: float
    q: float
    seed: int


class TrainingSettings(CorpusSettings, total=False):
    """For type checkers: the settings that `train` takes by name only."""

    clip: float | None
    options: Mapping[str, Any] | None
    model: Model
    epochs: int | None
    window: int
    negative: int
    sample: float
    buckets: int
    min_n: int
    max_n: int
    block_words: int | None
    shared_negatives: int | None
    memory: Memory
    path: str | os.PathLike[str] | None
    device: Any


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in the file at `path`, each checked by itself: arguments for :class:`Settings`.

    A TOML file holds names of :class:`Settings` and their values; `options` is a table. Of a file that ends in ``.json``, the
    ``settings.json`` of a run, the object "settings" is read.
    """
    path = Path(path)
    where = f"config {str(path)!r}"
    checked = {}
    for name, value in _parse(path, where).items():
        if name not in SETTINGS:
            raise InvalidValueError(f"{where} has {name!r}, not a setting{suggest(name, SETTINGS)}")
        try:
            checked[name] = check_setting(name, value)
        except (InvalidTypeError, InvalidValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    return checked


def _parse(path: Path, where: str) -> dict[str, Any]:
    from speedtransfer.word2vec.formats_text import reading

    with reading(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidValueError(f"{where} has over {_MOST_BYTES} bytes; pass a TOML file of settings")
    if path.suffix != ".json":
        try:
            return tomllib.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"{where} is no TOML: {error}; fix it") from None
    try:
        content = parse_json(data)
    except ValueError as error:
        raise InvalidValueError(f"{where} is no JSON: {error}; pass the settings.json of a run") from None
    settings = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise InvalidValueError(f'{where} has no object "settings"; pass the settings.json of a run, or TOML')
    return settings


def settings_of(names: Collection[str], given: Mapping[str, Any], **more: Any) -> Settings:
    """Return the settings `given` to what takes `names`, and `more`; raise InvalidTypeError for one not in `names`."""
    for name in given:
        if name not in names:
            here = f"; gensim's {name!r} is {_OF_GENSIM[name]!r} here" if name in _OF_GENSIM else suggest(name, names)
            raise InvalidTypeError(f"got an unexpected keyword argument {name!r}{here}")
    return Settings(**given, **more)


def described(name: str) -> str | None:
    """Return the description of a setting from the docstring of `Settings`; None where there are no docstrings (``-OO``)."""
    found = re.search(rf"^{name} : .*\n((?:    .*\n)+)", inspect.cleandoc(Settings.__doc__ or ""), re.MULTILINE)
    return " ".join(found[1].split()).replace("`", "") if found else None
