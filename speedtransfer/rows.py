"""The rows of a table as an optimizer computes with them: the one way in and out for handles and their state.

A plane ("weight", "exp_avg") is one plane of the table, or several where a codec stores it: "weight" and "weight.scale".
Rows are decoded and encoded on the compute device: the encoded form is what crosses the bus.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedtransfer.idle import Lag
from speedtransfer.progress import ByteProgress
from speedtransfer.stored_planes import StoredPlanes
from speedtransfer.tables import Table, row_chunks

LAST_STEP = "idle.last_step"  # the plane: int32, the last step that each row has taken


class Rows(StoredPlanes):
    """Reads and writes rows of a table's planes; its parameters are those of :class:`StoredPlanes`.

    A read is two parts: `fetch` gathers rows as they are stored, and may run ahead of their use; `finish` decodes them and,
    where idle rows lag behind (``idle="exact"``), applies the steps that they have missed.
    """

    def __init__(
        self, table: Table, storage_dtype: torch.dtype | None = None, state_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(table, storage_dtype, state_dtype)
        self.lag: Lag | None = None
        # Other threads may read rows (evaluation) while this one trains them.
        self.lock = threading.RLock()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def read(self, ids: Tensor, planes: Sequence[str] = ("weight",)) -> dict[str, Tensor]:
        """Return the rows `ids` (n,), known to be good, of each plane: ``(n, *tail)`` on the compute device.

        They are as after all steps so far: where some lag behind, those of every plane come along.
        """
        if not self.lag:
            return self.finish(self.fetch(ids, planes))
        with self.lock:
            return self.finish(self.fetch(ids, tuple(self._codecs)))

    def fetch(self, ids: Tensor, planes: Sequence[str]) -> dict[str, Tensor]:
        """Gather the rows `ids` (n,), known to be good, as they are stored; on any thread and stream."""
        return self.table.read(ids, planes if self._as_stored else self._stored_names(planes))

    def finish(self, fetched: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the rows that `fetch` has returned, and catch up those that came with their last step."""
        rows = fetched
        if not self._as_stored:
            rows = {name: self.decode(name, self._parts_of(name, fetched)) for name in self._codecs if name in fetched}
        last = rows.pop(LAST_STEP, None)
        if last is not None and self.lag is not None:
            self.lag.catch_up(rows, last)
        return rows

    def write(self, ids: Tensor, rows: dict[str, Tensor], step: Any = None) -> None:
        """Set the rows `ids` (n,), none twice, of each plane to ``(n, *tail)`` values on the compute device.

        Encoded planes are rounded stochastically, every write anew. `step`: what the step that made the values does to idle
        rows, recorded once they are written.
        """
        if self.lag is None:
            self._write(ids, rows)
            return
        with self.lock:  # the record last: where the write fails there was no step
            if step is not None:
                self._mark_steps()
            if LAST_STEP in self._codecs:
                now = self.lag.now + (step is not None)
                rows[LAST_STEP] = torch.full((ids.shape[0], 1), now, dtype=torch.int32, device=ids.device)
            self._write(ids, rows)
            if step is not None:
                self.lag.record(step)

    def _write(self, ids: Tensor, rows: dict[str, Tensor]) -> None:
        if self._as_stored:
            encoded = {name: values if values.is_contiguous() else values.contiguous() for name, values in rows.items()}
        else:
            encoded = {}
            for name, values in rows.items():
                encoded.update({name + suffix: part for suffix, part in self.encode(name, values, ids).items()})
        self.table.write(ids, encoded)
        self._count += 1

    def lookup(self, index: Any) -> Tensor:
        """Return the weights of any index, as `Table.gather` takes it, as they are stored: ``(*index.shape, dim)``."""
        # A thread that evaluates must not write the rows that another one trains, be it to bring them up to date.
        if self.plain:
            return self.table.gather(index, settle=False)
        rows = self.table.gather(index, self._stored_names(["weight"]), settle=False)
        flat = {s: part.reshape(-1, part.shape[-1]) for s, part in self._parts_of("weight", rows).items()}
        return self.decode("weight", flat).resize_(rows["weight"].shape)  # no view: see `buffers.empty`

    # --- idle rows ----------------------------------------------------------------------------------------------------

    @property
    def lags(self) -> bool:
        """Whether there may be rows that have missed steps, so that reading the table itself is not enough."""
        return bool(self.lag)

    def let_lag(self, lag: Lag, owner: object) -> None:
        """Let idle rows lag behind the steps of an optimizer until they are read, while `owner` lives, or longer."""
        self.lag = lag
        # Neither may the table hold this object, which holds the table, nor the other way round: a cycle would keep it until
        # the next gc. So it knows how to catch up by a weak reference, and once `owner` is gone by a copy without the table.
        catch_up = weakref.WeakMethod(self.catch_up)

        def caught_up(ids: Tensor | None) -> None:
            method = catch_up()
            if method is not None:
                method(ids)

        self.table._catch_up = caught_up
        self._at_end = weakref.finalize(owner, _outlive, self)
        self._at_end.atexit = False

    def drop_lag(self) -> None:
        """Forget the steps that rows have missed, and which each has taken."""
        if self.lag is None:
            return
        self.table._catch_up = None
        self._at_end.detach()  # it holds the table
        if LAST_STEP in self._codecs:
            self.drop(LAST_STEP)
        self.lag = None

    @torch.no_grad()
    def catch_up(self, ids: Tensor | None = None) -> None:
        """Write the rows `ids` (n,), none twice, as they are after the steps that they have missed; None: all rows."""
        if not self.lag:
            return
        with self.lock:  # also as a whole: steps made meanwhile must not be forgotten at the end
            if ids is not None:
                self.write(ids, self.read(ids))
                return
            table = self.table
            row_bytes = max(table.nbytes // max(len(table), 1), 1)
            with ByteProgress("idle rows take the steps they missed", table.nbytes) as bar:
                for part in row_chunks(len(table), row_bytes):
                    self.catch_up(torch.arange(part.start, part.stop, device=table.device))
                    bar.advance((part.stop - part.start) * row_bytes)
            self.lag.forget()  # last: whoever interrupts it finds every row with the steps it has taken

    def stepped_in_place(self, step: Any) -> None:
        """Record a step that all rows have taken where they are stored; none had missed any before."""
        if self.lag is not None and step is not None:
            with self.lock:
                self._mark_steps()
                self.table.stored(LAST_STEP).fill_(self.lag.now + 1)
                self.lag.record_for_all()

    def _mark_steps(self) -> None:
        """Add the plane `LAST_STEP` with the first step that idle rows notice; plain SGD makes none."""
        if LAST_STEP not in self._codecs:
            self.add(LAST_STEP, (1,), torch.int32, 0)


def _outlive(rows: Rows) -> None:
    """Have the table catch up its rows without the owner of `rows`, whoever reads it then."""
    orphan = copy.copy(rows)
    orphan.table = weakref.proxy(rows.table)
    rows.table._catch_up = orphan.catch_up
