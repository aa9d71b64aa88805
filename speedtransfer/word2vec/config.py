"""Settings in a file: TOML by their names, or the `settings.json` that a run left behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, suggest
from speedtransfer.word2vec.settings import SETTINGS, check_setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings that the file at `path` names, each checked by itself.

    A TOML file holds names of :class:`Settings` and their values; `options` is a table. A file that ends in ``.json`` is the
    ``settings.json`` of a run, whose object "settings" is meant.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    dict
        Arguments for :class:`Settings`; what the file leaves out is left out.

    Raises
    ------
    InvalidValueError
        The file is no TOML (or JSON), names a setting that does not exist, or a value breaks the rule of its setting.
    InvalidTypeError
        A value has another type than its setting.
    StorageError
        The file cannot be read.
    """
    path = Path(path)
    values = _parse(path)
    for name in values:
        if name not in SETTINGS:
            raise InvalidValueError(f"config {str(path)!r} has {name!r}, not a setting{suggest(name, SETTINGS)}")
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = check_setting(name, value)
        except InvalidTypeError as error:
            raise InvalidTypeError(f"config {str(path)!r}: {error}") from None
        except InvalidValueError as error:
            raise InvalidValueError(f"config {str(path)!r}: {error}") from None
    return checked


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise StorageError(f"cannot read config {str(path)!r} ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"config {str(path)!r} is no UTF-8 text ({error}); pass a TOML file") from None
    if path.suffix != ".json":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidValueError(f"config {str(path)!r} is no TOML: {error}; fix it") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"config {str(path)!r} is no JSON: {error}; pass the settings.json of a run") from None
    settings = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise InvalidValueError(
            f'config {str(path)!r} has no object "settings"; pass the settings.json of a run, or TOML'
        )
    return settings
