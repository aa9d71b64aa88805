"""Find the tensors that make up a table in published files, and check them; no rows are read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, suggest
from speedtransfer.tables import files
from speedtransfer.untrusted import MAX_JSON_BYTES, is_plain_name, only_storage_errors, open_file, parse_json

NUMBER = "{}"  # in the name of a tensor: any number
INDEX = ".safetensors.index.json"
_Pair = tuple[Path, str | None]


class Source(NamedTuple):
    """A tensor in a file: its values begin at byte `offset`."""

    path: Path
    key: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return repr(str(self.path)) if self.key is None else f"tensor {self.key!r} of {str(self.path)!r}"


class Catalog:
    """Finds tensors in files, each of whose headers is read once."""

    def __init__(self) -> None:
        self._headers: dict[Path, files.Header] = {}

    def find(self, parts: Any, key: str | None, what: str, dtypes: Collection[torch.dtype]) -> list[Source]:
        """Return the tensors that `parts` and `key` of `Table.open` name, in the order of their rows.

        Parameters
        ----------
        parts, key
        what : str
            What messages call `parts`.
        dtypes : collection of torch.dtype
            One of which the tensors must have.

        Raises
        ------
        InvalidValueError, InvalidTypeError
            They name no tensors, or one of another dtype.
        StorageError
            A file is missing, truncated or no such file.
        """
        found = []
        for path, name in self._pairs(_listed(parts, what), key, what):
            stored = files.find_tensor(path, self._header(path), name, dtypes)
            found.append(Source(path, name, *stored))
        return found

    def _header(self, path: Path) -> files.Header:
        if path not in self._headers:
            self._headers[path] = files.open_header(path)
        return self._headers[path]

    def _pairs(self, given: list[_Pair], key: str | None, what: str) -> list[_Pair]:
        """Return files and names of tensors in them, where `key` names those that have none yet."""
        of_key = "scale_key" if what == "scales" else "key"
        if key is not None and not isinstance(key, str):
            raise InvalidTypeError(f"{of_key} is a {type(key).__name__} but must be the name of a tensor; pass a str")
        if key is not None and any(name is not None for _, name in given):
            raise InvalidValueError(f"{of_key} is {key!r} but {what} has (file, key) pairs; pass one of the two")
        many = [path for path, _ in given if os.path.isdir(path) or path.name.endswith(INDEX)]
        if many and key is None:
            if os.path.isdir(many[0]):
                _files_in(many[0])
            raise InvalidValueError(
                f"{str(many[0])!r} has many tensors; pass {of_key}, the name of one, or with {NUMBER} in the place of a "
                "number that of several: 'shard_{}.weight'"
            )
        if key is None or not (many or NUMBER in key):
            return [(path, name or key) for path, name in given]
        places: dict[str, Path] = {}
        for path, _ in given:
            for name, place in self._tensors(path):
                if places.setdefault(name, place) != place and _matches(key, name) is not None:
                    raise InvalidValueError(
                        f"tensor {name!r} is in {str(places[name])!r} and in {str(place)!r}; pass a list of (file, key) pairs"
                    )
        return [(places[name], name) for name in _chosen(key, places, of_key)]

    def _tensors(self, path: Path) -> Iterable[tuple[str, Path]]:
        """Yield the tensors of a file, or those that a folder or an index names, with their files."""
        if os.path.isdir(path):
            for one in _files_in(path):
                yield from self._tensors(one)
        elif path.name.endswith(INDEX):
            for name, file in _weight_map(path).items():
                yield name, path.parent / file
        else:
            for name in self._header(path).tensors:
                yield name, path


def _files_in(folder: Path) -> list[Path]:
    """Return the indexes in a folder, or its files with tensors; raise where it has neither."""
    found = sorted(folder.glob(f"*{INDEX}")) or sorted(folder.glob("*.safetensors"))
    if not found:
        raise StorageError(f"folder {str(folder)!r} has no .safetensors files; check the path")
    return found


def _listed(parts: Any, what: str) -> list[_Pair]:
    """Return `parts` as a list of files and keys."""
    if isinstance(parts, str | os.PathLike):
        return [(Path(parts), None)]
    if not isinstance(parts, Iterable) or isinstance(parts, bytes | Mapping | Tensor):
        raise InvalidTypeError(
            f"{what} is a {type(parts).__name__} but must be a path, or a list of paths and of (file, key) pairs; pass one"
        )
    if isinstance(parts, tuple) and _is_pair(parts) and not _is_file_name(parts[1]):
        pair = str(parts[0]), parts[1]
        raise StorageError(
            f"{what} is {pair}, of which {pair[1]!r} is not a file; if it is the name of a tensor, pass a list: [{pair}]"
        )
    found = list[_Pair]()
    for part in parts:
        if isinstance(part, str | os.PathLike):
            found.append((Path(part), None))
        elif _is_pair(part):
            found.append((Path(part[0]), part[1]))
        else:
            raise InvalidTypeError(
                f"{what} has {part!r}, which is neither a path nor a (file, key) pair; pass one of them"
            )
    if not found:
        raise InvalidValueError(f"{what} is empty but a table is in one file or more; pass their paths")
    return found


def _is_pair(part: Any) -> bool:
    """Tell whether `part` is a file and a name."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        return False
    return isinstance(part[0], str | os.PathLike) and isinstance(part[1], str)


