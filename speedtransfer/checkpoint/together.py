"""The processes that save or load a checkpoint together: what they agree on, and which of the files is whose."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.folder import Folder
from speedtransfer.checkpoint.store import Store
from speedtransfer.checkpoint.tensors import TensorReader
from speedtransfer.dtypes import bits_of
from speedtransfer.errors import InvalidValueError
from speedtransfer.optim import Handle, find_handle
from speedtransfer.progress import ByteProgress
from speedtransfer.ranks import Exchange


class Processes:
    """Those that own the rows of a model's tables, or this one alone. All must call the same methods in the same order."""

    def __init__(self, point: str, exchange: Exchange | None, handles: Iterable[Handle] = ()) -> None:
        self._point, self._exchange, self._handles = point, exchange, handles
        self.rank, self.ranks = (0, 1) if exchange is None else (exchange.rank, exchange.ranks)
        self.is_first, self.is_alone = self.rank == 0, exchange is None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run the block, which must not call the others, in all processes; if it raises in one, raise in all."""
        try:
            yield
        except BaseException as error:
            if self._exchange is not None:
                self._exchange.agree_on_error(self._point, error)
            raise
        if self._exchange is not None:
            self._exchange.agree_on_error(self._point, None)

    def for_thread(self) -> Processes:
        """Return the same processes for a thread, whose messages wait for none of this one. Collective."""
        return self if self._exchange is None else Processes(self._point, self._exchange.for_thread(self._point))

    def prepare(self, background: bool = False) -> None:
        """Have all rows take the steps that they have missed, unless a thread sees to it (`background`).

        In a shared table processes wait for each other. All know then how many rows each has. ProcessGroupError: a step was
        not made in all.
        """
        for handle in self._handles:
            handle.step.recover()
        self.check_same(", ".join(dict.fromkeys(handle.owners.so_far for handle in self._handles)))
        for handle in self._handles:
            # A child of fork copies the rows of its parent.
            if handle.table.writable and not (background and handle.rows.can_be_frozen):
                handle.rows.catch_up()
            # Ids that were given rows without a lookup have let tables grow.
            handle.id_space.owners.tell_sizes()

    def gather_ids(self) -> None:
        """Let rank 0 have what is known of ids in all, until `release`."""
        for handle in self._handles:
            handle.id_space.owners.gather()

    def tell_sizes(self) -> None:
        """Tell the others how many rows tables have by now, which may have grown."""
        for handle in self._handles:
            handle.id_space.owners.tell_sizes()

    def release(self) -> None:
        """Forget what is known of ids in other processes."""
        for handle in self._handles:
            handle.id_space.owners.release()

    def check_same(self, text: str) -> None:
        """Raise `ProcessGroupError` in all processes if `text` is not the same in all."""
        if self._exchange is not None:
            self._exchange.agree(self._point, [0], text)

    def numbers(self, *numbers: int) -> Tensor:
        """Return the numbers of all processes, ``(ranks, n)``."""
        own = torch.tensor(numbers, device="cpu")
        return own.unsqueeze(0) if self._exchange is None else self._exchange.agree(self._point, own)

    def texts(self, text: str) -> list[str]:
        """Return the texts of all processes, in the order of ranks."""
        return [text] if self._exchange is None else self._exchange.texts(text)

    def progress(self, text: str, num_bytes: int, show: bool | None) -> ByteProgress:
        """Return a bar, which rank 0 alone shows."""
        return ByteProgress(text, num_bytes, show if self.is_first else False)

    def unique(self) -> str:
        """Return 32 random hexadecimal digits, the same in all processes."""
        drawn = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
        if self._exchange is not None:
            drawn = self._exchange.from_first(drawn)
        return bytes(drawn.tolist()).hex()


def processes_of(point: str, values: Iterable[object]) -> Processes:
    """Return the processes that own tables of the models and optimizers among `values`.

    InvalidValueError: tables of several process groups.
    """
    found: dict[Exchange, list[Handle]] = {}
    for value in values:
        params: Iterable[Tensor] = ()
        if isinstance(value, nn.Module):
            params = value.parameters()
        elif isinstance(value, Optimizer):
            params = (param for group in value.param_groups for param in group["params"])
        for handle in map(find_handle, params):
            if handle is not None and not handle.of.owners.has_whole:
                found.setdefault(handle.of.owners.exchange, []).append(handle)
    if len(found) > 1:
        groups = [f"{handles[0]}: {each.members}" for each, handles in found.items()]
        raise InvalidValueError(
            f"the tables belong to {len(found)} process groups ({'; '.join(groups)}) but those of a checkpoint must belong to "
            "one; give all tables the same process_group, or save each model by itself"
        )
    exchange, handles = next(iter(found.items()), (None, []))
    return Processes(point, exchange, handles)


def files_to_check(processes: Processes, place: Folder | Store, readers: dict[str, TensorReader]) -> list[TensorReader]:
    """Return the files whose bytes this process checks: its share, or all where others may have copies of their own."""
    stamps = [place.stamp(reader.facts["name"], reader.file) for reader in readers.values()]
    seen = zlib.crc32(json.dumps(stamps).encode())
    alike = len(processes.numbers(seen).unique()) == 1
    return list(readers.values())[processes.rank :: processes.ranks] if alike else list(readers.values())


def like(value: Tensor, current: Any) -> Tensor:
    """Return `value`, a whole tensor; or the part of it that this process has of `current`, if that is a DTensor."""
    if not hasattr(current, "full_tensor") or value.shape != current.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    moved = value.to(current.device, current.dtype if value.is_floating_point() else value.dtype)
    return distribute_tensor(moved, current.device_mesh, current.placements, src_data_rank=None)


class ShardReader:
    """Rows of the tables that several processes have saved, each a part: by their places, as if in one file."""

    rows_come_apart = False

    def __init__(self, files: dict[str, dict], readers: dict[str, TensorReader]) -> None:
        self._parts = [(files[role]["rows"], readers[role]) for role in manifest.rows_roles(files)]

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor of all rows."""
        dtype, shape = self._parts[0][1].spec(name)
        return dtype, (self._parts[-1][0][name][1], *shape[1:])

    def read(self, name: str, rows: slice, buffers: dict[str, Tensor] | None = None) -> Tensor:
        """Return some rows, as :meth:`TensorReader.read`."""
        pieces = []
        for ranges, reader in self._parts:
            start, stop = ranges[name]
            part = slice(max(rows.start, start) - start, min(rows.stop, stop) - start)
            if part.start < part.stop:
                whole = part.stop - part.start == rows.stop - rows.start
                pieces.append(reader.read(name, part, buffers if whole else None))
        if not pieces:
            return self._parts[0][1].read(name, slice(0, 0))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pick(self, name: str, places: Tensor) -> Tensor:
        """Return the rows at `places`, (n,)."""
        dtype, shape = self.spec(name)
        whole = torch.empty(len(places), *shape[1:], dtype=dtype, device="cpu")
        for ranges, reader in self._parts:
            start, stop = ranges[name]
            at = ((places >= start) & (places < stop)).nonzero().flatten()
            if len(at):
                bits_of(whole)[at] = bits_of(reader.pick(name, places[at] - start))
        return whole
