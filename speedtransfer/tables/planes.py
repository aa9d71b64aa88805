"""Named planes over the same rows in one memory: what they are, and how to add and drop them."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import WARM_UP, check_not_capturing, num_replays, wait_until_filled
from speedtransfer.dtypes import PLANE_DTYPES, TABLE_DTYPES
from speedtransfer.engines import CachedEngine, Engine, HostEngine, ReferenceEngine, engine_names, make_engine
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.once import fork_safe_lock
from speedtransfer.tables import stats
from speedtransfer.tables.aside import Scratch
from speedtransfer.tables.chunks import check_fill, copy_plane, plane_chunks, row_chunks, set_plane
from speedtransfer.tables.memories import Memory, check_room
from speedtransfer.tables.open_views import OpenViews
from speedtransfer.tables.page_advice import read_ahead
from speedtransfer.tables.records import Layout, blocks_of, check_layout
from speedtransfer.tables.row_cache import CacheOptions, cached_engine
from speedtransfer.tables.same_file import see_others
from speedtransfer.tables.snapshots import Snapshot
from speedtransfer.tables.stats import PaddedStats, TableStats
from speedtransfer.tables.write_log import Write, WriteLog

# The class below has attributes called `torch`, `device` and `dtype`: inside its body these names are not the types.
DType: TypeAlias = torch.dtype
TorchDevice: TypeAlias = torch.device
Device: TypeAlias = torch.device | str | int | None
Generator: TypeAlias = torch.Generator
PathLike: TypeAlias = str | os.PathLike[str]
# What the arguments `memory`, `cache_rows` and `writable` take.
MemoryName: TypeAlias = Literal["auto", "pinned", "pageable", "mmap", "device"]
CacheRows: TypeAlias = int | Literal["auto"] | None
Writable: TypeAlias = bool | Literal["shared"]


class Planes:
    """The part of a :class:`~speedtransfer.Table` that has the planes."""

    # Whether the host moves rows for a CUDA device: ids that only this knows would have to come to the host first.
    moves_on_host: bool
    # Whether rows are gathered by an index_select on the CPU and nothing else.
    _selects: bool
    # Of a table that is read in place: its version when it was opened.
    _unchanged = -1

    def _adopt(self, place: Memory, weight: Tensor) -> Self:
        """Take `weight`, a ``(num_rows, dim)`` tensor allocated by `place`, as the first plane."""
        self._place = place
        # The cache around the engine, and how it was asked for.
        self._cache: CachedEngine | None = None
        self._cache_options: CacheOptions | None = None
        self._set_engine(make_engine(place.name, place.device))
        self._planes = {"weight": wait_until_filled(weight)}
        # Whether the weights share records with planes that are added beside them.
        self.in_records = place.whole_records
        # What rows of other planes are at first, where that is a number.
        self._fills = dict[str, float]()
        self._writes = 0
        # Writes of rows that have begun, and that have ended: with their lock. Who reads, without it, reads again with it if
        # there was one.
        self._turn, self._begun, self._ended = fork_safe_lock(), 0, 0
        # Of those who read rows ahead of their use, while they live; and whether there ever was one.
        self._logs: weakref.WeakSet[WriteLog] = weakref.WeakSet()
        self.watched = False
        # What another thread reads as it was, while that goes on.
        self._snapshot: Snapshot | None = None
        self.open_views = OpenViews()
        # Set once there is an array over the memory: writes to it cannot be detected.
        self._viewed = False
        # Set once a write was captured in a CUDA graph, whose replays the host does not see: what these use must stay.
        self._captured = False
        self._outlived: list[object] = []
        # Called with row numbers, or None for all rows, before these are read or written from outside: by `Rows`, while it
        # lets idle rows miss steps. What is moved as it is stored (`read`, `write`, ``check=False``) does without.
        self._catch_up: Callable[..., None] | None = None
        # The same for rows that must not be written: takes row numbers, and returns them caught up, by plane as they are
        # stored; None: no row has missed any.
        self._caught_up: Callable[[Tensor], dict[str, Tensor] | None] | None = None
        # What ties a parameter to this table, if anything does: it grows with the table.
        self._handle: weakref.ref[Any] | None = None
        self._stats, self._padded_stats = TableStats(), PaddedStats()
        see_others(self)
        return self

    def _set_engine(self, engine: Engine) -> None:
        self.moves_on_host = engine.device.type == "cuda" and engine.name == "staged"
        if self.moves_on_host:
            # It may be about to write rows to a file that is opened next.
            weakref.finalize(self, engine.wait).atexit = False
        engine = self._place.wrap(engine)
        if self._cache is not None:
            self._cache.inner = engine
            engine = self._cache
        self._engine = engine
        self._selects = type(engine) in (HostEngine, ReferenceEngine) and engine.device.type == "cpu"

    def _start_cache(self, options: CacheOptions | None) -> Self:
        """Put a cache around the engine, if there are `options` for one; return the table."""
        if options is not None:
            self._cache_options = options
            self._cache = self._engine = cached_engine(self._engine, options, self._place, self._planes["weight"])
            self._selects = False
            if self._viewed:
                self._cache.shrink(0)
        return self

    @classmethod
    def _copied(cls, place: Memory, source: Tensor, dtype: DType) -> Self:
        """Make a table in `place` of the values of `source`, (num_rows, dim)."""
        weight = place.allocate("weight", source.shape[0], source.shape[1], dtype)
        copy_plane(weight, source)
        return cls.__new__(cls)._adopt(place, weight)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._planes["weight"].shape[0]

    @property
    def dim(self) -> int:
        """Values in a row of the weight plane."""
        return self._planes["weight"].shape[1]

    @property
    def dtype(self) -> DType:
        """Dtype of the weight plane."""
        return self._planes["weight"].dtype

    @property
    def device(self) -> TorchDevice:
        """The compute device: where `gather` puts rows and `scatter` takes them from."""
        return self._place.device

    @property
    def memory(self) -> str:
        """Name of the memory the rows live in."""
        return self._place.name

    @property
    def path(self) -> Path | None:
        """File of the weight plane, for a "mmap" table in one."""
        return self._place.path

    @property
    def folder(self) -> Path | None:
        """The folder of the files of a "mmap" table."""
        return self._place.folder

    @property
    def writable(self) -> bool:
        """Whether rows can be changed: not those of files that are read in place (`open`), nor those of a parent process."""
        return not self._place.refuses_writes

    @property
    def is_read_only(self) -> bool:
        """Whether the rows are those of files that are read in place (`open`)."""
        return self._place.read_only

    @property
    def in_parts(self) -> bool:
        """Whether the weights lie in several tensors of files (`open`), so that no tensor is a view of all of them."""
        return "weight" in self._place.in_parts

    @property
    def engine(self) -> str:
        """Name of the engine that moves rows; "auto" chooses for each call by what was measured on this machine.

        Set it to move them by a certain one ("mapped", "staged", "host", "reference", where `memory` and `device` allow
        it), or by one made by hand, of another launch or buffer size; rows and results do not depend on it.
        """
        return (self._engine if self._cache is None else self._cache.inner).name

    @engine.setter
    def engine(self, engine: str | Engine) -> None:
        if isinstance(engine, str):
            new = make_engine(self.memory, self.device, engine)  # which raises where such a one cannot serve
        elif engine.name in engine_names(self.memory, self.device) and engine.device == self.device:
            new = engine
            # It may outlive the table, whose memory is then given to others.
            weakref.finalize(self, engine.wait).atexit = False
        else:
            raise InvalidValueError(
                f"engine is {engine.name!r} on {engine.device}, which does not move rows of memory={self.memory!r} on "
                f"{self.device}; make one of {', '.join(engine_names(self.memory, self.device))}"
            )
        self._engine.wait()
        self._outlive(self._engine)
        self._set_engine(new)

    @property
    def takes_padding(self) -> bool:
        """Whether `read` and `write` take padded ids, so that the host need not know which rows a batch has."""
        return self._engine.takes_padding

    @property
    def runs_kernels(self) -> bool:
        """Whether `update` can let a kernel change rows where they are stored."""
        return self._engine.runs_kernels

    @property
    def layout(self) -> Layout:
        """How planes that are added together lie, "planes" or "rows"; set it for those that are added from now on."""
        return self._place.layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._place.layout = check_layout(layout)

    @property
    def max_rows(self) -> int | None:
        """How many rows `grow` may give the table; None: it was made to keep the number that it has."""
        return self._place.max_rows

    @property
    def cache_rows(self) -> int | None:
        """How many rows the cache on the compute device has room for; None: the table was made without one."""
        return None if self._cache is None else self._cache.capacity

    def shrink_cache(self, rows: int = 0) -> None:
        """Leave `rows` rows in the cache at most, and give the memory of the others back; 0: end the cache."""
        rows = check_size(rows, "rows")
        if self._cache is not None and self._cache_options is not None:
            self._cache.shrink(rows)
            self._cache_options = self._cache_options._replace(rows=self._cache.capacity)

    def _options_of_cache(self, num_rows: int) -> CacheOptions | None:
        """Return how a cache like this one is asked for, for a table of `num_rows` rows; None: there is none."""
        options = self._cache_options
        if options is not None and options.counts is not None and len(options.counts) != num_rows:
            return options._replace(counts=None)
        return options

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the planes, "weight" first."""
        return tuple(self._planes)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes (a page that was never written takes no room)."""
        return sum(plane.numel() * plane.element_size() for plane in self._planes.values())

    @property
    def version(self) -> int:
        """A number that grows with every change of a plane made through the table or a torch view of it.

        Once a write was captured in a CUDA graph it grows with every replay of any.
        """
        number = self._writes + (num_replays() if self._captured else 0)
        for plane in self._planes.values():
            number += plane._version
        return number

    @property
    def is_viewed(self) -> bool:
        """Whether there may be arrays over the memory, whose writes are not seen."""
        return self._viewed

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph may write rows, which the host does not see."""
        return self._captured

    def watch(self) -> WriteLog:
        """Return a log of the rows that are written from now on, kept as long as there is a reference to it."""
        log = WriteLog(self._planes, self.version, self.sign_of_views())
        with stats.logging:
            self._logs.add(log)
        self.watched = True
        return log

    @property
    def is_read_ahead(self) -> bool:
        """Whether there is a log: somebody has read rows, or will, before the writes that come first."""
        return self.watched and bool(self._all_logs())

    def discount(self, before: int, count: int) -> None:
        """Let it be known that the last `count` changes, from version `before` on, were none of the rows.

        A parameter may share the version of the weights, and a step changes its other memory.
        """
        for log in self._all_logs():
            log.discount(before, self.version, count)
        if self._snapshot is not None:
            self._snapshot.discount(before, self.version, count)

    def snapshot(
        self, most_bytes: int, memory: dict[str, Tensor], scratch: Scratch | None = None, own: Any = None
    ) -> Snapshot:
        """Return what reads all rows as they are now, until it is closed, while they are written; or its `own`, see `Rows`.

        `most_bytes`: how much may be copied aside for it. `memory`: what it reads into, by plane. There is one at a time; the
        next waits.
        """
        while True:
            self.end_snapshot()
            self.wait()
            with self._turn:
                # Another thread may have made one meanwhile.
                if self._snapshot is None:
                    self._snapshot = Snapshot(self, most_bytes, memory, scratch, own)
                    self.watched = True
                    return self._snapshot

    @property
    def turn(self) -> AbstractContextManager[object]:
        """What whoever writes rows holds meanwhile."""
        return self._turn

    @property
    def has_snapshot(self) -> bool:
        """Whether another thread reads the rows as they were."""
        return self._snapshot is not None

    def end_snapshot(self) -> None:
        """Wait until nobody reads the rows as they were: before a plane is changed as a whole."""
        if self._snapshot is not None:
            self._snapshot.wait()

    def _all_logs(self) -> list[WriteLog]:
        with stats.logging:
            return list(self._logs)

    def written_since(self, log: WriteLog) -> list[Write] | None:
        """Return the writes since `log` was made; None: any row may have been written."""
        return log.written(self._planes, self.version, self.sign_of_views())

    def sign_of_views(self) -> int | None:
        """Return a number that changes when rows may have been written unseen, by arrays of views; None: at any time."""
        return None if self._viewed else self.open_views.sign(self._planes.values())

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        extra = f", path={str(self.path)!r}" if self.path else ""
        if len(self._place.files) > 1:
            extra += f", path={str(self._place.files[0])!r} and {len(self._place.files) - 1} more"
        if not self.writable:
            extra += ", writable=False"
        if self._place.max_rows is not None:
            extra += f", max_rows={self._place.max_rows}"
        if self.cache_rows is not None:
            extra += f", cache_rows={self.cache_rows}"
        return (
            f"{type(self).__name__}({self.num_rows}, {self.dim}, dtype={self.dtype}, memory={self.memory!r}{extra}, "
            f"device='{self.device}', planes={list(self.planes)})"
        )

    # --- planes -------------------------------------------------------------------------------------------------------

    def add_plane(
        self, name: str, width: int | None = None, dtype: DType | None = None, fill: float | Tensor = 0
    ) -> Tensor:
        """Add a plane of `width` values a row, each `fill`, in the table's memory, and return a view of the whole of it.

        Parameters
        ----------
        name : str
            A new name.
        width : int, optional
            Default: `dim`.
        dtype : torch.dtype, optional
            Default: that of the weights.
        fill : float or Tensor
            A number, or a ``(num_rows, width)`` tensor to copy.

        Raises
        ------
        InvalidValueError, InvalidTypeError
            A plane of that name exists; a width, dtype or `fill` that breaks a rule.
        """
        if not isinstance(name, str):
            raise InvalidTypeError(f"name is {name!r} but planes are named by strings; pass one, such as 'exp_avg'")
        return self.add_planes({name: (width, dtype, fill)})[name]

    def add_planes(
        self, planes: Mapping[str, tuple[int | None, DType | None, float | Tensor]], beside_weights: bool = False
    ) -> dict[str, Tensor]:
        """Add several planes, all or none: by name what `add_plane` takes.

        With layout "rows" they share a record a row, also with the weights if these are `in_records` and they are to be used
        `beside_weights`. Nobody may have a view of the weights for that, nor other planes share their records.
        """
        if planes:
            self.check_writable()
            check_not_capturing(f"adding planes ({', '.join(planes)})", WARM_UP)
        specs = dict[str, tuple[int, DType]]()
        for name, (width, dtype, fill) in planes.items():
            if name in self._planes:
                raise InvalidValueError(f"plane {name!r} exists; drop it first with drop_plane, or choose another name")
            width = self.dim if width is None else check_size(width, "width")
            specs[name] = width, check_dtype(self.dtype if dtype is None else dtype, PLANE_DTYPES)
            check_fill(fill, (self.num_rows, width), specs[name][1])
        self._place.check_room_beside(self._planes, self.num_rows, specs)
        joins = bool(planes) and beside_weights and self.in_records
        if joins:
            self.end_snapshot()
        with self._turn if joins else contextlib.nullcontext():
            moved = self._weights_to_move() if joins else {}
            fills = {**moved, **{name: fill for name, (*_, fill) in planes.items()}}
            shapes = {name: (plane.shape[1], plane.dtype) for name, plane in moved.items()}
            added = self._place.allocate_together(self.num_rows, {**shapes, **specs})
            for name, plane in added.items():
                fill = fills[name]
                if name in moved:
                    _copy_written(plane, moved[name])
                elif isinstance(fill, Tensor):
                    copy_plane(plane, fill)
                elif fill != 0:
                    set_plane(plane, fill)
                wait_until_filled(plane)
            before = self.version
            # A new dict: other threads may be reading.
            self._planes = {**self._planes, **added}
            self._writes += before - self.version  # what has filled them was no change
        self._fills.update({name: fill for name, fill in fills.items() if not isinstance(fill, Tensor)})
        for plane in moved.values():
            self._release(plane)
        return {name: added[name] for name in planes}

    def _weights_to_move(self) -> dict[str, Tensor]:
        """Return the planes of the weights, if their rows may go elsewhere."""
        weights = {name: plane for name, plane in self._planes.items() if name.partition(".")[0] == "weight"}
        together = next(block.planes for block in blocks_of(self._planes) if "weight" in block.planes)
        if self.is_viewed or self.has_views or self._snapshot is not None or not weights.keys() >= together.keys():
            return {}
        self._engine.wait()
        return weights

    def drop_plane(self, name: str) -> None:
        """Forget a plane other than "weight"."""
        if name == "weight":
            raise InvalidValueError("plane 'weight' is the table itself; delete the table instead")
        self._check_plane(name)
        # A child of fork that does without a plane changes none of its parent.
        if self._place.read_only:
            self.check_writable()
        self.end_snapshot()
        self._engine.wait()
        dropped = self._planes[name]
        self._planes = {other: plane for other, plane in self._planes.items() if other != name}
        self._fills.pop(name, None)
        self._release(dropped)
        self._writes += dropped._version  # its changes count on
        self._outlive(dropped)

    def plane(self, name: str) -> Tensor:
        """Return the whole of a plane, ``(num_rows, width)``, without a copy; it lives where the memory is.

        Of rows that lie in several tensors of files (`open`) it is a copy; so it is in a child of fork of rows that are those
        of its parent and have missed steps. HostMemoryError: that does not fit.
        """
        copied = self._copy_caught_up(self._check_plane(name), 0, self.num_rows)
        if copied is not None:
            return copied
        if self._catch_up is not None:
            self._catch_up(None)
        self.wait()
        if name not in self._place.in_parts:
            return self.view(name)
        plane = self._planes[name]
        check_room(plane.nbytes, f"all rows of plane {name!r}")
        return self._place.in_parts[name].rows(0, len(plane))

    def stored(self, name: str) -> Tensor:
        """Return the whole of a plane as it is stored, whatever steps its rows have missed.

        Of rows that lie in several tensors of files it is a placeholder, on the meta device.
        """
        return self._planes[self._check_plane(name)]

    def view(self, name: str) -> Tensor:
        """Return what `stored` does, to somebody who may keep it; as long as it is kept `has_views`."""
        return self.open_views.of(self.stored(name))

    def is_in(self, storage: Any) -> bool:
        """Tell whether a storage is that of a plane, or of a view of one."""
        own = any(
            plane.untyped_storage()._cdata == storage._cdata for plane in self._planes.values() if not plane.is_meta
        )
        return own or self.open_views.have(storage)

    @property
    def has_views(self) -> bool:
        """Whether somebody has a tensor over the memory, which shows rows as they are stored."""
        return self.open_views.exist(self._planes.values())

    def chunk(self, name: str, rows: slice) -> Tensor:
        """Return the rows ``rows.start`` to ``rows.stop`` of a plane: a view, or a copy as by `plane`, which always fits."""
        parts = self._place.in_parts.get(name)
        if parts is not None:
            return parts.rows(rows.start, min(rows.stop, self.num_rows))
        copied = self._copy_caught_up(self._check_plane(name), rows.start, min(rows.stop, self.num_rows))
        if copied is not None:
            return copied
        chunk = self.plane(name)[rows]
        read_ahead(chunk)
        return chunk

    def _copy_caught_up(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return a copy of rows that have missed steps and cannot be written; None: `plane` catches up, if that is needed."""
        if self._caught_up is None or not self._place.refuses_writes:
            return None
        stored = self._planes[name]
        check_room(stored[start:stop].nbytes, f"{stop - start} rows")
        copied: Tensor | None = None
        row_bytes = max(self.nbytes // max(self.num_rows, 1), 1)
        for part in row_chunks(stop - start, row_bytes):
            found = self._caught_up(torch.arange(start + part.start, start + part.stop, device=self.device))
            if found is None:
                return None
            if copied is None:
                copied = torch.empty((stop - start, stored.shape[1]), dtype=stored.dtype, device=stored.device)
            copied[part] = found[name]
        return copied

    def check_writable(self) -> None:
        """Raise where nothing can change the rows.

        StorageError: they are read in place from files. DeviceError: a child of fork shares them with its parent.
        """
        if self._place.refuses_writes:
            handle = None if self._handle is None else self._handle()
            self._place.refuse_write("this table" if handle is None else str(handle))

    def take(self, name: str, values: Tensor) -> None:
        """Make the memory of `values`, of the plane's shape, dtype and device, that of the plane from now on."""
        self.check_writable()
        self.end_snapshot()
        self._engine.wait()
        before = self.version
        old = self._planes[self._check_plane(name)]
        self._release(old)
        self._outlive(old)
        self._place.adopt(values)
        values = self.open_views.over_given(wait_until_filled(values))
        self._planes = {**self._planes, name: values}
        self._writes += before + 1 - self.version  # another tensor counts its changes from zero

    def wait(self) -> None:
        """Block until the planes are up to date: on CUDA, rows that were scattered may still be on their way."""
        self._engine.wait()

    def _release(self, plane: Tensor) -> None:
        """Have the cache give the memory for a plane back that is no longer one."""
        if self._cache is not None:
            self._cache.release(plane)

    def _outlive(self, *parts: object) -> None:
        """Keep parts that are no longer used where a CUDA graph may still use their memory."""
        if self._captured:
            self._outlived.extend(parts)

    def _check_plane(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._planes:
            raise InvalidValueError(f"the table has no plane {name!r}{suggest(str(name), self._planes)}")
        return name


def _copy_written(target: Tensor, source: Tensor) -> None:
    """Copy a plane to one of zeros, of which those of the source go on taking no room in a file."""
    for rows in plane_chunks(source):
        if source[rows].contiguous().view(torch.uint8).any():
            target[rows] = source[rows]


def check_dtype(dtype: Any, known: Collection[DType] = TABLE_DTYPES) -> DType:
    """Return `dtype`, or raise `InvalidTypeError` where no table can hold it."""
    if not isinstance(dtype, torch.dtype) or dtype not in known:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in known))
        raise InvalidTypeError(f"dtype is {dtype!r} but a table holds one of torch's {names}; pass one of them")
    return dtype
