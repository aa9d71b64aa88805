"""Stream tensors to a safetensors file and back in chunks, with a checksum of every byte."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.checkpoint.checksums import KIND, kind_of, new_checksum
from speedtransfer.checkpoint.large_writes import LargeWrites
from speedtransfer.dtypes import SAFETENSORS_NAMES, bits_of, rows_at
from speedtransfer.errors import InvalidTypeError, StorageError
from speedtransfer.safetensors_io import ALIGN, GAP, METADATA, Entry, check_entry, header_bytes, is_gap, make_header
from speedtransfer.tables import CHUNK_BYTES, read_ahead, row_chunks
from speedtransfer.tables.clones import BLOCK, Origin, are_worth, can_clone, origin_of
from speedtransfer.untrusted import parse_json, storage_error

if TYPE_CHECKING:
    from speedtransfer.checkpoint.folder import Folder
    from speedtransfer.checkpoint.store import Store


class PickedRows:
    """Some rows of a tensor, gathered in chunks when they are written.

    Start and stop within their `count` become `numbers` of rows, and these rows by `read`, where the tensor is a placeholder;
    for a row it may read more bytes, `row_bytes`, than it returns. All together they may be in a file by the time they are
    written: `mapped` returns a tensor over it, or None. Who writes to what is returned holds the `lock`.
    """

    def __init__(
        self,
        tensor: Tensor,
        count: int,
        numbers: Callable[[int, int], Any],
        read: Callable[[Any], Tensor] | None = None,
        row_bytes: int | None = None,
        mapped: Callable[[], Tensor | None] = lambda: None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.mapped, self.lock = mapped, lock or contextlib.nullcontext()
        self._tensor, self._numbers = tensor, numbers
        self._read = read or (lambda at: bits_of(tensor)[at.to(tensor.device)])
        self.dtype, self.shape = tensor.dtype, torch.Size((count, *tensor.shape[1:]))
        own_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        self.nbytes, self._row_bytes = count * own_bytes, own_bytes if row_bytes is None else row_bytes

    def chunks(self) -> Iterator[Tensor]:
        """Yield the values in order, 16 MB at a time or less, 1-D and on the host."""
        for rows in row_chunks(self.shape[0], self._row_bytes):
            with self.lock:
                # A column of records stays a view with gaps.
                values = self._read(self._numbers(rows.start, rows.stop)).cpu().reshape(-1).contiguous()
            yield values


class TensorPlan:
    """The tensors that a file will hold. They are read when it is written, so they must not change until then."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | PickedRows] = {}

    def keep(self, path: str, tensor: Tensor | PickedRows) -> str:
        """Take `tensor` into the file and return its name there: `path`, or one like it."""
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise InvalidTypeError(
                f"{path} has dtype {tensor.dtype}, which a checkpoint cannot hold; convert it, to float32 or uint8 say"
            )
        name, count = path, 2
        while name in self.tensors or name == METADATA or is_gap(name):
            name, count = f"{path}#{count}", count + 1
        self.tensors[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
        return name

    def copy(self) -> None:
        """Let what has not been picked change before the file is written."""
        for name, tensor in self.tensors.items():
            if isinstance(tensor, Tensor):
                self.tensors[name] = tensor.to("cpu", copy=True)

    def header(self, shared: Mapping[str, Origin] = MappingProxyType({})) -> dict[str, Any]:
        """Return the header of the file. Wide dtypes come first, so that all are aligned.

        What is `shared` with other files lies in the blocks of both alike, after a tensor that fills a gap.
        """
        widest_first, end = sorted(self.tensors.items(), key=lambda item: -item[1].dtype.itemsize), 0
        found = list[tuple[str, torch.dtype, Sequence[int]]]()
        for name, tensor in widest_first:
            gap = (shared[name].begin - end) % BLOCK if name in shared else 0
            if gap:
                found.append((f"{GAP}{len(found)}", torch.uint8, (gap,)))
            found.append((name, tensor.dtype, tensor.shape))
            end += gap + tensor.nbytes
        return make_header(found)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(header_bytes(self.header())) + sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, file: Any, advance: Callable[[int], None]) -> dict[str, Any]:
        """Write the file and return what the manifest says of it."""
        shared = self._shared(file)
        header, checksum = self.header({name: origin for name, (_, origin) in shared.items()}), new_checksum(KIND)
        for data, is_there in self._pieces(file, header, shared):
            if len(data):
                checksum.update(data)
                if not is_there:
                    file.write(data)
                advance(len(data))
        return {"bytes": file.tell(), KIND: checksum.hexdigest(), "tensors": header}

    def _shared(self, file: Any) -> dict[str, tuple[Tensor, Origin]]:
        """Return the tensors that are in other files, of which `file` can share the bytes, and where."""
        found = {}
        for name, tensor in self.tensors.items() if isinstance(file, LargeWrites) else ():
            whole = tensor if isinstance(tensor, Tensor) else tensor.mapped()
            if whole is not None and are_worth(whole.nbytes):
                origin = origin_of(whole)
                if origin is not None and can_clone(file.fileno(), origin):
                    found[name] = whole, origin
        return found

    def _pieces(
        self, file: Any, header: dict[str, Any], shared: dict[str, tuple[Tensor, Origin]]
    ) -> Iterator[tuple[Any, bool]]:
        """Yield all bytes of `file` in order, and whether it has them by then."""
        copy = np.empty(0, np.uint8)
        yield header_bytes(header, align=BLOCK if shared else ALIGN), False
        for name in header:
            if name in shared:
                whole, (source, begin) = shared[name]
                data = whole.view(-1).view(torch.uint8).numpy().data
                head = -begin % BLOCK
                tail = head + (len(data) - head) // BLOCK * BLOCK
                yield data[:head], False
                yield from ((piece, True) for piece in file.share(Origin(source, begin + head), tail - head))
                yield data[tail:], False
            elif name not in self.tensors:
                yield bytes(header[name]["shape"][0]), False
            else:
                tensor = self.tensors[name]
                lock = tensor.lock if isinstance(tensor, PickedRows) else contextlib.nullcontext()
                for chunk in read_chunks(tensor):
                    values = chunk.view(torch.uint8).numpy()
                    if len(copy) < len(values):
                        copy = np.empty(len(values), np.uint8)
                    # Other threads, or processes, may go on writing: what is written is what the checksum is of.
                    with lock:
                        np.copyto(copy[: len(values)], values)
                    yield copy[: len(values)].data, False


