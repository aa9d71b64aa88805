"""The one place that states the version; and which versions of other packages are installed."""

from __future__ import annotations

__version__ = "0.1.0"


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed, else None."""
    # Here, as every import of the package reads this module.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
