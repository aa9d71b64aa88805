"""A file of the rows that have changed: what it says, read and checked by itself.

It is a checkpoint in one file, whose tables have the rows only that are others than before: in the terms of
:mod:`speedtransfer.checkpoint.manifest`, with the numbers of these rows, and what they were, beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.marked_table import MarkedTable
from speedtransfer.checkpoint.marks import Place
from speedtransfer.dtypes import SAFETENSORS_NAMES
from speedtransfer.errors import SpeedtransferError, StorageError
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.tables import files
from speedtransfer.untrusted import parse_json

FORMAT, VERSION = "speedtransfer.delta", "5"
# Attributes of a vocabulary that its copies have too.
_FACTS = ("clock", "seed", "initial", "padding_idx", "features")
# What a vocabulary has that is of its rows in one table alone.
OF_PLACES = ("ids", "last_use", "counts", "released", "shares")
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


def vocabulary_facts(table: MarkedTable) -> dict[str, Any] | None:
    """Return what a delta says of a vocabulary whose rows are told apart by their ids; None: they are by their numbers."""
    if not table.of_ids:
        return None
    vocabulary = table.handle.id_space.vocabulary
    return {name: getattr(vocabulary, name) for name in _FACTS}


class TableFacts(NamedTuple):
    """What a delta says of a table: its rows before and after, how they are stored, and the fingerprints."""

    begins: int
    rows: int
    encoding: str
    # By plane of the table: the tensor that has it, and what new rows hold there.
    planes: dict[str, str]
    fills: dict[str, float | None]
    since: str
    now: str
    # `vocabulary_facts`, and the sum of the hashes that rows of no id had.
    vocabulary: dict[str, Any] | None = None
    reserved: int = 0
    # Whether each process has a part of its rows.
    is_divided: bool = False

    def check(self, found: TableRows) -> None:
        """Raise `ValueError` or `TypeError` unless the parts are of their types, and the ids such as may have changed."""
        texts = (self.encoding, self.since, self.now)
        if not all(type(n) is int and n >= 0 for n in (self.begins, self.rows)) or not all(
            isinstance(each, str) for each in texts
        ):
            raise TypeError("a table without its numbers")
        if self.fills.keys() != self.planes.keys() or not all(
            type(n) in (float, type(None)) for n in self.fills.values()
        ):
            raise TypeError("a table without its planes")
        columns: list[tuple[Tensor, list[Any]]] = [
            (found.ids, [found.was, *found.parts.values()]),
            (found.gone, [found.gone_was]),
        ]
        for ids, beside in columns:
            if ids.dtype != torch.int64 or bool((ids[1:] <= ids[:-1]).any()):
                raise ValueError("ids that are not in order")
            if any(len(each) != len(ids) for each in beside) or any(
                part.dim() != 2 for part in [*found.parts.values(), *found.reserved.values()]
            ):
                raise ValueError("other numbers of ids and of rows")
        if type(self.is_divided) is not bool:
            raise TypeError("a table that does not say whose it is")
        if self.vocabulary is not None:
            if set(self.vocabulary) != set(_FACTS) or type(self.reserved) is not int:
                raise TypeError("a vocabulary without its facts")
        # All new rows are among them.
        elif int((found.ids >= self.begins).sum()) != self.rows - self.begins or bool(
            ((found.ids < 0) | (found.ids >= self.rows)).any()
        ):
            raise ValueError("ids that are not those of the rows")


class TableRows(NamedTuple):
    """What a delta has of a table."""

    # Numbers of rows, or ids, (n,) int64, sorted; the hashes that they had, and what they are now, by plane.
    ids: Tensor
    was: np.ndarray
    parts: dict[str, Tensor]
    # Where rows are told apart by ids, those that are gone, (m,), with the hashes that they had; and the rows of no id.
    gone: Tensor
    gone_was: np.ndarray
    reserved: dict[str, Tensor]


class Delta:
    """A file of `save_delta`, read and checked by itself.

    Attributes
    ----------
    content : dict
        What the manifest of a checkpoint says.
    tensors : dict of str to Tensor
        By their role in a checkpoint and their name: "model/emb.weight".
    place : Place
        Its place among others; its name is a checksum of what it says.
    follows : str
        The name of the one before, empty for the first: so a name stands for all before it.
    processes : int
        How many have saved it together, of which each would save its rows in a checkpoint; 0: one that has all.
    generators : list of dict
        What the manifest says of the generators of each process after the first; those of the first are in `content`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = files.open_header(path)
        metadata = header.metadata if isinstance(header.metadata, dict) else {}
        try:
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"format {metadata.get('format')!r}, version {metadata.get('version')!r}")
            if metadata.get("sha256") != checksum(metadata["said"]):
                raise ValueError("another checksum of what it says of tables")
            said = parse_json(metadata["said"].encode())
            self.place, self.follows = Place(said["run"], said["number"], metadata["sha256"]), said["follows"]
            if not isinstance(self.place.run, str) or type(self.place.number) is not int:
                raise TypeError("it does not say which it is")
            if (self.place.number > 1) != bool(self.follows):
                raise ValueError("it does not say what it follows")
            self.content: dict[str, Any] = said["content"]
            self.processes, self.generators = said["processes"], said["generators"]
            if type(self.processes) is not int or len(self.generators) != max(self.processes, 1) - 1:
                raise ValueError("it does not say who has saved it")
            self.tensors = {name: self._mapped(header, name) for name in header.tensors if "/" in name}
            self.tables = {str(key): TableFacts(**each) for key, each in said["tables"].items()}
            self.rows = {key: self._rows(header, n, self.tables[key]) for n, key in enumerate(self.tables)}
            if not self.processes and any(table.is_divided for table in self.tables.values()):
                raise ValueError("it has rows of several processes and is of one")
            self._check(said["digests"])
        except StorageError:
            raise
        except (SpeedtransferError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{str(path)!r} does not hold what st.save_delta has written ({error}); use another copy of it"
            ) from error

    def _rows(self, header: files.Header, number: int, table: TableFacts) -> TableRows:
        gone, gone_was, reserved = _NO_IDS, _NO_IDS, dict[str, Tensor]()
        if table.vocabulary is not None:
            gone, gone_was = (self._column(header, f"{number}.{name}") for name in ("gone", "gone_before"))
            names = [name for name in table.planes if not name.startswith(OF_VOCABULARY)]
            reserved = {name: self._mapped(header, f"{number}.reserved.{name}") for name in names}
        parts = {plane: wide(self.tensors[name]) for plane, name in table.planes.items()}
        ids, was = (self._column(header, f"{number}.{name}") for name in ("ids", "before"))
        found = TableRows(ids, was.numpy().view(np.uint64), parts, gone, gone_was.numpy().view(np.uint64), reserved)
        table.check(found)
        return found

    def _check(self, digests: Mapping[str, str]) -> None:
        self.whole = self.tensors.keys() - {name for table in self.tables.values() for name in table.planes.values()}
        if digests.keys() != self.whole:
            raise ValueError("other tensors than it has checksums of")
        for name in self.whole:
            if digest(self.tensors[name]) != digests[name]:
                raise ValueError(f"another checksum of {name!r}")
        shares = [f"rows-{rank}" for rank in range(self.processes)]
        named = {role: dict[str, Any]() for role in (*manifest.ROLES, *shares)}
        for name in self.tensors:
            role, _, inner = name.partition("/")
            named[role][inner] = None
        facts = {"sha256": "0" * 64, "bytes": 0}
        roles = {r: {"name": f"{r}-{'0' * 32}.safetensors", "tensors": t, **facts} for r, t in named.items()}
        for role, generators in zip(shares[1:], self.generators, strict=True):
            roles[role]["generators"] = generators
        manifest.check({**self.content, "files": roles})

    def _column(self, header: files.Header, name: str) -> Tensor:
        found = self._mapped(header, name)
        if found.dtype != torch.int64 or found.shape[1:] != (1,):
            raise ValueError(f"{name} is {found.dtype} of {list(found.shape)}")
        return found.reshape(-1)

    def _mapped(self, header: files.Header, name: str) -> Tensor:
        found = files.find_tensor(self.path, header, name, tuple(SAFETENSORS_NAMES))
        return files.map_tensor(self.path, found.offset, found.shape, found.dtype, "c")[0]

    def follows_place(self, place: Place) -> bool:
        """Tell whether it may be the one after another: the first of another run may, if its rows are right."""
        return self.follows == place.name if self.place.number > 1 else self.place.run != place.run

    def comes_after(self, before: Delta) -> bool:
        """Tell whether it begins where another one ends."""
        if not self.follows_place(before.place):
            return False
        begins = {key: (table.begins, table.since) for key, table in self.tables.items()}
        return begins == {key: (table.rows, table.now) for key, table in before.tables.items()}

    @property
    def changes(self) -> bool:
        """Whether any row has changed."""
        return any(len(found.ids) + len(found.gone) for found in self.rows.values())

    @property
    def of_optimizers(self) -> list[str]:
        """The names of the optimizers whose state it has."""
        return sorted(self.content["optimizers"])


def checksum(text: str) -> str:
    """Return the SHA-256 of what a delta says."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest(values: Tensor) -> str:
    """Return the SHA-256 of the dtype, the shape and the bytes of a tensor."""
    found = hashlib.sha256(f"{values.dtype} {list(values.shape)}".encode())
    if values.numel():  # empty ones may have strides that no view takes
        data: Any = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        found.update(data)
    return found.hexdigest()


def wide(values: Tensor) -> Tensor:
    """Return rows, ``(n, width)``, or ``(n,)`` of one value each, as ``(n, width)``."""
    return values.unsqueeze(1) if values.dim() == 1 else values
