"""The table of a module whose rows several processes own: rows by their ids, wherever they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.active import activate
from speedtransfer.optim import Handle, Sharded
from speedtransfer.tables import Table, TableStats, as_index


@dataclasses.dataclass
class ShardedStats(TableStats):
    """What this process has moved: in its shard as :class:`~speedtransfer.TableStats` says, and to other processes.

    Attributes
    ----------
    asked_rows : int
        Distinct rows that lookups here have asked owners for, this process among them.
    served_rows : int
        Distinct rows that lookups of all processes have asked this one for.
    control_bytes, id_bytes, row_bytes, gradient_bytes : int
        Sent to other processes for all tables of the process group.
    calls : int
        Collective calls for all tables of the process group.
    """

    asked_rows: int = 0
    served_rows: int = 0
    control_bytes: int = 0
    id_bytes: int = 0
    row_bytes: int = 0
    gradient_bytes: int = 0
    calls: int = 0


class ShardedTable:
    """All rows of a table that several processes own; made by ``st.Embedding(..., process_group=...)``.

    `gather` and `scatter` are collective: every process must call them, with ids of its own.

    Attributes
    ----------
    local : Table
        The rows of this process, in the order of `local_ids`. Rows with ``idle="exact"`` catch up when read through it.
    num_rows, dim : int
        Of all processes.
    """

    def __init__(self, handle: Handle, owners: Sharded) -> None:
        self._handle, self._owners = handle, owners

    @property
    def local(self) -> Table:
        """The rows of this process."""
        return self._handle.table

    @property
    def num_rows(self) -> int:
        """The number of rows of all processes."""
        return self._handle.num_rows

    def __len__(self) -> int:
        return self.num_rows

    def local_ids(self) -> Tensor:
        """Return the ids of the rows of this process, ``(len(local),)`` int64."""
        return self._owners.partition.ids_of(self._owners.exchange.rank)

    def gather(self, index: Any) -> Tensor:
        """Return the weights of rows of any process, ``(*index.shape, dim)`` on the compute device. Collective."""
        with torch.no_grad():
            active = activate(self._handle, index, training=False)
            return active.rows[active.inverse]

    @torch.no_grad()
    def scatter(self, index: Any, rows: Tensor) -> None:
        """Set rows of any process to `rows`, ``(*index.shape, dim)``. Collective.

        Raises
        ------
        InvalidValueError
            A row is given twice, by one process or by several; nothing has been written.
        """
        handle, owners = self._handle, self._owners

        def check() -> tuple[Tensor, Tensor]:
            ids, shape, _ = as_index(index, self.num_rows, handle.table.device)
            owners.check_rows(ids)
            values = torch.as_tensor(rows, dtype=handle.rows.dtype, device=handle.table.device)
            if tuple(values.shape) != (*shape, self.dim):
                raise InvalidValueError(
                    f"rows are {tuple(values.shape)} but index is {tuple(shape)} and the table has {self.dim} columns; pass "
                    f"rows of shape {(*shape, self.dim)}"
                )
            return ids, values.reshape(len(ids), self.dim)

        ids, values = owners.exchange.in_all("writes rows", check, lambda _: str(handle))
        owners.changes += 1
        local, values = owners.lookups.to_owners(ids, values)
        twice = len(local) - len(local.unique())
        error = (
            InvalidValueError(f"{twice} rows are given more than once; give each to one process, once")
            if twice
            else None
        )
        owners.exchange.agree_on_error("writes rows", error)
        if len(local):
            handle.rows.catch_up(local)
            handle.rows.put("weight", local, values)
        if handle.rows.own is not None:
            # Others may read them.
            handle.rows.own.meet()

    def stats(self) -> ShardedStats:
        """Return what this process has moved."""
        lookups, traffic = self._owners.lookups, self._owners.exchange.traffic
        return ShardedStats(
            **dataclasses.asdict(self.local.stats()),
            asked_rows=lookups.asked_rows,
            served_rows=lookups.served_rows,
            control_bytes=traffic.control,
            id_bytes=traffic.ids,
            row_bytes=traffic.rows,
            gradient_bytes=traffic.gradients,
            calls=traffic.calls,
        )

    def reset_stats(self) -> None:
        """Count rows and bytes of the shard anew."""
        self.local.reset_stats()

    def uniform_(self, a: float = 0.0, b: float = 1.0, generator: Any = None) -> ShardedTable:
        """Draw all weights from [a, b): the numbers of one process. Collective."""
        self._owners.draw(lambda values: values.uniform_(a, b, generator=generator))
        return self

    def torch(self) -> Tensor:
        """Return all rows of a table with memory "shared", over its memory, to be read; of others raise.

        With ``idle="exact"`` it is collective: every process catches its rows up.
        """
        if self._handle.rows.own is not None:
            return self.local.torch()
        raise InvalidTypeError(
            f"{self._handle} is owned by {self._owners.exchange.ranks} processes, none of which has all rows; use "
            ".local for those of this one, .gather(ids), or st.full_state_dict(model)"
        )

    def numpy(self) -> Any:
        """Return all rows as an array, as `torch` does."""
        return self.torch().numpy()

    def __getattr__(self, name: str) -> Any:
        # What is asked of any table.
        if name in ("dim", "dtype", "device", "memory", "layout", "cache_rows", "planes", "path", "version", "nbytes"):
            return getattr(self.local, name)
        raise AttributeError(f"a table of several processes has no {name!r}; .local is the table of this one", obj=self)

    def __repr__(self) -> str:
        exchange = self._owners.exchange
        place = f"rank {exchange.rank} of {exchange.ranks}"
        return f"ShardedTable({self.num_rows} x {self.dim} {self.dtype}, {place}: {self.local!r})"
