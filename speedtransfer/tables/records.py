"""Place planes side by side in one record a row: a row of all of them is on one page, in neighbouring cache lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError, suggest

Layout: TypeAlias = Literal["planes", "rows"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
# Width and dtype of planes that are added together, by name.
Specs: TypeAlias = Mapping[str, tuple[int, torch.dtype]]

_ALIGN_BYTES = 16  # what the widest load or store of a kernel asks of addresses
_LINE_BYTES = 128  # of a GPU's cache; a CPU fetches 64 bytes, and their neighbours
_PADDING_PART = 1 / 8  # of a record, at most, to have it begin where a line does


def check_layout(layout: Layout) -> Layout:
    """Return `layout`, or raise `InvalidValueError` unless it is one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise InvalidValueError(f"layout is {layout!r}, not one of its values{suggest(str(layout), LAYOUTS)}")
    return layout


def record_bytes(specs: Specs) -> tuple[dict[str, int], int]:
    """Return where each plane begins in a record, widest first, and the distance of two records."""
    offsets, end = dict[str, int](), 0
    for name in sorted(specs, key=lambda name: -_row_bytes(specs, name)):
        align = _ALIGN_BYTES if _row_bytes(specs, name) >= _ALIGN_BYTES else specs[name][1].itemsize
        offsets[name] = -(-end // align) * align
        end = offsets[name] + _row_bytes(specs, name)
    lines = -(-end // _LINE_BYTES) * _LINE_BYTES
    return offsets, lines if lines - end <= end * _PADDING_PART else -(-end // _ALIGN_BYTES) * _ALIGN_BYTES


def _row_bytes(specs: Specs, name: str) -> int:
    width, dtype = specs[name]
    return width * dtype.itemsize


def views_of(records: Tensor, specs: Specs, offsets: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the planes in `records`, ``(num_rows, stride)`` uint8, as ``(num_rows, width)`` views of their dtypes."""
    return {
        name: records[:, offsets[name] : offsets[name] + _row_bytes(specs, name)].view(dtype)
        for name, (_, dtype) in specs.items()
    }


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first value of a tensor to the end of its last: more than its own where it is strided."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Block(NamedTuple):
    """Memory with a record for each row, of one plane or of several.

    Attributes
    ----------
    planes : dict of str to Tensor
        By name, ``(num_rows, width)``.
    offsets : dict of str to int
        Where each begins in a record.
    row_bytes : int
        The distance of two records.
    address : int
        Where the memory begins.
    """

    planes: dict[str, Tensor]
    offsets: dict[str, int]
    row_bytes: int
    address: int

    @property
    def num_rows(self) -> int:
        """Number of records."""
        return len(next(iter(self.planes.values())))

    def planes_over(self, records: Tensor) -> dict[str, Tensor]:
        """Return the planes in other records, ``(any, row_bytes)`` uint8."""
        specs = {name: (plane.shape[1], plane.dtype) for name, plane in self.planes.items()}
        return views_of(records, specs, self.offsets)

    def planes_longer(self, records: Tensor) -> dict[str, Tensor]:
        """Return the planes in `records`, whose first rows are the memory of this block.

        They count changes together with the planes so far, tensors over which may go on to be written to.
        """
        found = dict[str, Tensor]()
        for name, plane in self.planes_over(records).items():
            found[name] = self.planes[name][:]
            found[name].set_(plane.untyped_storage(), plane.storage_offset(), plane.shape, plane.stride())
        return found


def blocks_of(planes: Mapping[str, Tensor]) -> list[Block]:
    """Return the memory that planes lie in: those that share records are in one block."""
    together = dict[tuple[int, int], dict[str, Tensor]]()
    for name, plane in planes.items():
        # Empty ones have no memory to share. Planes with the same records have the same stride.
        stride = plane.stride(0) * plane.element_size()
        key = (plane.untyped_storage().data_ptr(), stride) if plane.numel() else (0, len(together))
        together.setdefault(key, {})[name] = plane
    found = list[Block]()
    for (address, stride), some in together.items():
        first = next(iter(some.values()))
        if len(some) == 1 and first.is_contiguous():
            found.append(Block(some, dict.fromkeys(some, 0), first.shape[1] * first.element_size(), first.data_ptr()))
        else:
            found.append(Block(some, {n: plane.data_ptr() - address for n, plane in some.items()}, stride, address))
    return found
