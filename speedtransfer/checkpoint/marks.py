"""What the tables of a model held at a time: a hash of each row, by which those that differ by now are found.

Rows are told apart by what they hold, not by who wrote them, so that no way to write one is missed: a step, ``weight[i] = 0``,
an array over the memory, a checkpoint. A mark takes 8 bytes a row, 16 of an id, and making one reads all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speedtransfer.checkpoint.model import tables_of
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.jit import compiled_module, run_on_threads
from speedtransfer.optim import Handle
from speedtransfer.progress import ByteProgress
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.mixing import GOLDEN, mix64

_COMPILED = "speedtransfer.checkpoint.numba_row_hash"


class Content(NamedTuple):
    """The hashes of the rows of a table, (n,) uint64, by their number; or in the order of `ids`, sorted."""

    hashes: np.ndarray
    ids: np.ndarray | None = None
    # The sum of the hashes of rows that belong to no id.
    reserved: int = 0

    @property
    def total(self) -> int:
        """What stands for all rows: a row that changes adds the difference of its hashes to it."""
        return (int(self.hashes.sum(dtype=np.uint64)) + self.reserved) % 2**64

    @property
    def keys(self) -> np.ndarray:
        """The ids, or the numbers of rows."""
        return np.arange(len(self.hashes)) if self.ids is None else self.ids

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Return the hashes of rows by key, 0 where there is no row."""
        if not len(self.hashes):
            return np.zeros(len(keys), np.uint64)
        at = np.minimum(keys if self.ids is None else np.searchsorted(self.ids, keys), len(self.hashes) - 1)
        return np.where((at if self.ids is None else self.ids[at]) == keys, self.hashes[at], np.uint64(0))


class Mark:
    """What :func:`speedtransfer.mark` returns; `save_delta` and `apply_delta` take it and return the next one.

    Attributes
    ----------
    fingerprints : dict of str to str
        16 hexadecimal digits for each table, by its key in the state dict: equal where all rows are, to the bit, and
        their ids.
    """

    def __init__(self, contents: Mapping[str, Content]) -> None:
        self._contents = dict(contents)
        self.fingerprints = {key: f"{found.total:016x}" for key, found in self._contents.items()}

    def __repr__(self) -> str:
        return f"Mark({self.fingerprints})"


def mark(model: nn.Module, *, progress: bool | None = None) -> Mark:
    """Note what the tables of a model hold now, for a `save_delta` of what has changed since.

    Rows of ``idle="exact"`` first take the steps that they have missed. A mark takes 8 bytes a row, and reads all rows once.

    Parameters
    ----------
    model : nn.Module
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.

    Returns
    -------
    Mark

    Raises
    ------
    InvalidTypeError, InvalidValueError
        `model` is no module, or has no table, or one of several processes.
    """
    tables = marked_tables(model)
    with held(tables):
        return Mark(contents_of(tables, progress))


def marked_tables(model: object) -> dict[str, Handle]:
    """Return the tables of a model by their keys in its state dict; raise where not all can be marked."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"model is a {type(model).__name__} but must be a torch.nn.Module; pass the model itself"
        )
    tables = tables_of(model)
    if not tables:
        raise InvalidValueError(
            f"model has no table whose rows could be marked ({type(model).__name__}); save it by torch.save, or make its "
            "embeddings tables: st.replace_embeddings(model)"
        )
    for key, handle in tables.items():
        if not handle.owners.has_whole:
            raise InvalidValueError(
                f"{key} has its rows in several processes, and a mark is of one that has all; use st.save_checkpoint"
            )
    return tables


@contextlib.contextmanager
def held(tables: Mapping[str, Handle]) -> Iterator[None]:
    """Keep other threads from stepping meanwhile."""
    with contextlib.ExitStack() as stack:
        for handle in tables.values():
            handle.step.recover()
            if handle.id_space.come_and_go:
                handle.id_space.vocabulary.settle()
            stack.enter_context(handle.rows.lock)
        yield


def contents_of(tables: Mapping[str, Handle], progress: bool | None = None) -> dict[str, Content]:
    """Return the hashes of all rows."""
    found, sizes = {}, {key: row_bytes(handle) for key, handle in tables.items()}
    size = sum(sizes[key] * handle.table.num_rows for key, handle in tables.items())
    with ByteProgress("marking rows", size, progress) as bar:
        for key, handle in tables.items():
            handle.rows.catch_up()
            count, ids, numbers, reserved = handle.table.num_rows, None, np.empty(0, np.int64), 0
            if handle.id_space.come_and_go:
                vocabulary = handle.id_space.vocabulary
                ids, numbers = vocabulary.by_id()
                count, reserved = len(ids), reserved_sum(read(handle, np.arange(vocabulary.reserved)))
            hashes = np.empty(count, np.uint64)
            for rows in row_chunks(count, sizes[key]):
                if ids is None:
                    parts = [handle.table.chunk(name, rows) for name in names_of(handle)]
                    hashes[rows] = hashes_of(np.arange(rows.start, min(rows.stop, count)), parts)
                else:
                    parts = read(handle, numbers[rows])
                    hashes[rows] = hashes_of(ids[rows], parts)
                bar.advance(sum(part.nbytes for part in parts))
            found[key] = Content(hashes, ids, reserved)
    return found


def reserved_sum(parts: list[Tensor]) -> int:
    """Return the sum of the hashes of rows that belong to no id, all of them: ``(n, width)`` for each of `parts`."""
    return int(hashes_of(np.arange(len(parts[0])), parts).sum(dtype=np.uint64))


def read(handle: Handle, rows: np.ndarray) -> list[Tensor]:
    """Return rows of a table by their numbers (n,), as they are stored, by plane."""
    numbers = torch.from_numpy(rows).to(handle.table.device)
    return list(handle.table.read(numbers, names_of(handle)).values())


def row_bytes(handle: Handle) -> int:
    """Return the bytes of a row of weights."""
    return sum(handle.table.stored(name)[:1].nbytes for name in names_of(handle))


def names_of(handle: Handle) -> list[str]:
    """Return the planes that store the weights."""
    return ["weight" + suffix for suffix in handle.rows.part_specs("weight")]


def hashes_of(ids: np.ndarray, parts: list[Tensor]) -> np.ndarray:
    """Return a hash of each row, (n,) uint64, by its number and its bytes: ``(n, width)`` for each of `parts`."""
    hashes = mix64(ids.astype(np.uint64) + GOLDEN)
    for rows in row_chunks(len(ids), sum(part[:1].nbytes for part in parts)):
        for part in parts:
            _go_on(hashes[rows], part[rows])
    return np.asarray(mix64(hashes))


def _go_on(hashes: np.ndarray, part: Tensor) -> None:
    """Go on with the hashes (n,) of rows by more of their values, ``(n, width)``."""
    values: Any = part.detach().cpu().contiguous().view(torch.uint8).numpy()
    whole = values.shape[1] // 8 * 8
    # Of rows that are not a multiple of 8 bytes long they are not aligned.
    words = np.ascontiguousarray(values[:, :whole]).view(np.uint64)
    for each in (words, values[:, whole:]):
        if each.shape[1]:
            run_on_threads([(compiled_module(_COMPILED).fold, (hashes, each))], len(hashes), each.nbytes, ())
