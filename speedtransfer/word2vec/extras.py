"""Optional packages: imported where they are used, with a clear message where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from speedtransfer.errors import SpeedtransferError


class MissingPackageError(SpeedtransferError, ImportError):
    """A package that only this feature needs is not installed."""


def import_extra(module: str, purpose: str, install: str) -> Any:
    """Import `module`, or raise `MissingPackageError`: `purpose`, in the plural, need it; pip installs it by `install`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"{purpose} need {package}, which is not installed; run: pip install {install}"
        ) from error
