"""What the tables of a model held at a time: a hash of each row, by which those that differ by now are found.

Rows are told apart by what they hold, not by who wrote them, so that no way to write one is missed: a step, ``weight[i] = 0``,
an array over the memory, a checkpoint. A mark takes 8 bytes a row, and making one reads all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

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


class Mark:
    """What :func:`speedtransfer.mark` returns; `save_delta` and `apply_delta` take it and return the next one.

    Attributes
    ----------
    fingerprints : dict of str to str
        16 hexadecimal digits for each table, by its key in the state dict: equal where all rows are, to the bit.
    """

    def __init__(self, hashes: Mapping[str, np.ndarray]) -> None:
        # Of each table, (num_rows,) uint64.
        self._hashes = dict(hashes)
        self.fingerprints = {key: f"{total(found):016x}" for key, found in self._hashes.items()}

    def __repr__(self) -> str:
        return f"Mark({self.fingerprints})"


def total(hashes: np.ndarray) -> int:
    """Return what stands for all rows: the sum of their hashes, which rows that change change by a difference."""
    return int(hashes.sum(dtype=np.uint64))


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
        `model` is no module, or has no table, or one with a vocabulary (it has ``changed_since``) or of several processes.
    """
    tables = marked_tables(model)
    with held(tables):
        return Mark(hashed(tables, progress))


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
        if handle.id_space.come_and_go:
            raise InvalidValueError(
                f"{key} has a vocabulary, whose rows go to other ids; use vocabulary.changed_since and update"
            )
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
            stack.enter_context(handle.rows.lock)
        yield


def hashed(tables: Mapping[str, Handle], progress: bool | None = None) -> dict[str, np.ndarray]:
    """Return the hashes of all rows."""
    sizes = {
        key: sum(handle.rows.table.stored(name).nbytes for name in names_of(handle)) for key, handle in tables.items()
    }
    found = {}
    with ByteProgress("marking rows", sum(sizes.values()), progress) as bar:
        for key, handle in tables.items():
            table = handle.table
            found[key] = np.empty(table.num_rows, np.uint64)
            for rows in row_chunks(table.num_rows, sizes[key] // max(table.num_rows, 1)):
                parts = [table.chunk(name, rows) for name in names_of(handle)]
                found[key][rows] = hashes_of(np.arange(rows.start, rows.stop), parts)
                bar.advance(sum(part.nbytes for part in parts))
    return found


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
