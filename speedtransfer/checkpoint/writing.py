"""Writing tensors to a safetensors file in chunks: the header first, from shapes alone, then the data as it streams by."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from speedtransfer.dtypes import SAFETENSORS_NAMES
from speedtransfer.errors import InvalidTypeError
from speedtransfer.safetensors_io import header_bytes, make_header
from speedtransfer.tables.chunks import row_chunks
from speedtransfer.tables.files import CHUNK_BYTES
from speedtransfer.tables.page_advice import read_ahead


class TensorPlan:
    """The tensors that a file will hold. They are read when it is written, so they must not change until then."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def keep(self, path: str, tensor: Tensor) -> str:
        """Take `tensor` into the file and return its name there: `path`, or one like it."""
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise InvalidTypeError(
                f"{path} has dtype {tensor.dtype}, which a checkpoint cannot hold; convert it, to float32 or uint8 say"
            )
        name, count = path, 2
        while name in self.tensors or name == "__metadata__":  # which safetensors keeps for itself
            name, count = f"{path}#{count}", count + 1
        self.tensors[name] = tensor.detach()
        return name

    def layout(self) -> dict[str, Any]:
        """Return the header of the file: dtype, shape and place of each tensor. Wide dtypes come first, so all are aligned."""
        widest_first = sorted(self.tensors.items(), key=lambda item: -item[1].element_size())
        return make_header((name, tensor.dtype, tensor.shape) for name, tensor in widest_first)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        entries = self.layout()
        return len(header_bytes(entries)) + sum(e["data_offsets"][1] - e["data_offsets"][0] for e in entries.values())

    def write(self, file: BinaryIO, advance: Callable[[int], None]) -> dict[str, Any]:
        """Write the file to the disk itself and return what the manifest says of it."""
        entries = self.layout()
        header = header_bytes(entries)
        digest, size = hashlib.sha256(header), len(header)
        file.write(header)
        for name in entries:
            for chunk in _chunks(self.tensors[name]):
                data = chunk.reshape(-1).view(torch.uint8).numpy().data
                digest.update(data)
                file.write(data)
                size += len(data)
                advance(len(data))
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": size, "sha256": digest.hexdigest(), "tensors": entries}


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the values in order, about 16 MB at a time, contiguous and on the host."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    if tensor.dim() > 1 and row_bytes > CHUNK_BYTES:  # few rows, long ones
        for row in tensor:
            yield from _chunks(row)
        return
    # The allocator would not always give the memory of a chunk to the next.
    staging = torch.empty(0, dtype=tensor.dtype, device="cpu")
    for rows in row_chunks(len(tensor), row_bytes):
        chunk = tensor[rows]
        if chunk.is_contiguous():
            read_ahead(chunk)
        if chunk.device.type != "cpu" or not chunk.is_contiguous():
            if len(staging) < chunk.numel():
                staging = torch.empty(chunk.numel(), dtype=tensor.dtype, device="cpu")
            chunk = staging[: chunk.numel()].view(chunk.shape).copy_(chunk)
        yield chunk
