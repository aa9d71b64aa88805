"""Read and write the rows of a table as an optimizer computes with them; handles and optimizer state have no other way.

A plane ("weight", "exp_avg") is one plane of the table, or several if a codec encodes it: "weight" and "weight.scale", or
"weight.low".
Rows are encoded and decoded on the compute device, so that encoded rows cross the bus.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing
from speedtransfer.dtypes import bits_of
from speedtransfer.encoding import StorageDtype
from speedtransfer.engines import CachedRows
from speedtransfer.idle import Lag
from speedtransfer.once import fork_safe_lock
from speedtransfer.progress import ByteProgress
from speedtransfer.stored_planes import StoredPlanes
from speedtransfer.tables import NOTHING, Known, Table, WriteLog, kept, overlay, row_chunks

# The plane of the last step that each row has taken, and how `Rows.add_together` takes it.
LAST_STEP = "idle.last_step"
LAST_STEPS = {LAST_STEP: ((1,), torch.int32, 0)}


class OwnRows(NamedTuple):
    """The rows that a process updates of a table in memory that several share.

    Attributes
    ----------
    size : int
        How many.
    numbers : callable
        Takes start and stop, and returns some of them, (n,) int64.
    places : callable
        Takes rows of the table, (n,), and returns where each is among these: not from 0 to `size` where it is none of them.
    meet : callable
        Waits for the other processes, which all call it.
    """

    size: int
    numbers: Callable[[int, int], Tensor]
    places: Callable[[Tensor], Tensor]
    meet: Callable[[], None]


class Rows(StoredPlanes):
    """Read and write rows of the planes of a table; its parameters are those of :class:`EncodedPlanes`.

    A read has two parts: `fetch` gathers rows as they are stored, and may run ahead of their use; `finish` decodes them and,
    with ``idle="exact"``, applies the steps that they have missed.
    """

    def __init__(
        self,
        table: Table,
        storage_dtype: StorageDtype | None = None,
        state_dtype: torch.dtype | None = None,
        scale_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(table, storage_dtype, state_dtype, scale_block, dtype)
        # A Lag, or a FeatureLag.
        self.lag: Any = None
        # Of a table in memory that processes share.
        self.own: OwnRows | None = None
        # Other threads may read rows (evaluation) while this one trains them.
        self.lock = fork_safe_lock()
        # The numbers of rows before each growth.
        self.grown_from: list[int] = []

    # --- rows ---------------------------------------------------------------------------------------------------------

    def read(self, ids: Tensor, planes: Sequence[str] = ("weight",), known: Known = NOTHING) -> dict[str, Tensor]:
        """Return the rows `ids` (n,), not checked, of each plane: ``(n, *tail)`` on the compute device.

        They are caught up with all steps so far. If some may have missed steps, the rows of every plane are returned.
        """
        if not self.lag:
            if self._as_stored:
                return self.table.read(ids, planes, known)
            return self.finish(self.fetch(ids, planes, known), ids)
        with self.lock:
            of_parent = not self.table.writable
            return self.finish(self._fetch_of_parent(ids) if of_parent else self.fetch(ids, None, known), ids)

    def _fetch_of_parent(self, ids: Tensor) -> dict[str, Tensor]:
        """Do what `fetch` does in a child of fork, whose parent may be writing the rows.

        What a row is caught up by must be the last step of these values: one that has got another meanwhile is fetched again.
        """
        turns, last = self.table._place.turns, [LAST_STEP]
        assert turns is not None
        turns.wait()
        before, fetched = self.table.read(ids, last)[LAST_STEP], self.fetch(ids)
        turns.wait()
        at = torch.arange(len(ids), device="cpu")
        while len(at := at[(self.table.read(ids[at], last)[LAST_STEP] != before[at])[:, 0]]):
            before[at], again = self.table.read(ids[at], last)[LAST_STEP], self.fetch(ids[at])
            for name, part in again.items():
                bits_of(fetched[name])[at] = bits_of(part)
            turns.wait()
        return fetched

    def caught_up(self, ids: Tensor, plane: str | None = None) -> dict[str, Tensor] | None:
        """Return the rows `ids` (n,), unique, as `catch_up` would write them, by plane of the table; None: none has to.

        Where `plane` is given, that one at least.
        """
        if not self.lag:
            return None
        with self.lock:
            if self._as_stored and plane not in (None, LAST_STEP) and self.lag.is_apart(plane):
                return self.finish(self.fetch(ids, (plane, LAST_STEP)), ids)
            rows = self.read(ids) if plane != LAST_STEP else {}
            rows[LAST_STEP] = self.lag.last_steps(len(ids), ids.device, None, ids)
            return {n + s: part for n, values in rows.items() for s, part in self.encode(n, values, ids).items()}

    def fetch(self, ids: Tensor, planes: Sequence[str] | None = None, known: Known = NOTHING) -> dict[str, Tensor]:
        """Gather the rows `ids` (n,), not checked, as they are stored; on any thread and stream.

        By default of every plane, which `finish` needs to catch up; it may be called after further steps, as long as these did
        not write the rows.
        """
        planes = tuple(self._codecs) if planes is None else planes
        return self.table.read(ids, planes if self._as_stored else self._stored_names(planes), known)

    def refetch(
        self, ids: Tensor, planes: Sequence[str] | None, fetched: dict[str, Tensor], log: WriteLog, known: Known
    ) -> dict[str, Tensor]:
        """Return `fetched`, the result of ``fetch(ids, planes)``, and read those rows again that were written since.

        `ids` (n,) are sorted and unique; `log` was made before they were fetched.
        """
        # The host knows which rows they are, unless their ids are on a device that need not tell it.
        ids = ids if self.table.takes_padding or known.host is None else known.host
        writes = self.table.written_since(log)
        if writes is None:
            return self.fetch(ids, planes, known)
        again = overlay(fetched, ids, writes, self.table.num_rows) if len(ids) else None
        if again is None:
            return fetched
        if ids.is_cuda and self.table.takes_padding:
            ids, known = kept(ids, again, self.table.num_rows)
            for name, part in self.fetch(ids, planes, known).items():
                target = bits_of(fetched[name])
                torch.where(again.unsqueeze(1), bits_of(part), target, out=target)
            return fetched
        at = again.nonzero().flatten()
        if len(at):
            for name, part in self.fetch(ids[at], planes).items():
                bits_of(fetched[name])[at.to(part.device)] = bits_of(part)
        return fetched

    def finish(self, fetched: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Decode the rows `ids` (n,) that `fetch` returned, and catch them up if their last step was fetched too."""
        rows = fetched
        if not self._as_stored:
            rows = {name: self.decode(name, self._parts_of(name, fetched)) for name in self._codecs if name in fetched}
        last = rows.pop(LAST_STEP, None)
        if last is not None and self.lag is not None:
            if not self.table.writable:
                # A row that the parent has written since the fork has missed none of the steps that are known here.
                last = last.minimum(self.lag.last_steps(len(ids), last.device, None, ids))
            self.lag.catch_up(rows, last, ids)
        return rows

    def write(
        self,
        ids: Tensor,
        rows: dict[str, Tensor],
        step: Any = None,
        mark: Any = None,
        count: int | None = None,
        known: Known = NOTHING,
    ) -> None:
        """Set the rows `ids` (n,), unique, of each plane to ``(n, *tail)`` values on the compute device.

        Encoded planes are rounded stochastically, with new random numbers at each write. `step`: the effect on idle rows of
        the step that made the values, recorded once they are written. `count`: how many writes there were before; one that is
        made again after an interrupt has the same random numbers.
        """
        if self.lag is None:
            self._write(ids, rows, count, known)
            return
        # The record last: if the write fails there was no step.
        with self.lock:
            if step is not None:
                self.mark_steps()
            # Else it was written, and an interrupt came after it was recorded.
            if mark is None or mark == self.lag.mark:
                if LAST_STEP in self._codecs:
                    rows[LAST_STEP] = self.lag.last_steps(ids.shape[0], next(iter(rows.values())).device, step, ids)
                self._write(ids, rows, count, known)
            if step is not None:
                self.lag.record(step, mark)

    def _write(self, ids: Tensor, rows: dict[str, Tensor], count: int | None, known: Known) -> None:
        if count is not None:
            self._count = count
        if self._as_stored:
            encoded = {name: values if values.is_contiguous() else values.contiguous() for name, values in rows.items()}
        else:
            encoded = {}
            for name, values in rows.items():
                encoded.update({name + suffix: part for suffix, part in self.encode(name, values, ids).items()})
        self.table.write(ids, encoded, known=known)
        self._count += 1

    @torch.no_grad()
    def reset(self, ids: Tensor, weights: Tensor) -> None:
        """Let the rows `ids` (n,), int64 and unique, start anew: as new rows of a table with the weights `weights`.

        `weights`, ``(n, dim)`` of any float dtype and device, are rounded to nearest. Every other plane gets its initial
        value, and no step has been missed. How other rows are rounded does not depend on it.
        """
        if not len(ids):
            return
        with self.lock:
            parts = self._initial_parts(weights.detach().to(self.table.device))
            if self.lag is not None and LAST_STEP in parts:
                parts[LAST_STEP] = self.lag.last_steps(len(ids), self.table.device, None, ids)
            self.table.write(ids.contiguous(), parts, unsorted=True)

    @torch.no_grad()
    def grow(self, num_rows: int) -> None:
        """Give the table more rows, up to `num_rows`; see `Table.grow`.

        They are as those of a new table: their weights zero, every other plane at its initial value. They have missed no step.
        """
        with self.lock:
            zeros = torch.zeros((1, self.table.dim), dtype=self.dtype, device=self.table.device)
            fills: dict[str, float | Tensor] = {name: part[0] for name, part in self._initial_parts(zeros).items()}
            if self.lag is not None and LAST_STEP in fills:
                self.lag.settle()
                fills[LAST_STEP] = self.lag.now
            self.grown_from.append(self.table.num_rows)
            self.table.lengthen(num_rows, fills)
            if self.lag is not None and self._as_stored:
                self.lag.table_bytes = self.table.nbytes

    @torch.no_grad()
    def move_state(self, before: Tensor, after: Tensor) -> None:
        """Give the rows `after` (n,), distinct, the optimizer state that the rows `before` (n,) have, -1: that of new rows.

        The weights of rows that get another state are undefined until they are written.
        """
        names = [name for name in self._stored_names(list(self._codecs)) if name not in self._stored_names(["weight"])]
        if not names:
            return
        device, dim = self.table.device, self.table.dim
        with self.lock:
            self.catch_up()
            moves, new = (before >= 0) & (before != after), after[before < 0]
            state = self.table.read(before[moves].to(device), names)
            for part in row_chunks(len(new), dim * self.dtype.itemsize):
                ids = new[part].to(device)
                self.reset(ids, torch.zeros(len(ids), dim, dtype=self.dtype, device=device))
            self.table.write(after[moves].to(device), state, unsorted=True)

    def update(
        self,
        ids: Tensor,
        read: Sequence[str],
        written: Sequence[str],
        queue: Callable[[list[Tensor], CachedRows | None], Sequence[Tensor]],
        known: Known,
    ) -> None:
        """Let kernels change the rows `ids` (n,) of planes that are stored as they are; see `Table.update`."""
        self.table.update(ids, read, written, queue, known)
        self._count += 1

    def lookup(self, index: Any) -> Tensor:
        """Return the weights at any index that `Table.gather` takes, ``(*index.shape, dim)``; no row may have missed steps."""
        # A thread that evaluates must not write rows that another one trains, not even to catch them up.
        if self.plain:
            return self.table.look_up(index)
        rows = self.table.gather(index, self._stored_names(["weight"]), catch_up=False)
        flat = {s: part.reshape(-1, part.shape[-1]) for s, part in self._parts_of("weight", rows).items()}
        # No view: see `buffers.empty`.
        return self.decode("weight", flat).resize_(rows["weight"].shape)

    def state_fills(self) -> dict[str, float | None]:
        """Return the planes of the table that store state, by name, with what new rows hold there; None: of their weights."""
        names = sorted(name for name in self._codecs if name not in ("weight", LAST_STEP))
        fills = dict[str, float | None]()
        for name in names:
            initial = self._initial[name]
            parts = self._codecs[name].parts
            fills |= {name + suffix: None if initial is None else initial[suffix] for suffix in parts}
        return fills

    # --- idle rows ----------------------------------------------------------------------------------------------------

    def enable_catch_up(self, lag: Lag, owner: object) -> None:
        """Let idle rows miss the steps of an optimizer until they are read, by this object or by public methods of the table.

        They also catch up after `owner`, which holds this object, is gone.
        """
        # Encoded rows are rounded anew whenever they are caught up.
        if self._as_stored:
            lag.table_bytes = self.table.nbytes
        # This object holds the table: a strong reference back would be a cycle, which keeps both until the next gc. So the
        # table has a weak one, and once `owner` is gone a copy of this object that has a weak reference to the table.
        self._at_end = weakref.finalize(owner, _outlive, self)
        self._at_end.atexit = False
        self.table._catch_up, self.table._caught_up = _weakly(self.catch_up), _weakly(self.caught_up)
        # Last: what is undone if there is one.
        self.lag = lag

    def written_here(self, device: torch.device) -> tuple[int, Callable[[int, int], Tensor]]:
        """Return how many rows this process writes, all but in shared memory, and what returns some, on `device` if all."""
        if self.own is not None:
            return self.own.size, self.own.numbers
        return len(self.table), functools.partial(torch.arange, device=device)

    @property
    def can_be_frozen(self) -> bool:
        """Whether a copy of this, and of what knows the missed steps, tells later what rows were; a device has its own."""
        return not self.lag or (self.lag.is_copyable and self.table.device.type == "cpu")

    def disable_catch_up(self) -> None:
        """Forget the steps that rows have missed, and the last step of each."""
        if self.lag is None:
            return
        self.table._catch_up = self.table._caught_up = None
        # The finalizer holds the table.
        self._at_end.detach()
        if self.has(LAST_STEP):
            self.drop(LAST_STEP)
        self.lag = None

    def begin_anew(self) -> None:
        """Remove all planes but the weights, whatever an interrupt has left of them."""
        self.disable_catch_up()
        self.drop(*[name for name in self._codecs if name != "weight"])

    def meet(self) -> None:
        """Wait for the other processes that have the table in their memory, if there are any."""
        if self.own is not None:
            self.own.meet()

    @torch.no_grad()
    def catch_up(self, ids: Tensor | None = None, known: Known = NOTHING) -> None:
        """Apply the steps that the rows `ids` (n,), unique, have missed, and write them; None: all rows."""
        if not self.lag:
            return
        if not self.table.writable:
            self.table.check_writable()
        check_not_capturing("idle rows that catch up (idle='exact')")
        # Held for all chunks: steps made meanwhile must not be forgotten at the end.
        with self.lock:
            if ids is not None:
                self.write(ids, self.read(ids, known=known), known=known)
                return
            table = self.table
            row_bytes = max(table.nbytes // max(len(table), 1), 1)
            # One write, whatever the chunks: rounding must not depend on how many processes share the rows.
            count = self._count
            size, numbers = self.written_here(table.device)
            # Others may be reading.
            self.meet()
            with ByteProgress("idle rows take the steps they missed", size * row_bytes) as bar:
                for part in row_chunks(size, row_bytes):
                    self._count = count
                    ids = numbers(part.start, part.stop).to(table.device)
                    rows = self.read(ids)
                    self.write(ids, rows if self.own is not None else self._changed(part, rows))
                    bar.advance((part.stop - part.start) * row_bytes)
            self._count = count + 1
            self.meet()
            # Last: if this is interrupted, each row still has its own last step.
            self.lag.forget()

    def _changed(self, part: slice, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leave out of `rows`, those of `part`, planes that have these values: state that is still zero takes no memory."""
        table = self.table
        if not self._as_stored or table.device.type != "cpu" or table.cache_rows is not None:
            return rows
        return {
            name: values
            for name, values in rows.items()
            if name == "weight" or not torch.equal(bits_of(values), bits_of(table.stored(name)[part]))
        }

    def stepped_in_place(self, step: Any, mark: Any = None) -> None:
        """Record a step that has updated all rows in place; none had missed any before."""
        if self.lag is not None and step is not None:
            with self.lock:
                self.mark_steps()
                if self.lag.record_for_all(step, mark):
                    self.table.stored(LAST_STEP).fill_(self.lag.now)

    def mark_steps(self) -> None:
        """Add the plane `LAST_STEP` at the first step that moves idle rows; plain SGD makes no such step."""
        if LAST_STEP not in self._codecs:
            self.add_together(LAST_STEPS)


def _outlive(rows: Rows) -> None:
    """Have the table catch up by a copy of `rows`, whose owner is gone, with a weak reference to the table."""
    orphan = copy.copy(rows)
    orphan.table = weakref.proxy(rows.table)
    rows.table._catch_up, rows.table._caught_up = orphan.catch_up, orphan.caught_up


def _weakly(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what calls a method of an object as long as that lives, and returns None afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