def _is_file_name(text: str) -> bool:
    return text.endswith((".safetensors", ".npy", ".json")) or os.path.lexists(text)


def _weight_map(path: Path) -> dict[str, str]:
    with only_storage_errors(path, "an index of safetensors files"):
        with open_file(path) as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"over {MAX_JSON_BYTES} bytes")
        found = parse_json(data)["weight_map"]
        if not all(isinstance(text, str) for item in found.items() for text in item):
            raise TypeError("its weight_map names no files")
        # As published ones do. Others would make a table of any file that whoever opens the index may read.
        outside = next((name for name in found.values() if not is_plain_name(name)), None)
        if outside is not None:
            raise ValueError(f"it names {outside[:100]!r}, which is not a file in its folder")
    return dict(found)


def _matches(key: str, name: str) -> int | None:
    """Return the number that `name` has in the place of NUMBER in `key`, 0 where the key has none; None: another name."""
    before, number, after = key.partition(NUMBER)
    found = re.fullmatch(re.escape(before) + ("([0-9]+)" if number else "") + re.escape(after), name)
    return None if found is None else int(found[1]) if number else 0


def _chosen(key: str, names: Iterable[str], of_key: str) -> list[str]:
    """Return those of `names` that `key` matches, by their numbers."""
    if key.count(NUMBER) > 1:
        raise InvalidValueError(f"{of_key} is {key!r} with {NUMBER} more than once; pass a list of (file, key) pairs")
    names = list(names)
    by_number: dict[int, str] = {}
    for name in names:
        number = _matches(key, name)
        if number is not None and by_number.setdefault(number, name) != name:
            raise InvalidValueError(
                f"{of_key} {key!r} matches {by_number[number]!r} and {name!r}; pass (file, key) pairs"
            )
    if not by_number:
        raise InvalidValueError(f"no tensor is called {key!r}{suggest(key, names or ['none'])} (argument {of_key})")
    numbers = sorted(by_number)
    expected = range(min(numbers[0], 1), numbers[-1] + 1)
    if NUMBER in key and len(numbers) < len(expected):
        missing = next(number for number in expected if number not in by_number)
        raise InvalidValueError(
            f"{of_key} {key!r} matches {len(numbers)} tensors up to number {numbers[-1]} but none with number {missing}; "
            "download the file that has it, or pass a list of (file, key) pairs"
        )
    return [by_number[number] for number in numbers]
