"""Read and write rows as they are stored, by ids that are known to be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from speedtransfer import buffers
from speedtransfer.cuda import count_graphs, is_capturing
from speedtransfer.engines import SELECTED, CachedRows, Engine, KernelEngine, check_apart
from speedtransfer.errors import RowIndexError
from speedtransfer.tables import forks, stats
from speedtransfer.tables.page_advice import FEW_ROWS, read_ahead_of_rows
from speedtransfer.tables.planes import Planes
from speedtransfer.tables.unfinished import Unfinished
from speedtransfer.tables.unique import NOTHING, Known
from speedtransfer.tables.write_back import beside, copied
from speedtransfer.tables.write_log import Write

# So many values torch selects soonest.
_FEW_VALUES = 1 << 13


class UncheckedRows(Planes):
    """The part of a :class:`~speedtransfer.Table` that moves rows unchecked: for `Rows`, and for the checked `scatter`."""

    def read(self, ids: Tensor, planes: Sequence[str], known: Known = NOTHING) -> dict[str, Tensor]:
        """Gather rows as they are stored: `ids` (n,), contiguous int64 on `device` or the CPU, are in range, or padded."""
        stored = [self._planes[name] for name in planes]
        count = ids.shape[0]
        few = self._selects and stored and count * stored[0].shape[1] * len(stored) <= _FEW_VALUES and count < FEW_ROWS
        ended = self._ended
        if few and SELECTED.issuperset([plane.dtype for plane in stored]):
            # What the engine does, in fewer calls.
            rows = [plane.index_select(0, ids) for plane in stored]
        else:
            device = self._place.device
            rows = [buffers.empty((count, plane.shape[1]), plane.dtype, device) for plane in stored]
            if self.moves_on_host and known.host is not None:
                ids = known.host
            if count >= FEW_ROWS and self._cache is None:
                read_ahead_of_rows(stored, ids)
            self._engine.gather(stored, ids, rows, False if known.check is None else known.check)
        if self._begun != ended:
            with self._turn:
                self._engine.gather([self._planes[name] for name in planes], ids, rows)
        if self._engine.takes_padding and known.length is not None:
            self._padded_stats.add("gathered", known.length, rows)
        else:
            with stats.counting:
                self._stats.gathered_rows += count
                for values in rows:
                    self._stats.gathered_bytes += values.nbytes
        return dict(zip(planes, rows, strict=True))

    def check(self, flat: Tensor) -> None:
        """Let the device check that `flat`, (n,) int64 on it, is in range; if not, the next call raises, as after `gather`."""
        check_apart(self._engine, [self._planes["weight"]], flat)

    def write(self, ids: Tensor, rows: dict[str, Tensor], unsorted: bool = False, known: Known = NOTHING) -> None:
        """Scatter contiguous rows, by plane, as they are stored: `ids` (n,) are as for `read`, and none is there twice."""
        if self._place.refuses_writes:
            self.check_writable()
        values = list(rows.values())
        if self.moves_on_host and known.host is not None:
            ids = known.host
        # Children of this process that read the rows wait meanwhile.
        turns = forks.turns if self._place.is_shared_by_forks else None
        if turns is not None:
            turns.begin()
        # So do other threads.
        with self._turn:
            # Here: another thread may give the planes other memory.
            planes = [self._planes[name] for name in rows]
            if self._snapshot is not None:
                self._snapshot.keep(ids, known)
            self._begun += 1
            try:
                if self.watched:
                    # Those of somebody else may be changed, and the log keeps them.
                    ids = ids.clone() if unsorted else ids

                    def scatter(given: list[Tensor], behind: bool) -> None:
                        # Written later: versions must not change while somebody reads them, and `_writes` counts.
                        to = [plane.data for plane in planes] if behind and self._cache is None else planes
                        self._engine.scatter(to, ids, given, unsorted, behind)

                    self._write_watched(ids, rows, scatter)
                else:
                    self._engine.scatter(planes, ids, values, unsorted)
                    self._writes += 1
            except RowIndexError:
                # Of an earlier read: nothing is written.
                raise
            except BaseException:
                self._write_again(planes, ids, values, unsorted)
                raise
            finally:
                self._ended = self._begun
                if self._snapshot is not None:
                    self._snapshot.written()
                if turns is not None:
                    turns.end()
        if not self._captured and ids.is_cuda and is_capturing():
            count_graphs()
            self._captured = True
        if self._engine.takes_padding and known.length is not None:
            self._padded_stats.add("scattered", known.length, values)
            return
        with stats.counting:
            self._stats.scattered_rows += ids.shape[0]
            for value in values:
                self._stats.scattered_bytes += value.nbytes

    def _write_again(self, planes: list[Tensor], ids: Tensor, values: list[Tensor], unsorted: bool) -> None:
        """Write rows again that may be in some planes only; where something comes into that too, before they are used."""

        def write(engine: Engine) -> None:
            try:
                engine.scatter(planes, ids, values, unsorted)
            except MemoryError:
                raise
            except Exception:
                # What cannot be written has raised that already.
                return
            self._writes += 1

        # Else it has not begun.
        if not isinstance(self._engine, Unfinished):
            Unfinished(self, write)
            self.wait()

    def update(
        self,
        ids: Tensor,
        read: Sequence[str],
        written: Sequence[str],
        queue: Callable[[list[Tensor], CachedRows | None], Sequence[Tensor]],
        known: Known,
    ) -> None:
        """Let kernels change the rows `ids` (n,), as for `write`, where they are stored; needs `runs_kernels`.

        Parameters
        ----------
        ids, known : Tensor, Known
        read, written : sequence of str
            The planes whose rows they read and write; those are among these.
        queue : callable
            Takes the planes `written` and what a cache has of them; see `Queue`.
        """
        if self._place.refuses_writes:
            self.check_writable()
        engine = cast(KernelEngine, self._engine)

        def change(*_: Any) -> None:
            engine.update(stored, ids, [name in read for name in written], lambda cached: queue(stored, cached))

        with self._turn:
            came, stored = ([self._planes[name] for name in names] for names in (read, written))
            if self._snapshot is not None:
                self._snapshot.keep(ids, known)
            self._begun += 1
            try:
                if self.watched:
                    self._write_watched(ids, None, change)
                else:
                    change()
                    self._writes += 1
            finally:
                self._ended = self._begun
                if self._snapshot is not None:
                    self._snapshot.written()
        for kind, planes in (("gathered", came), ("scattered", stored)):
            if known.length is not None and planes:
                self._padded_stats.add(kind, known.length, planes)
            elif planes:
                row_bytes, count = sum(plane.shape[1] * plane.element_size() for plane in planes), ids.shape[0]
                self._stats.add({f"{kind}_rows": count, f"{kind}_bytes": count * row_bytes})

    def _write_watched(
        self, ids: Tensor, rows: dict[str, Tensor] | None, write: Callable[[list[Tensor], bool], None]
    ) -> None:
        """Write the rows `ids` (n,), and tell those who have read rows ahead.

        They go on with what is written, as it is on a CUDA device, while it crosses the bus on a stream of its own.
        """
        logs, before = self._all_logs(), self.version
        stored = rows is not None and all(part.dtype == self._planes[name].dtype for name, part in rows.items())
        crosses = self.device.type == "cuda" and self.memory != "device"
        kept = copied(rows) if rows and stored and logs and crosses else None
        try:
            if kept is None:
                write(list(rows.values()) if rows else [], False)
            else:
                with beside(self.device):
                    write(list(kept.values()), True)
        except BaseException:
            for log in logs:
                log.forget()
            raise
        self._writes += 1
        for log in logs:
            log.note(Write(ids, kept), before, self.version)
