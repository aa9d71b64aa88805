"""Import when something is first used (PEP 562): `import speedtransfer` and ``--help`` then do without torch.

Optional packages are imported where they are used, too, with a clear message where they are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
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


def lazy_names(
    package: str, names: Sequence[str], modules: Sequence[str], moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return `__getattr__` for a package that imports its public names, and its submodules, when they are first used.

    Parameters
    ----------
    package : str
        Full name of the package.
    names : sequence of str
        Its public names.
    modules : sequence of str
        Submodules to look for those names in, in this order.
    moved : mapping of str to str, optional
        Names that it once had, and the files of the repository that have them now; such a name raises ImportError.
    """

    def find(name: str) -> Any:
        if moved and name in moved:
            raise ImportError(f"{package}.{name} is no part of the package any more; copy it from {moved[name]}")
        full = f"{package}.{name}"
        if not name.startswith("_") and importlib.util.find_spec(full) is not None:
            return importlib.import_module(full)
        for module in modules if name in names else ():
            face = importlib.import_module(f"{package}.{module}")
            if hasattr(face, name):
                setattr(sys.modules[package], name, getattr(face, name))  # the next use finds it there
                return getattr(face, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    return find
