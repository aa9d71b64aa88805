"""Open tables in files that exist, to be read in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from speedtransfer.cuda import resolve_device
from speedtransfer.dtypes import FLOAT8_DTYPES, FLOAT8_SCALE, SCALE_DTYPES, SCALED_DTYPES, TABLE_DTYPES
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.tables import files
from speedtransfer.tables.mapped_file import MmapMemory
from speedtransfer.tables.opened_files import LOW_BITS, SCALES, OpenedMemory
from speedtransfer.tables.planes import CacheRows, Device, DType, PathLike, Planes, Writable
from speedtransfer.tables.row_cache import check_cache
from speedtransfer.tables.shared_caches import check_not_shared, check_writable
from speedtransfer.tables.sources import Catalog, Source

Opened = TypeVar("Opened", bound=Planes)
# In the metadata of a file that `Table.save` has written.
SCALE_BLOCK = "scale_block"


class Opening(Planes):
    """The part of a :class:`~speedtransfer.Table` that opens files in place."""

    @classmethod
    def open(
        cls,
        parts: PathLike | Sequence[PathLike | tuple[PathLike, str]],
        key: str | None = None,
        *,
        scales: PathLike | Sequence[PathLike | tuple[PathLike, str]] | None = None,
        scale_key: str | None = None,
        scale_dtype: DType | None = None,
        scale_block: int | None = None,
        writable: Writable = False,
        device: Device = None,
        cache_rows: CacheRows = None,
        cache_counts: Any = None,
    ) -> Self:
        """Open a table in the files that it was published in: its rows are read where they are, and never changed.

        Headers are read and checked, and no rows: opening takes milliseconds and no memory, whatever the size. Rows are read
        from the disk when they are gathered, and stay in the system's cache of files, which all processes share. Files that
        are changed, or made shorter, while a table reads them give other rows, or end the process.

        Whatever writes to the rows raises: `scatter`, `fill_`, training. What shows all rows of a table in one tensor of one
        file (`torch`, `numpy`) is a view of it, and of others a copy, where that fits into memory; `save` streams.

        Parameters
        ----------
        parts : path-like, or sequence of path-like and of (path-like, str)
            A ``.safetensors`` or ``.npy`` file; several, whose rows follow one another; pairs of a file and the name of a
            tensor in it; a ``model.safetensors.index.json``; or a folder with an index or with ``.safetensors`` files.
        key : str, optional
            The name of the tensor, where `parts` has none. With ``{}`` in the place of a number it names several, in the order
            of their numbers: ``"model.layers.1.ngram.shard_{}.weight"``. By default the only tensor of a file, or "weight".
        scales, scale_key : optional
            The same for the scales of float8 rows, by which their values are multiplied: ``(rows,)``, one for each row;
            ``(rows, blocks)``, one for each of as many blocks of columns; or one value for all rows of a part, or for all. In
            `parts`, if only `scale_key` is given. They become the plane "weight.scale", and `Embedding.from_pretrained`
            decodes with them; `gather` returns rows as they are stored.
        scale_dtype : torch.dtype, optional
            ``torch.float8_e8m0fnu``: scales in files that hold them as U8 are of that dtype, as in the MX formats.
        scale_block : int, optional
            The columns that share a scale, where their number is no power of two: 2 scales of 160 columns may belong to 80
            each, or to 128 and 32, which is refused.
        writable : bool or "shared"
            True: changes go to the file, as in ``load(path, memory="mmap", writable=True)``. For one tensor without scales.
        device : torch.device, optional
            The compute device that rows are gathered to: a CUDA device if there is one, else the CPU.
        cache_rows, cache_counts : optional
            A cache of the rows used most on the compute device, as in :class:`~speedtransfer.Table`.

        Raises
        ------
        StorageError
            A file is missing, truncated or no such file; with `writable`, it lies in a cache that other programs use.
        InvalidValueError, InvalidTypeError
            Tensors that are missing, or do not make up one table; an argument that breaks a rule.
        """
        check_writable(writable)
        catalog = Catalog()
        weights = catalog.find(parts, key, "parts", TABLE_DTYPES)
        _check_alike(weights)
        sources = {"weight": weights}
        if scales is not None or scale_key is not None:
            if scale_dtype not in (None, FLOAT8_SCALE):
                raise InvalidValueError(
                    f"scale_dtype is {scale_dtype!r} but must be None or torch.float8_e8m0fnu; pass one of them"
                )
            dtypes = SCALE_DTYPES if scale_dtype is None else (scale_dtype, torch.uint8)
            found = catalog.find(parts if scales is None else scales, scale_key, "scales", dtypes)
            found = [source._replace(dtype=scale_dtype or source.dtype) for source in found]
            _check_scales(found, weights, scale_block)
            sources[SCALES] = found
        for name, given in (("scale_dtype", scale_dtype), ("scale_block", scale_block)):
            if given is not None and SCALES not in sources:
                raise InvalidValueError(f"{name} is {given} but there are no scales; pass scales or scale_key too")
        return open_sources(cls, sources, writable, device, cache_rows, cache_counts)


def open_sources(
    kind: type[Opened], sources: dict[str, list[Source]], writable: Writable, device: Device, rows: Any, counts: Any
) -> Opened:
    """Open tensors that fit together as a table of a `kind`; `rows` and `counts` are those of its cache."""
    weights = sources["weight"]
    cache = check_cache(rows, counts, "mmap", sum(source.shape[0] for source in weights))
    target = resolve_device(device)
    if not writable:
        return opened(kind, OpenedMemory(target, sources))._start_cache(cache)
    if len(weights) > 1 or len(sources) > 1:
        what = f"{len(weights)} tensors" if len(weights) > 1 else "scales" if SCALES in sources else "24 bits"
        raise InvalidValueError(
            f"writable is {writable!r} but rows in {what} are only read; copy them into one file first: "
            "Table.open(parts).save(path)"
        )
    (only,) = weights
    check_not_shared(only.path, writable)
    place = MmapMemory(target, only.path)
    return kind.__new__(kind)._adopt(place, place.open(only.key))._start_cache(cache)


def opened(kind: type[Opened], place: OpenedMemory) -> Opened:
    """Return a table of a `kind` whose rows are read in place."""
    planes = place.open()
    table = kind.__new__(kind)._adopt(place, planes["weight"])
    table._planes.update(planes)
    table._unchanged = table.version
    return table


def saved_planes(path: Path, key: str | None) -> dict[str, list[Source]]:
    """Return the tensor of a table in a file, and what `Table.save` writes beside rows of 8 or 24 bits, by plane."""
    header = files.open_header(path)
    weight = Source(path, key, *files.find_tensor(path, header, key))
    _check_alike([weight])
    low = f"{key or 'weight'}{LOW_BITS.removeprefix('weight')}"
    if weight.dtype == torch.bfloat16 and low in header.tensors:
        bits = Source(path, low, *files.find_tensor(path, header, low, (torch.int8,)))
        if bits.shape != weight.shape:
            raise InvalidValueError(
                f"{bits} has shape {bits.shape} but the rows that it belongs to {weight.shape}; save the table again"
            )
        return {"weight": [weight], LOW_BITS: [bits]}
    beside = f"{key or 'weight'}{SCALES.removeprefix('weight')}"
    if weight.dtype not in SCALED_DTYPES or beside not in header.tensors:
        return {"weight": [weight]}
    if weight.dtype == torch.int8:
        scales = Source(path, beside, *files.find_tensor(path, header, beside, (torch.float32,)))
        if scales.shape != (weight.shape[0], 1):
            raise InvalidValueError(
                f"{scales} has shape {scales.shape} but int8 rows of shape {weight.shape} have one scale each; save the table "
                "again"
            )
        return {"weight": [weight], SCALES: [scales]}
    scales = Source(path, beside, *files.find_tensor(path, header, beside, SCALE_DTYPES))
    said = header.metadata.get(SCALE_BLOCK) if isinstance(header.metadata, dict) else None
    _check_scales([scales], [weight], int(said) if isinstance(said, str) and said.isdecimal() else None)
    return {"weight": [weight], SCALES: [scales]}


def _check_alike(sources: Sequence[Source]) -> None:
    """Raise unless tensors are 2-D, of one dtype, and as wide."""
    first = sources[0]
    for source in sources:
        if len(source.shape) != 2:
            raise InvalidValueError(
                f"{source} holds an array of shape {source.shape} but a table is 2-D; reshape it first, or pass other tensors"
            )
        if source.dtype != first.dtype:
            raise InvalidTypeError(
                f"{source} holds {source.dtype} but {first} holds {first.dtype}; pass tensors of one table"
            )
        if source.shape[1] != first.shape[1]:
            raise InvalidValueError(
                f"{source} has rows of {source.shape[1]} values but {first} of {first.shape[1]}; pass tensors of one table"
            )


def _check_scales(scales: Sequence[Source], weights: Sequence[Source], scale_block: int | None) -> None:
    """Raise unless scales fit the weights, each for `scale_block` columns if that is known."""
    dtype, dim, num_rows = weights[0].dtype, weights[0].shape[1], sum(source.shape[0] for source in weights)
    if dtype not in FLOAT8_DTYPES:
        raise InvalidTypeError(
            f"{weights[0]} holds {dtype} but scales are for rows of float8_e4m3fn or float8_e5m2; leave scales out"
        )
    first = scales[0]
    for source in scales:
        if source.dtype != first.dtype:
            raise InvalidTypeError(
                f"{source} holds {source.dtype} but {first} holds {first.dtype}; pass tensors of one table"
            )
    if all(torch.Size(source.shape).numel() == 1 for source in scales):
        if len(scales) not in (1, len(weights)):
            raise InvalidValueError(
                f"there are {len(scales)} scales of one value for {len(weights)} tensors of rows; pass one for each, or one"
            )
        return
    for source in scales:
        if len(source.shape) not in (1, 2) or source.shape[1:] != first.shape[1:]:
            raise InvalidValueError(
                f"{source} has shape {source.shape} and {first} {first.shape} but scales are all (rows,) or (rows, blocks); "
                "pass tensors of one table"
            )
    rows, blocks = sum(source.shape[0] for source in scales), first.shape[1] if len(first.shape) == 2 else 1
    if rows != num_rows:
        raise InvalidValueError(
            f"there are scales for {rows} rows but {num_rows} rows of weights ({first}, {weights[0]}); a row has a scale, or "
            "one for each block of its columns"
        )
    if blocks < 1 or dim % blocks:
        raise InvalidValueError(
            f"{first} has {blocks} scales a row but rows of {dim} values are not as many blocks of one size; decode the rows "
            "and pass the result"
        )
    size = dim // blocks
    if scale_block is not None and check_size(scale_block, "scale_block", 1) != size:
        raise InvalidValueError(
            f"scale_block is {scale_block} but {first} has {blocks} scales for rows of {dim} values, {size} for each; if "
            "their blocks are not all as wide, decode the rows and pass the result"
        )
    if scale_block is None and blocks > 1 and size & (size - 1):
        raise InvalidValueError(
            f"{first} has {blocks} scales for rows of {dim} values, which may be blocks of {size} or of other widths; pass "
            f"scale_block={size} if that is so, else decode the rows and pass the result"
        )
