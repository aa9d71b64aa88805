"""View the weights of a table without a copy, fill, copy and move them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import mapped_view, require_cuda, resolve_device, to_cupy, wait_until_filled
from speedtransfer.dtypes import INTEGER_OF_SIZE, NUMPY_OF_TORCH
from speedtransfer.engines import engine_names, make_engine
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.tables.chunks import check_floating, fill_plane, plane_chunks
from speedtransfer.tables.opened_files import LOW_BITS, OpenedMemory
from speedtransfer.tables.opening import opened
from speedtransfer.tables.planes import Device, DType, Generator, Planes, check_dtype

# Of torch.nn.init: what these fill rows with depends on how many there are.
_OF_ALL_ROWS = "xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_ eye_ dirac_"


class WholePlanes(Planes):
    """The part of a :class:`~speedtransfer.Table` that handles the whole weight plane."""

    # --- zero-copy views of the whole weight plane --------------------------------------------------------------------

    def torch(self) -> Tensor:
        """Return the weight plane as a tensor over the same memory, on the host unless `memory` is "device".

        Where a table is read in place (`open`), a write to it changes what this process reads, and never the file; if its
        rows are in several tensors, it is a copy.
        """
        return self.plane("weight")

    def numpy(self) -> np.ndarray:
        """Return the weight plane as an array over the same memory (host memories; NumPy has no bfloat16 and no float8).

        That of a table which is read in place is read-only. A write to it between backward and step is not noticed, and the
        step overwrites it; one to `torch()` is.
        """
        if self.memory == "device" and self.device.type != "cpu":
            raise InvalidValueError(f"the rows live on {self.device}, not on the host; use .cupy() or .torch().cpu()")
        if self.dtype not in NUMPY_OF_TORCH:
            name, bits = str(self.dtype).removeprefix("torch."), INTEGER_OF_SIZE[self.dtype.itemsize]
            raise InvalidTypeError(f"NumPy has no {name}; use .torch(), or .torch().view({bits}).numpy()")
        weight = self.plane("weight")
        self._hand_out()
        array = weight.numpy()
        if not self.writable:
            array.flags.writeable = False
        return array

    def cupy(self) -> Any:
        """Return the weight plane as a CuPy array over the same memory (memory "pinned" or "device", with CUDA)."""
        require_cuda("Table.cupy()")
        weight = self.plane("weight")
        if weight.device.type == "cpu":
            if self.memory != "pinned":
                raise InvalidValueError(f"CUDA cannot address memory={self.memory!r}; use 'pinned' or 'device'")
            weight = mapped_view(weight, self.device)
        array = to_cupy(weight)
        self._hand_out()
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        self._hand_out()
        return self.plane("weight").__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.chunk("weight", slice(0, 0)).__dlpack_device__()

    def _hand_out(self) -> None:
        """Note that there is an array over the memory: writes to it cannot be detected, so no row may be cached."""
        self.end_snapshot()
        self._viewed = True
        if self._cache is not None:
            self._cache.shrink(0)

    # --- first values -------------------------------------------------------------------------------------------------

    def init_(self, function: Callable[[Tensor], Tensor | None]) -> Self:
        """Fill the weights by `function`, which gets chunks of rows as CPU tensors.

        It fills the ``(rows, dim)`` chunk in place or returns the values. It must treat rows alike.

        Raises
        ------
        InvalidValueError
            Of ``torch.nn.init`` one that looks at all rows (`xavier_uniform_`).
        InvalidTypeError
            No function; or rows are those of ids that come and go: ``torch.nn.init`` fills the weight of the module.
        """
        if not callable(function):
            raise InvalidTypeError(
                f"function is {function!r} but must take a chunk of rows and fill it; pass for instance torch.nn.init.normal_"
            )
        called = getattr(function, "func", function)
        name = getattr(called, "__name__", "")
        if name in _OF_ALL_ROWS.split() and getattr(called, "__module__", "") == "torch.nn.init":
            raise InvalidValueError(
                f"function is torch.nn.init.{name}, which looks at all rows, but gets them in chunks; call it with the weight "
                f"of the module: torch.nn.init.{name}(emb.weight)"
            )
        handle = None if self._handle is None else self._handle()
        if handle is not None and handle.table is self:
            handle.id_space.check_written("filled by its table")
        self.check_writable()
        self.end_snapshot()
        weight = self.plane("weight")
        fill_plane(weight, function)
        wait_until_filled(weight)
        if LOW_BITS in self.planes:
            wait_until_filled(self.plane(LOW_BITS).zero_())
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
        """Write every change of a "mmap" table to the disk now, with the steps that idle rows have missed.

        Other memories have no disk.
        """
        if self._catch_up is not None and self.writable:
            self._catch_up(None)
        self._engine.wait()
        self._place.flush()

    def to(self, device: Device) -> Self:
        """Make `device` the compute device and return the table; rows move only where `memory` is "device"."""
        target = resolve_device(device)
        if target != self.device:
            self.end_snapshot()
            self._engine.wait()
            before, name = self.version, self.engine
            engine = make_engine(self.memory, target, name if name in engine_names(self.memory, target) else None)
            self._outlive(self._engine, *self._planes.values())
            self._planes = self._place.move_to(target, self._planes)
            options, cache = self._cache_options, self._cache
            self._cache = None
            self._set_engine(engine)
            if cache is not None:
                self._stats.add(cache.counts())
                self._start_cache(options)
            self._writes += before + 1 - self.version  # moved planes count their changes from zero again
        return self

    def astype(self, dtype: DType) -> Self:
        """Return a table of the same kind with the weights converted to `dtype` (a "mmap" one in a nameless file).

        Of one that is read in place the copy is in ordinary memory.
        """
        check_dtype(dtype)
        place = self._place.anonymous_copy()
        weight = place.allocate("weight", self.num_rows, self.dim, dtype)
        for rows in plane_chunks(weight):
            weight[rows].copy_(self.chunk("weight", rows))
        return type(self).__new__(type(self))._adopt(place, weight)._start_cache(self._cache_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        place = self._place
        # A view of the rows may have been written to, which the files do not show.
        if isinstance(place, OpenedMemory) and self.version == self._unchanged:
            with contextlib.suppress(StorageError):
                duplicate = opened(type(self), place.reopened())._start_cache(self._cache_options)
                memo[id(self)] = duplicate
                return duplicate
        duplicate = self.astype(self.dtype)
        memo[id(self)] = duplicate
        others = {name: self._planes[name] for name in self.planes if name != "weight"}
        others.update({name: self.plane(name) for name in self._place.in_parts if name != "weight"})
        duplicate.add_planes({name: (plane.shape[1], plane.dtype, plane) for name, plane in others.items()})
        duplicate._fills.update(self._fills)
        return duplicate
