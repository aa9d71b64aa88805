"""Tell files that other programs use: those in the caches of downloads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError

SHARED = "shared"  # the value of `writable` for a file that others use
# Folders of caches by the variable that names each, and where it is without that.
_FOLDERS = {
    "HF_HOME": "~/.cache/huggingface",
    "HF_HUB_CACHE": "~/.cache/huggingface/hub",
    "HUGGINGFACE_HUB_CACHE": "~/.cache/huggingface/hub",
    "HF_DATASETS_CACHE": "~/.cache/huggingface/datasets",
    "TORCH_HOME": "~/.cache/torch",
    "MODELSCOPE_CACHE": "~/.cache/modelscope",
    "XDG_CACHE_HOME": "~/.cache",
    "KAGGLEHUB_CACHE": "~/.cache/kagglehub",
    "": "~/Library/Caches",
}
# Of a cache of the Hugging Face hub anywhere: models--openai--gpt2/blobs/... and .../snapshots/...
_OF_HUB = re.compile(r"/(models|datasets|spaces)--[^/]+/(blobs|snapshots)/")


def check_writable(writable: Any) -> None:
    """Raise unless `writable` is False, True or SHARED."""
    if writable is not True and writable is not False and writable != SHARED:
        kind = InvalidValueError if isinstance(writable, str) else InvalidTypeError
        raise kind(f"writable is {writable!r} but must be False, True or {SHARED!r}; pass one of them")


def check_not_shared(path: Path, writable: bool | str) -> None:
    """Raise `StorageError` where a table that can write to the file at `path` would change what others read.

    That is a file in a cache of downloads, or one with several names (hard links), unless `writable` is SHARED.
    """
    if writable == SHARED:
        return
    for place in dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))):
        cache = _cache_of(place)
        if cache is not None:
            raise StorageError(
                f"{str(path)!r} is in a cache of files that other programs use ({str(cache)!r}), and training would change it "
                f"for them; copy it, open it with writable=False, or pass writable={SHARED!r} to change it all the same"
            )
    try:
        names = os.stat(path).st_nlink
    except OSError:
        # Opening it tells why.
        return
    if names > 1:
        raise StorageError(
            f"{str(path)!r} is one of {names} names of a file (hard links), and training would change it under all of them; "
            f"copy it, open it with writable=False, or pass writable={SHARED!r} to change it all the same"
        )


def _cache_of(path: Path) -> Path | None:
    """Return the cache that `path`, absolute, lies in."""
    found = _OF_HUB.search(path.as_posix())
    if found is not None:
        return Path(path.as_posix()[: found.end() - 1])
    return next((folder for folder in _folders() if folder in path.parents), None)


def _folders() -> Iterator[Path]:
    for name, default in _FOLDERS.items():
        for folder in (os.environ.get(name), default):
            if folder:
                place = os.path.expanduser(folder)
                yield Path(os.path.abspath(place))
                yield Path(os.path.realpath(place))
