"""What is saved and loaded, and where: checked before anything is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from torch import nn
from torch.optim import Optimizer

from speedtransfer.checkpoint.folder import Folder
from speedtransfer.checkpoint.objects import state_methods
from speedtransfer.checkpoint.store import Store
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_length, is_url, one_line


def check_arguments(
    path: str | os.PathLike[str], model: object, optimizer: object, objects: dict[str, Any]
) -> tuple[Folder | Store, dict[str, Optimizer], dict[str, Any]]:
    """Return the place, the optimizers and the other objects by name, all known to be of a kind that can be saved."""
    place = place_of(path)
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"model is a {type(model).__name__} but must be a torch.nn.Module; pass the model itself"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(
            f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer; pass others by name: scaler=..."
        )
    given = {name: value for name, value in {"optimizer": optimizer, **objects}.items() if value is not None}
    optimizers = {name: value for name, value in given.items() if isinstance(value, Optimizer)}
    others = {name: value for name, value in given.items() if name not in optimizers}
    for name, value in others.items():
        if isinstance(value, type) or not all(map(callable, state_methods(value))):
            raise InvalidTypeError(
                f"{name} is a {type(value).__name__} without state_dict() and load_state_dict(); pass plain values in extra="
            )
    return place, optimizers, others


def place_of(path: object) -> Folder | Store:
    """Return the folder or store at `path`; raise where that is no path."""
    if is_url(path):
        if not isinstance(path, str):
            raise InvalidTypeError(f"path is {path!r}, a URL that a Path has changed; pass it as a string")
        parts = urlsplit(path)
        return Folder(Path(url2pathname(parts.path))) if parts.scheme == "file" else Store(path)
    try:
        folder = Path(path)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidTypeError(
            f"path is {one_line(path)} but must be the path of a folder; pass a string or Path"
        ) from None
    if not os.fspath(path):  # type: ignore[call-overload]
        raise InvalidValueError(
            "path is '', which would be the current folder; pass that of a folder, '.' for this one"
        )
    if "\0" in str(folder):
        raise InvalidValueError(f"path {str(folder)!r} has a NUL, which no path has; remove it")
    check_length(folder)
    return Folder(folder)
