"""What a benchmark needs beside this repository: data and packages."""

from __future__ import annotations

import importlib.util


class DataError(ValueError):
    """Data or a package are not there, or not as they must be; the message says what to do."""


def require(*modules: str) -> None:
    """Raise `DataError` where a package is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package = {"sklearn": "scikit-learn"}.get(module, module)
            raise DataError(f"this benchmark needs {package}, which is not installed; run: pip install {package}")
