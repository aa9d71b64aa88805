"""Checksums of data files: XXH3 of 128 bits; SHA-256 in files of earlier versions.

They tell damage, not forgery: whoever can write the files can write the manifest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from typing import Any

from speedtransfer.lazy import import_extra

_DIGITS = {"xxh3_128": 32, "sha256": 64}
# The package may have been installed without what it needs.
KIND = "xxh3_128" if importlib.util.find_spec("xxhash") else "sha256"


def kind_of(facts: dict[str, Any]) -> str:
    """Return which checksum the manifest has of a file. ValueError: none, or several."""
    kinds = [kind for kind, digits in _DIGITS.items() if re.fullmatch(f"[0-9a-f]{{{digits}}}", str(facts.get(kind)))]
    if len(kinds) != 1:
        raise ValueError(f"{facts['name']} has no checksum")
    return kinds[0]


def new_checksum(kind: str) -> Any:
    """Return what takes bytes by `update` and has their checksum as `hexdigest`."""
    if kind == "sha256":
        return hashlib.sha256()
    return import_extra("xxhash", "checkpoints with checksums by XXH3", "xxhash").xxh3_128()
