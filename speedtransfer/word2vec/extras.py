"""Packages that only some features need: imported where they are used, with a clear message where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from speedtransfer.errors import SpeedtransferError


class MissingPackageError(SpeedtransferError, ImportError):
    """A package that only this feature needs is not installed."""


def import_extra(module: str, purpose: str, install: str) -> Any:
    """Return the module called `module`.

    Parameters
    ----------
    module : str
        Full name; its first part is what the message names.
    purpose : str
        What needs it, in the plural, for the message.
    install : str
        What ``pip install`` takes.

    Raises
    ------
    MissingPackageError
        It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"{purpose} need {package}, which is not installed; run: pip install {install}"
        ) from error