def read_chunks(tensor: Tensor | PickedRows) -> Iterator[Tensor]:
    """Yield the values in order, about 16 MB at a time, 1-D and on the host."""
    if isinstance(tensor, PickedRows):
        yield from tensor.chunks()
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    if tensor.dim() > 1 and row_bytes > CHUNK_BYTES:  # few rows, long ones
        for row in tensor:
            yield from read_chunks(row)
        return
    # The allocator would not always give the memory of a chunk to the next.
    staging = torch.empty(0, dtype=tensor.dtype, device="cpu")
    for rows in row_chunks(len(tensor), row_bytes):
        chunk = tensor[rows]
        read_ahead(chunk)
        if chunk.device.type != "cpu" or not chunk.is_contiguous():
            if len(staging) < chunk.numel():
                staging = torch.empty(chunk.numel(), dtype=tensor.dtype, device="cpu")
            chunk = staging[: chunk.numel()].view(chunk.shape).copy_(chunk)
        yield chunk.reshape(-1)


class TensorReader:
    """The tensors of one file, which is held open, so that what is read is what was checked.

    `facts` is what the manifest says of it. StorageError: it cannot be opened; ValueError, TypeError or KeyError: the tensors
    in `facts` are not such as lie in a file one after the other.
    """

    rows_come_apart = False

    def __init__(self, place: Folder | Store, facts: dict[str, Any]) -> None:
        self.path, self.facts = place.file(facts["name"]), facts
        self._entries: dict[str, Entry] = {}
        self._end = 0  # of the last tensor
        for name, entry in facts["tensors"].items():
            found = self._entries[name] = check_entry(entry)
            if found.begin != self._end or len(entry) != 3:
                raise ValueError(
                    f"tensor {name[:60]!r} has another place in the file, or more than dtype, shape and place"
                )
            self._end = found.end
        # Whoever closes it leaves tensors of `mapped` alive.
        self.file: Any = place.open(facts["name"])
        # `check` finds out whether this is so.
        self._begin = facts["bytes"] - self._end

    def check_size(self) -> int:
        """Return the size of the file. StorageError: it is not the one that was written."""
        size = self.file.seek(0, os.SEEK_END)
        if size != self.facts["bytes"]:
            raise self._damaged(f"has {size} bytes but {self.facts['bytes']} were written")
        return size

    def check(self, advance: Callable[[int], None]) -> None:
        """Raise `StorageError` unless the file is, to the bit, the one that the manifest speaks of."""
        size = self.check_size()
        length = int.from_bytes(self._read(0, bytearray(min(8, size))), "little")
        if size < 8 or 8 + length != self._begin:
            raise self._damaged(f"has a header of {length} bytes and {self._end} of tensors in a file of {size}")
        kind, buffer = kind_of(self.facts), bytearray(min(CHUNK_BYTES, size))
        checksum = new_checksum(kind)
        for start in range(0, size, CHUNK_BYTES):
            part = self._read(start, memoryview(buffer)[: size - start])
            checksum.update(part)
            advance(len(part))
        if checksum.hexdigest() != self.facts[kind]:
            raise self._damaged("does not have the checksum that was written")
        try:
            header = parse_json(bytes(self._read(8, bytearray(length))))
        except ValueError:
            header = None
        if header != self.facts["tensors"]:
            raise self._damaged("has another header than the manifest says")

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{self.path!r} {what}: it is damaged or was replaced; use another checkpoint")

    def _read(self, start: int, target: Any) -> Any:
        """Fill the buffer `target` from byte `start` on and return it."""
        left = memoryview(target)
        with storage_error(f"cannot read {self.path!r}", "check the disk"):
            self.file.seek(start)
            while left:
                count = self.file.readinto(left)
                if not count:
                    raise self._damaged("was truncated while it was read")
                left = left[count:]
        return target

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        entry = self._entries[name]
        return entry.dtype, entry.shape

    def read(self, name: str, rows: slice | None = None, buffers: dict[str, Tensor] | None = None) -> Tensor:
        """Return a tensor, or some of its rows, on the host.

        It has fresh memory, or, with `buffers`, that which the last call with the same ones used.
        """
        dtype, shape, begin, _ = self._entries[name]
        begin += self._begin
        if rows is not None:
            begin += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape = (rows.stop - rows.start, *shape[1:])
        num_bytes = math.prod(shape) * dtype.itemsize
        with torch.inference_mode(False):
            if buffers is None:
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
            else:
                if name not in buffers or len(buffers[name]) < num_bytes:
                    buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                tensor = buffers[name][:num_bytes].view(dtype).view(shape)
        target = tensor.view(-1).view(torch.uint8).numpy().data if num_bytes else memoryview(b"")
        for start in range(0, num_bytes, CHUNK_BYTES):
            self._read(begin + start, target[start : start + CHUNK_BYTES])
        return tensor

    def pick(self, name: str, at: Tensor) -> Tensor:
        """Return the rows of a tensor at `at`, (n,)."""
        return rows_at(self.mapped(name), at)

    def mapped(self, name: str) -> Tensor:
        """Return a tensor to be copied from at once: over the file itself, without memory of its own, on a disk."""
        if not isinstance(self.file, io.FileIO):
            return self.read(name)
        dtype, shape, begin, end = self._entries[name]
        if begin == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # "c" maps privately: torch wants writable memory, and the file stays as it is.
        data = np.memmap(self.file, np.uint8, "c", self._begin + begin, (end - begin,))
        return torch.from_numpy(data.view(np.ndarray)).view(dtype).view(shape)
