"""Functions that take every setting: said once, in `Settings`, and shown in each signature and on the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from speedtransfer.word2vec.settings import SETTINGS, Settings

Function = TypeVar("Function", bound=Callable[..., Any])


def shows_settings(annotate: Callable[[str, Any], Any] = lambda name, kind: kind) -> Callable[[Function], Function]:
    """Return a decorator for a function with ``**settings``: its signature names each setting it does not name itself.

    So ``help``, notebooks and typer, which look at the signature while the program runs, see names, types and defaults.

    Parameters
    ----------
    annotate : callable
        Takes name and type of a setting and returns its annotation, or None to leave it out.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        shown = {n: p for n, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        kinds = get_type_hints(Settings)
        for name, field in SETTINGS.items():
            annotation = None if name in shown else annotate(name, kinds[name])
            if annotation is not None:
                shown[name] = inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
                )
        signature = signature.replace(parameters=list(shown.values()))
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__annotations__ = {n: p.annotation for n, p in shown.items()} | {"return": signature.return_annotation}
        return function

    return decorate


def described(name: str) -> str | None:
    """Return what the docstring of `Settings` says of a setting; None where Python dropped docstrings (``-OO``)."""
    found = re.search(rf"^{name} : .*\n((?:    .*\n)+)", inspect.cleandoc(Settings.__doc__ or ""), re.MULTILINE)
    return " ".join(found[1].split()).replace("`", "") if found else None
