"""Give a table more rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from speedtransfer.cuda import WARM_UP, check_not_capturing, wait_until_filled
from speedtransfer.dtypes import bits_of
from speedtransfer.errors import DeviceError, InvalidValueError, check_size
from speedtransfer.tables.chunks import set_plane
from speedtransfer.tables.planes import Planes
from speedtransfer.tables.same_file import see_others


class Growing(Planes):
    """The part of a :class:`~speedtransfer.Table` that grows."""

    def grow(self, num_rows: int) -> None:
        """Give the table more rows, in all planes or, where there is no room, in none.

        New rows of the weights are zero, those of other planes what the plane was added with (zero, if that was a tensor). The
        weight of a module that has the table grows with it, and the state of its optimizer: new rows have missed no step.

        Memory "pageable" becomes longer where it is, and so do files ("mmap"), so that nothing is copied and tensors over
        the rows so far go on to read and write these. Other memories copy the rows; tensors from before keep the old ones.

        Parameters
        ----------
        num_rows : int
            Not fewer than now, and not more than `max_rows`.

        Raises
        ------
        InvalidValueError
            Fewer rows; more than `max_rows`, or a table without.
        HostMemoryError, StorageError
            There is no room in memory or on disk, or the rows are those of a file that cannot be changed so.
        DeviceError
            A CUDA graph writes the rows: its replays would not see the new ones.
        OptimizerError
            An optimizer steps.
        """
        handle = None if self._handle is None else self._handle()
        if handle is not None and handle.table is self:
            handle.grow(num_rows)
        else:
            self.lengthen(num_rows)

    def lengthen(self, num_rows: int, fills: Mapping[str, float | Tensor] | None = None) -> None:
        """Do so for the planes alone; `fills` has other values for new rows, by plane a number or a ``(width,)`` row."""
        num_rows = check_size(num_rows, "num_rows")
        check_not_capturing("growing a table", WARM_UP)
        self.check_writable()
        self._check_growth(num_rows, fills or {})
        if num_rows == self.num_rows:
            return
        self.end_snapshot()
        self._engine.wait()
        before, old = self.version, self._planes
        grown = self._place.grow(old, num_rows)
        for name, plane in grown.items():
            value = (fills or {}).get(name, self._fills.get(name, 0))
            new = plane[len(old[name]) :]
            # A page that is not written takes no room.
            if bits_of(value).any() if isinstance(value, Tensor) else value != 0:
                set_plane(new, value)
            wait_until_filled(plane)
            if self._place.maps_again:
                self.open_views.follow(old[name], plane)
        for log in self._all_logs():
            log.forget()
        # At once: other threads may be reading.
        self._planes = {name: grown[name] for name in old}
        self._writes += before + 1 - self.version
        see_others(self)
        for plane in old.values():
            self._release(plane)
        self._grow_cache(num_rows - len(old["weight"]))

    def _check_growth(self, num_rows: int, fills: Mapping[str, object]) -> None:
        """Raise unless the table may get `num_rows` rows."""
        for name in fills:
            self._check_plane(name)
        if num_rows < self.num_rows:
            raise InvalidValueError(
                f"num_rows is {num_rows} but the table has {self.num_rows} rows already, and never loses any; pass a larger "
                "num_rows, or make a new table"
            )
        if num_rows == self.num_rows:
            return
        if self.max_rows is None:
            raise InvalidValueError(
                f"num_rows is {num_rows} but the table was made to keep its {self.num_rows} rows; make it with max_rows (a "
                "Table), or the module with a vocabulary"
            )
        if num_rows > self.max_rows:
            raise InvalidValueError(
                f"num_rows is {num_rows} but the table was made with max_rows={self.max_rows}; make it with a larger one"
            )
        if self._captured:
            raise DeviceError(
                "a CUDA graph writes the rows of this table, and its replays would not see more of them; grow it before the "
                "capture"
            )

    def _grow_cache(self, more: int) -> None:
        """Let the cache have room for new rows too, where it had room for all so far and more was asked for."""
        cache, options = self._cache, self._cache_options
        if cache is None or options is None:
            return
        if options.counts is not None:
            # Nothing is known of new rows.
            counts = torch.cat((options.counts, options.counts.new_zeros(more)))
            self._cache_options = options = options._replace(counts=counts)
        if cache.capacity < self.num_rows - more or options.rows == cache.capacity:
            return
        # First what only the cache has.
        cache.shrink(0)
        self._stats.add(cache.counts())
        self._cache = None
        self._set_engine(cache.inner)
        self._start_cache(options)


def check_max_rows(max_rows: int | None, num_rows: int) -> None:
    """Raise unless a table of `num_rows` rows may be made for `max_rows`."""
    if max_rows is not None and check_size(max_rows, "max_rows") < num_rows:
        raise InvalidValueError(f"max_rows is {max_rows} but the table has {num_rows} rows; pass a larger max_rows")
