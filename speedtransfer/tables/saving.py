"""Make tables of arrays and files, and write the weights of one to a file, in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import cuda_status, resolve_device
from speedtransfer.dtypes import FLOAT8_DTYPES, SCALED_DTYPES, check_values
from speedtransfer.errors import InvalidValueError, StorageError, check_path, suggest
from speedtransfer.system import physical_bytes
from speedtransfer.tables import files
from speedtransfer.tables.chunks import plane_chunks, row_chunks
from speedtransfer.tables.growing import check_max_rows
from speedtransfer.tables.mapped_file import MmapMemory
from speedtransfer.tables.memories import DeviceMemory, Memory, PageableMemory, PinnedMemory
from speedtransfer.tables.opened_files import LOW_BITS, SCALES
from speedtransfer.tables.opening import SCALE_BLOCK, open_sources, saved_planes
from speedtransfer.tables.planes import CacheRows, Device, MemoryName, PathLike, Planes, Writable, check_dtype
from speedtransfer.tables.records import Layout, check_layout
from speedtransfer.tables.row_cache import check_cache
from speedtransfer.tables.row_values import tensor_of
from speedtransfer.tables.same_file import see_others_in_memory
from speedtransfer.tables.shared_caches import check_writable

MEMORIES: dict[str, type[Memory]] = {m.name: m for m in (PinnedMemory, PageableMemory, MmapMemory, DeviceMemory)}


class Saving(Planes):
    """The part of a :class:`~speedtransfer.Table` that saves it, and makes one of an array or of a file."""

    def save(self, path: PathLike) -> None:
        """Write the weights to a ``.npy`` or ``.safetensors`` file, streamed; an old file stays whole until the end.

        int8 and float8 rows that have scales ("weight.scale") are written with them, which `load` finds again; where blocks
        of columns are not all as wide that raises `InvalidValueError`. Rows of 24 bits are written with the last 8
        ("weight.low"), which `load` finds again; `open` and other programs read the bfloat16 alone.
        """
        path = check_path(path)
        for own in [*self._place.files, self.path]:
            if own is not None and path.exists() and path.samefile(own):
                remedy = (
                    "which has every change; use flush()" if self.writable else "which is read in place; choose another"
                )
                raise StorageError(f"{str(path)!r} is the table's own file, {remedy}")
        # Rows of a parent process that have missed steps are copied.
        if self.in_parts or not self.writable:
            rows = row_chunks(self.num_rows, self.dim * self.dtype.itemsize)
            chunks = (self.chunk("weight", part) for part in rows)
        else:
            weight = self.plane("weight")
            chunks = (weight[rows].cpu() for rows in plane_chunks(weight))
        metadata = dict[str, str]()
        tensors: list[files.Written] = [("weight", self.dtype, (self.num_rows, self.dim), chunks)]
        if self.dtype in SCALED_DTYPES and SCALES in self.planes:
            scales = self.stored(SCALES)
            if path.suffix == ".npy" and self.dtype not in FLOAT8_DTYPES:
                raise InvalidValueError(
                    f"path is {str(path)!r} but int8 rows have scales, and a .npy file holds one array; save a .safetensors "
                    "file, or what they are (np.save(path, emb.weight.detach()))"
                )
            if scales.shape[1] and self.dim % scales.shape[1]:
                raise InvalidValueError(
                    f"rows of {self.dim} values have {scales.shape[1]} scales, whose blocks are not all as wide, which "
                    "load and open refuse; make the rows with a scale_block that divides them, or use save_checkpoint"
                )
            rows = row_chunks(self.num_rows, scales.shape[1] * scales.element_size())
            chunks = (self.chunk(SCALES, part).cpu() for part in rows)
            tensors.append((SCALES, scales.dtype, tuple(scales.shape), chunks))
            # Columns that share a scale: their number does not follow from that of the scales.
            metadata = {SCALE_BLOCK: str(-(-self.dim // max(scales.shape[1], 1)))}
        if LOW_BITS in self.planes:
            low = self.stored(LOW_BITS)
            chunks = (self.chunk(LOW_BITS, part).cpu() for part in row_chunks(self.num_rows, self.dim))
            tensors.append((LOW_BITS, low.dtype, tuple(low.shape), chunks))
        files.write(path, tensors, metadata, grows=self.max_rows is not None)

    @classmethod
    def from_array(
        cls,
        array: Any,
        memory: MemoryName = "auto",
        path: PathLike | None = None,
        device: Device = None,
        *,
        copy: bool = True,
        layout: Layout = "planes",
        cache_rows: CacheRows = None,
        cache_counts: Any = None,
        max_rows: int | None = None,
    ) -> Self:
        """Make a table of a 2-D tensor or array.

        With ``copy=False`` a contiguous, writable array in ordinary memory becomes the table itself, where `memory` allows
        that ("pageable", or "auto" without CUDA): training then changes the array, as with ``nn.Embedding.from_pretrained``.
        As long as a tensor is kept that it was made of, each step catches up all idle rows; one of NumPy has them as stored.
        With `cache_rows` or `max_rows` it is copied.
        """
        tensor = array.detach() if isinstance(array, Tensor) else tensor_of(array)
        # Of classes whose memory says nothing, such as the weight of another table: what they hold.
        tensor = tensor if type(tensor) is Tensor else tensor.clone()
        check_values(tensor, "array")
        if tensor.dim() != 2:
            raise InvalidValueError(
                f"array has shape {tuple(tensor.shape)} but a table is 2-D; reshape it to (rows, dim)"
            )
        check_dtype(tensor.dtype)
        cache = check_cache(cache_rows, cache_counts, memory, len(tensor))
        size = len(tensor), tensor.shape[1] * tensor.element_size()
        place = open_memory(memory, path, device, size, layout, max_rows)
        ordinary = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_inference()
        if not copy and place.name == "pageable" and ordinary and cache is None and max_rows is None:
            place.adopt(tensor)
            made = cls.__new__(cls)._adopt(place, tensor)
            made._planes = {"weight": made.open_views.over_given(tensor)}
            see_others_in_memory(made)
            return made
        return cls._copied(place, tensor, tensor.dtype)._start_cache(cache)

    @classmethod
    def load(
        cls,
        path: PathLike,
        memory: MemoryName = "auto",
        device: Device = None,
        *,
        key: str | None = None,
        writable: Writable = False,
        layout: Layout = "planes",
        cache_rows: CacheRows = None,
        cache_counts: Any = None,
        max_rows: int | None = None,
    ) -> Self:
        """Read a table from a ``.npy`` or ``.safetensors`` file (`key` names the tensor of a file with several).

        With ``memory="mmap"`` the file itself is the table, and opening is instant. It is never changed, and what would change
        it raises (see `open`), unless `writable`.

        Parameters
        ----------
        path : path-like
        memory : {"auto", "pinned", "pageable", "mmap", "device"}
        device : torch.device, optional
        key : str, optional
        writable : bool or "shared"
            With ``memory="mmap"``: changes go to the file, for example to go on training it. True is refused for files that
            others use: those in caches of downloads (of Hugging Face, torch, ModelScope, ``~/.cache``; symbolic links are
            followed) and files with several hard links. "shared" opens those too.
        layout, cache_rows, cache_counts, max_rows : optional
            As in :class:`~speedtransfer.Table`; a file that is mapped grows only if it is writable.

        Raises
        ------
        StorageError, InvalidValueError, InvalidTypeError
            The file is missing, truncated or foreign, or may not be changed; it holds no 2-D array; its dtype has no table.
        """
        path = check_path(path, more=", or Table.open for several")
        check_writable(writable)
        if memory != "mmap":
            if writable:
                raise InvalidValueError(
                    f"writable is {writable!r} but memory={memory!r} has a copy of the rows, whose changes stay there; pass "
                    "memory='mmap', or leave writable out"
                )
            values = files.open_mapped(path, writable=False, key=key)[0]
            options: Any = {
                "layout": layout,
                "cache_rows": cache_rows,
                "cache_counts": cache_counts,
                "max_rows": max_rows,
            }
            table = cls.from_array(values, memory, device=device, **options)
            found = saved_planes(path, key)
            for name in (SCALES, LOW_BITS):
                if name in found:
                    beside = open_sources(cls, found, False, "cpu", None, None).plane(name)
                    table.add_plane(name, beside.shape[1], beside.dtype, beside)
            return table
        found = saved_planes(path, key)
        check_max_rows(max_rows, found["weight"][0].shape[0])
        if max_rows is not None and not writable:
            raise InvalidValueError(
                f"max_rows is {max_rows} but the file is only read (memory='mmap', writable={writable!r}) and cannot grow; "
                "pass writable=True, or leave max_rows out"
            )
        table = open_sources(cls, found, writable, device, cache_rows, cache_counts)
        table.layout, table._place.max_rows = layout, max_rows
        return table


def check_safetensors_path(path: PathLike) -> Path:
    """Return `path` if it ends in ``.safetensors``, or raise."""
    path = check_path(path)
    if path.suffix != ".safetensors":
        raise InvalidValueError(f"path {str(path)!r} has the suffix {path.suffix!r} but must end in .safetensors")
    return path


def open_memory(
    memory: MemoryName,
    path: PathLike | None,
    device: Device,
    size: tuple[int, int],
    layout: Layout,
    max_rows: int | None,
) -> Memory:
    """Return the memory for a table of `size`, rows and bytes of each."""
    check_layout(layout)
    num_rows, row_bytes = size
    check_max_rows(max_rows, num_rows)
    if memory == "auto":
        # Adam's two planes come beside the weights at the first step, and page-locked memory is lost to everything else.
        fits = 3 * max(num_rows, max_rows or 0) * row_bytes <= 0.8 * physical_bytes()
        memory = "pinned" if fits and cuda_status().available else "pageable"
    if not isinstance(memory, str) or memory not in MEMORIES:
        near = suggest(memory if isinstance(memory, str) else "", ["auto", *MEMORIES])
        raise InvalidValueError(f"memory is {memory!r}, not one of its values{near}")
    if path is not None:
        path = check_path(path)
    place = MEMORIES[memory](resolve_device(device), path)
    place.layout, place.max_rows = layout, max_rows
    return place
