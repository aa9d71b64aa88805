"""Named planes over the same rows in one memory: add, fill and copy them, and view them without a copy."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import (
    WARM_UP,
    check_not_capturing,
    mapped_view,
    num_replays,
    require_cuda,
    resolve_device,
    to_cupy,
    wait_until_filled,
)
from speedtransfer.dtypes import TABLE_DTYPES
from speedtransfer.engines import Engine, engine_names, make_engine
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.tables.chunks import check_fill, check_floating, copy_plane, fill_plane
from speedtransfer.tables.memories import Memory
from speedtransfer.tables.padded import PaddedStats
from speedtransfer.tables.records import check_layout

# The class below has attributes called `torch`, `device` and `dtype`: inside its body these names are not the types.
DType: TypeAlias = torch.dtype
TorchDevice: TypeAlias = torch.device
Device: TypeAlias = torch.device | str | int | None
Generator: TypeAlias = torch.Generator
PathLike: TypeAlias = str | os.PathLike[str]


@dataclass
class TableStats:
    """Rows and bytes moved since the table was made or `Table.reset_stats` was called; every plane's rows count.

    Attributes
    ----------
    gathered_rows, scattered_rows : int
        Rows moved to and from the compute device (a row of three planes moved in one call counts once).
    gathered_bytes, scattered_bytes : int
        Their payload in bytes, all planes.
    cache_hits, cache_misses : int
        Rows served by a device cache, and not; zero without one.
    """

    gathered_rows: int = 0
    gathered_bytes: int = 0
    scattered_rows: int = 0
    scattered_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0


class Planes:
    """The part of a :class:`~speedtransfer.Table` that handles whole planes."""

    # Whether the host moves rows for a CUDA device: ids that only this knows would have to come to the host first.
    moves_on_host: bool

    def _adopt(self, place: Memory, weight: Tensor) -> Self:
        """Take `weight`, a ``(num_rows, dim)`` tensor allocated by `place`, as the first plane."""
        self._place = place
        self._set_engine(make_engine(place.name, place.device))
        self._planes = {"weight": wait_until_filled(weight)}
        self._writes = 0
        # Set once a write was captured in a CUDA graph, whose replays the host does not see: what these use must stay.
        self._captured = False
        self._outlived: list[object] = []
        # Called with row numbers, or None for all rows, before these are read or written from outside: by `Rows`, while it
        # lets idle rows miss steps. What is moved as it is stored (`read`, `write`, ``check=False``) does without.
        self._catch_up: Callable[[Tensor | None], None] | None = None
        self._stats, self._padded_stats = TableStats(), PaddedStats()
        return self

    def _set_engine(self, engine: Engine) -> None:
        self._engine = engine
        self.moves_on_host = engine.device.type == "cuda" and engine.name == "staged"

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
        """File of the weight plane, for a "mmap" table."""
        return self._place.path

    @property
    def engine(self) -> str:
        """Name of the engine that moves rows; "auto" chooses for each call by what was measured on this machine.

        Set it to move them by a certain one ("mapped", "staged", "host", "reference", where `memory` and `device` allow
        it), or by one made by hand, of another launch or buffer size; rows and results do not depend on it.
        """
        return self._engine.name

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
    def layout(self) -> str:
        """How planes that are added together lie, "planes" or "rows"; set it for those that are added from now on."""
        return self._place.layout

    @layout.setter
    def layout(self, layout: str) -> None:
        self._place.layout = check_layout(layout)

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
        """A number that grows with every change of the weight plane made through the table or a torch view of it.

        Once a write was captured in a CUDA graph it grows with every replay of any.
        """
        return self._writes + self._planes["weight"]._version + (num_replays() if self._captured else 0)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        extra = f", path={str(self.path)!r}" if self.path else ""
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
        return self.add_planes({name: (width, dtype, fill)})[name]

    def add_planes(self, planes: Mapping[str, tuple[int | None, DType | None, float | Tensor]]) -> dict[str, Tensor]:
        """Add several planes, all or none: by name what `add_plane` takes. With layout "rows" they share a record a row."""
        if planes:
            check_not_capturing(f"adding planes ({', '.join(planes)})", WARM_UP)
        specs = dict[str, tuple[int, DType]]()
        for name, (width, dtype, fill) in planes.items():
            if name in self._planes:
                raise InvalidValueError(f"plane {name!r} exists; drop it first with drop_plane, or choose another name")
            width = self.dim if width is None else check_size(width, "width")
            specs[name] = width, check_dtype(self.dtype if dtype is None else dtype)
            check_fill(fill, (self.num_rows, width), specs[name][1])
        added = self._place.allocate_together(self.num_rows, specs)
        for name, plane in added.items():
            fill = planes[name][2]
            if isinstance(fill, Tensor):
                copy_plane(plane, fill)
            elif fill != 0:
                fill_plane(plane, _filler(fill))
            wait_until_filled(plane)
        self._planes.update(added)
        return added

    def drop_plane(self, name: str) -> None:
        """Forget a plane other than "weight"."""
        if name == "weight":
            raise InvalidValueError("plane 'weight' is the table itself; delete the table instead")
        self._check_plane(name)
        self._engine.wait()
        self._outlive(self._planes.pop(name))

    def plane(self, name: str) -> Tensor:
        """Return the whole of a plane, ``(num_rows, width)``, without a copy; it lives where the memory is."""
        if self._catch_up is not None:
            self._catch_up(None)
        self.wait()
        return self._planes[self._check_plane(name)]

    def stored(self, name: str) -> Tensor:
        """Return the whole of a plane as it is stored, whatever steps its rows have missed."""
        return self._planes[self._check_plane(name)]

    def take(self, name: str, values: Tensor) -> None:
        """Make the memory of `values`, of the plane's shape, dtype and device, that of the plane from now on."""
        self._engine.wait()
        self._writes += self.version + 1  # another tensor counts its changes from zero
        self._outlive(self._planes[self._check_plane(name)])
        self._planes[name] = wait_until_filled(values)

    def wait(self) -> None:
        """Block until the planes are up to date: on CUDA, rows that were scattered may still be on their way."""
        self._engine.wait()

    def _outlive(self, *parts: object) -> None:
        """Keep parts that are no longer used where a CUDA graph may still use their memory."""
        if self._captured:
            self._outlived.extend(parts)

    def _check_plane(self, name: str) -> str:
        if name not in self._planes:
            raise InvalidValueError(f"the table has no plane {name!r}{suggest(str(name), self._planes)}")
        return name

    # --- zero-copy views of the whole weight plane --------------------------------------------------------------------

    def torch(self) -> Tensor:
        """Return the weight plane as a tensor over the same memory, on the host unless `memory` is "device"."""
        return self.plane("weight")

    def numpy(self) -> np.ndarray:
        """Return the weight plane as an array over the same memory (host memories; NumPy has no bfloat16).

        A write to it between backward and step is not noticed, and the step overwrites it; one to `torch()` is.
        """
        weight = self.plane("weight")
        if weight.device.type != "cpu":
            raise InvalidValueError(f"the rows live on {weight.device}, not on the host; use .cupy() or .torch().cpu()")
        if weight.dtype == torch.bfloat16:
            raise InvalidTypeError("NumPy has no bfloat16; use .torch(), or .torch().view(torch.int16).numpy()")
        return weight.numpy()

    def cupy(self) -> Any:
        """Return the weight plane as a CuPy array over the same memory (memory "pinned" or "device", with CUDA)."""
        weight = self.plane("weight")
        require_cuda("Table.cupy()")
        if weight.device.type == "cpu":
            if self.memory != "pinned":
                raise InvalidValueError(f"CUDA cannot address memory={self.memory!r}; use 'pinned' or 'device'")
            weight = mapped_view(weight, self.device)
        return to_cupy(weight)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.plane("weight").__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.plane("weight").__dlpack_device__()

    # --- first values -------------------------------------------------------------------------------------------------

    def init_(self, function: Callable[[Tensor], Tensor | None]) -> Self:
        """Fill the weights by `function`, which gets chunks of rows as CPU tensors.

        It fills the ``(rows, dim)`` chunk in place or returns the values. It must treat rows alike: `xavier_uniform_` and
        others that look at the number of rows would see that of the chunk.
        """
        if self._place.of_parent:
            self._place.refuse_write()
        weight = self.plane("weight")
        fill_plane(weight, function)
        wait_until_filled(weight)
        self._writes += 1
        return self

    def zero_(self) -> Self:
        """Set every weight to zero."""
        return self.init_(lambda chunk: chunk.zero_())

    def fill_(self, value: float) -> Self:
        """Set every weight to `value`."""
        return self.init_(lambda chunk: chunk.fill_(value))

    def uniform_(self, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Self:
        """Draw every weight uniformly from ``[a, b)``: with one seed the numbers that torch draws for the whole array."""
        check_floating(self.dtype, "uniform_")
        return self.init_(lambda chunk: chunk.uniform_(a, b, generator=generator))

    def normal_(self, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Self:
        """Draw every weight from a normal distribution: with one seed the numbers that torch draws for the whole array."""
        check_floating(self.dtype, "normal_")
        return self.init_(lambda chunk: chunk.normal_(mean, std, generator=generator))

    # --- copies and devices -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write every change of a "mmap" table to the disk now; other memories have none."""
        self._engine.wait()
        self._place.flush()

    def to(self, device: Device) -> Self:
        """Make `device` the compute device and return the table; rows move only where `memory` is "device"."""
        target = resolve_device(device)
        if target != self.device:
            self._engine.wait()
            self._writes += self.version  # moved planes count their changes from zero again
            self._outlive(self._engine, *self._planes.values())
            self._planes = self._place.move_to(target, self._planes)
            name = self._engine.name
            self._set_engine(
                make_engine(self.memory, target, name if name in engine_names(self.memory, target) else None)
            )
        return self

    def astype(self, dtype: DType) -> Self:
        """Return a table of the same kind with the weights converted to `dtype` (a "mmap" one in a nameless file)."""
        return self._copied(self._place.anonymous_copy(), self.plane("weight"), check_dtype(dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = self.astype(self.dtype)
        memo[id(self)] = duplicate
        others = {name: plane for name, plane in self._planes.items() if name != "weight"}
        duplicate.add_planes({name: (plane.shape[1], plane.dtype, plane) for name, plane in others.items()})
        return duplicate


def _filler(value: float) -> Callable[[Tensor], Tensor]:
    return lambda chunk: chunk.fill_(value)


def check_dtype(dtype: Any) -> DType:
    """Return `dtype`, or raise `InvalidTypeError` where no table can hold it."""
    if not isinstance(dtype, torch.dtype) or dtype not in TABLE_DTYPES:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in TABLE_DTYPES))
        raise InvalidTypeError(f"dtype is {dtype!r} but a table holds one of torch's {names}; pass one of them")
    return dtype
