"""The manifest: which files make a checkpoint, their checksums, and everything that is no tensor, in JSON.

Its first line holds the SHA-256 of all that follows, so that a flipped bit in it is noticed as one in the data is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from speedtransfer.checkpoint.checksums import kind_of
from speedtransfer.checkpoint.plain_data import find_shards, find_tensors
from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError, format_bytes
from speedtransfer.safetensors_io import is_gap
from speedtransfer.untrusted import MAX_JSON_VALUES, parse_json
from speedtransfer.version import __version__

NAME = "manifest.json"
FORMAT = "speedtransfer checkpoint"
# 2: with files of the rows of several processes. 3: with or without, and checksums by XXH3.
FORMAT_VERSIONS = (1, 2, 3)
ROLES = ("model", "optimizer", "objects")
FILE_NAME = re.compile(rf"(?:{'|'.join(ROLES)}|rows-[0-9]{{1,9}})-[0-9a-f]{{32}}\.safetensors")
_TEMPORARY = re.compile(r"\.manifest-[0-9a-f]{32}\.json")
MAX_BYTES = 1 << 28
_HEAD = '{{"sha256":"{}",\n'
_HEAD_BYTES = len(_HEAD.format("0" * 64))
_SECTIONS = ("files", "model", "optimizers", "objects", "rng", "versions")
VERSIONS = {
    "speedtransfer": __version__,
    "torch": torch.__version__,
    "python": platform.python_version(),
    "numpy": np.__version__,
}


def to_bytes(content: dict[str, Any]) -> bytes:
    """Return the text of the manifest with `content`. InvalidValueError: it is too long."""
    text = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSIONS[-1], **content}, separators=(",", ":"))
    body = text[1:].encode()
    if len(body) > MAX_BYTES - _HEAD_BYTES:
        raise InvalidValueError(
            f"the plain values of extra and the objects take {format_bytes(len(body))} of JSON but a checkpoint takes "
            f"{format_bytes(MAX_BYTES)}; pass long lists as tensors or arrays"
        )
    if sum(map(body.count, (b",", b"[", b"{"))) >= MAX_JSON_VALUES:
        raise InvalidValueError(
            f"the plain values of extra and the objects are over {MAX_JSON_VALUES} numbers, strings and lists, which a "
            "checkpoint does not take; pass long lists as tensors or arrays"
        )
    return _head_of(body) + body


def _head_of(body: bytes) -> bytes:
    return _HEAD.format(hashlib.sha256(body).hexdigest()).encode()


def limited(raw: bytes, path: str) -> bytes:
    """Return the bytes of the manifest at `path`. StorageError: they are more than one has."""
    if len(raw) > MAX_BYTES:
        raise StorageError(f"{path!r} exceeds {format_bytes(MAX_BYTES)}, which no manifest does; check the path")
    return raw


def _peek(raw: bytes) -> dict[str, Any]:
    """Return a manifest, unchecked; empty where it is none in JSON."""
    try:
        content = parse_json(raw)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def names_in(raw: bytes) -> set[str] | None:
    """Return the data files that a manifest names; None if it is none."""
    try:
        names = {facts["name"] for facts in _peek(raw)["files"].values()}
        # What leads out of the folder is nobody's data file.
        return {name for name in names if FILE_NAME.fullmatch(name)}
    except (TypeError, KeyError, AttributeError):
        return None


def is_ours(name: str) -> bool:
    """Tell whether a file of this name is of a checkpoint, or of a save that was killed."""
    return bool(FILE_NAME.fullmatch(name) or _TEMPORARY.fullmatch(name))


def check_target(path: object, names: list[str], read: Callable[[], bytes]) -> None:
    """Raise `InvalidValueError` where files of these names, the manifest that `read` reads, are of no checkpoint."""
    if NAME in names:
        if _peek(read()).get("format") != FORMAT:
            raise InvalidValueError(
                f"path {str(path)!r} holds a {NAME} that is none of a checkpoint; choose another path, or remove it"
            )
    elif foreign := sorted(name for name in names if not is_ours(name)):
        raise InvalidValueError(
            f"path {str(path)!r} holds {foreign[0]!r} and no checkpoint; choose an empty or new folder"
        )


@contextlib.contextmanager
def damage_told(path: object) -> Iterator[None]:
    """Raise `StorageError` where what is in the manifest at `path` makes the block raise."""
    try:
        yield
    except (SpeedtransferError, torch.cuda.OutOfMemoryError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise StorageError(f"{str(path)!r} is damaged ({what}); use another checkpoint") from error


def parse(raw: bytes, path: object) -> dict[str, Any]:
    """Return the manifest, its sections and names of files known to be good. StorageError: it is foreign, damaged or later."""
    with damage_told(path):
        content = parse_json(raw, finite=True)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StorageError(f"{str(path)!r} is no manifest of a checkpoint; check the path")
        if content.get("format_version") not in FORMAT_VERSIONS:
            raise StorageError(
                f"{str(path)!r} has format version {str(content.get('format_version'))[:20]} but this speedtransfer reads "
                f"{FORMAT_VERSIONS[0]} to {FORMAT_VERSIONS[-1]}; use the version that saved it: "
                f"{str(content.get('versions'))[:200]}"
            )
        if raw[:_HEAD_BYTES] != _head_of(raw[_HEAD_BYTES:]):
            raise ValueError("its checksum does not match")
        check(content)
    return content


def check(content: dict[str, Any]) -> None:
    """Raise `ValueError`, `TypeError` or `KeyError` unless the sections and files are those of a checkpoint."""
    for section in _SECTIONS:
        if type(content[section]) is not dict:
            raise TypeError(f"{section} is no dict")
    files, sections = content["files"], {"model": content["model"], "optimizer": content["optimizers"]}
    sections["objects"] = [content["rng"], content["objects"], content["extra"]]
    shards = find_shards([content["model"], content["optimizers"]])
    for role in rows_roles(files):
        sections[role] = files[role].get("generators")
    if set(files) != set(sections):
        raise ValueError(f"files are {sorted(files)}")
    for role, facts in files.items():
        _check_file(role, facts)
        used = find_tensors(sections[role])
        if role not in ROLES:
            used += [name for name, *_ in shards]
        # Each once: what is read twice could fill the memory, and what nobody reads is not ours.
        given = {name for name in facts["tensors"] if not is_gap(name)}
        if len(used) != len(set(used)) or set(used) != given:
            raise ValueError(f"the tensors of the {role} file are not those that the manifest refers to")
    _check_ranges(files, shards)


def rows_roles(files: dict[str, Any]) -> list[str]:
    """Return the roles of the files of the processes that own rows, in the order of ranks."""
    return [f"rows-{rank}" for rank in range(len(files) - len(ROLES))]


def _check_ranges(files: dict[str, Any], shards: list[tuple[str, int, list[int] | None]]) -> None:
    """Raise unless the parts of each table make up all its rows."""
    roles = rows_roles(files)
    if shards and not roles:
        raise ValueError("rows of several processes without their files")
    for name, num_rows, _ in shards:
        end = 0
        for role in roles:
            start, stop = files[role]["rows"][name]
            if (
                type(start) is not int
                or type(stop) is not int
                or start != end
                or stop - start != files[role]["tensors"][name]["shape"][0]
            ):
                raise ValueError(
                    f"the rows {start} to {stop} of {name[:60]!r} in the {role} file are not those that follow"
                )
            end = stop
        if end != num_rows:
            raise ValueError(f"{name[:60]!r} has {num_rows} rows but the files have {end}")


def _check_file(role: str, facts: dict[str, Any]) -> None:
    name = facts["name"]
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or not name.startswith(f"{role}-"):
        raise ValueError(f"{str(name)[:60]!r} is no name of a {role} file")
    kind_of(facts)
    if type(facts["bytes"]) is not int:
        raise TypeError(f"{name} has no size")
