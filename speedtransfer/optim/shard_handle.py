"""The handle of a table that several processes own: its table has the rows of this process, its parameter stands for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.features import Features
from speedtransfer.optim.handle import Handle
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.shard_gradient import ShardGradient
from speedtransfer.optim.shards import Shards
from speedtransfer.ranks import Exchange, Partition
from speedtransfer.rows import Rows
from speedtransfer.tables import row_chunks


class ShardHandle(Handle):
    """Tie a parameter, which has the shape of the whole table, to the rows of it that this process owns.

    Parameters
    ----------
    rows : Rows
        Those of this process, in the order of `partition`.
    partition : Partition
    exchange : Exchange
        To the other owners.
    requires_grad : bool
    idle : {"auto", "exact", "lazy"}
    comm_dtype : torch.dtype, optional
        What gradients are sent as.
    """

    shows_sparse: ClassVar[bool] = False
    reducer: Shards
    reducer_kind: ClassVar[type[Shards]] = Shards

    def __init__(
        self,
        rows: Rows,
        partition: Partition,
        exchange: Exchange,
        requires_grad: bool = True,
        idle: str = "lazy",
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows.table, requires_grad, idle, rows)
        self.partition = partition
        self.reducer = self.reducer_kind(self, exchange, partition, comm_dtype)
        self._share_rows()

    def _share_rows(self) -> None:
        """Tell the rows how they are shared out."""
        partition, first = self.partition, self.partition.start(self.reducer.exchange.rank)
        # Rounding draws by row: by the number that it has in every process.
        self.rows.name_rows = lambda ids: partition.ids(ids + first)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the table to `dtype`, and share the rows out as before."""
        super().convert(dtype)
        self._share_rows()

    @property
    def num_rows(self) -> int:
        """The number of rows of all processes."""
        return self.partition.num_rows

    @property
    def aliased(self) -> bool:
        """No tensor has the memory of all rows."""
        return False

    def looks_up_directly(self, ids: Any) -> bool:
        """Tell that rows are read by those who own them."""
        return False

    def set_padding(self, padding_idx: int | None) -> None:
        """Keep the row that sparse gradients leave out, if this process has it."""
        local = None if padding_idx is None else self.owned(torch.tensor([padding_idx], device="cpu"))[1].tolist()
        self.padding_idx = local[0] if local else None

    def _shown_as(self, ids: Tensor, grad: Tensor, changed: Any = None, sparse: bool = False) -> RowGradient:
        return ShardGradient.of(self.num_rows, ids, grad, changed, self.reducer.exchange)

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where among `ids` (n,) those that this process updates are, and their rows in the table here."""
        rank = self.reducer.exchange.rank
        local = self.partition.places(ids) - self.partition.start(rank)
        at = ((local >= 0) & (local < self.partition.size(rank))).nonzero().flatten()
        return at, local[at]

    @property
    def saved_sizes(self) -> list[int] | None:
        """How many rows each process saves in a checkpoint; None: as `Partition` says."""
        return None

    def gather_ids(self) -> None:
        """Do nothing: ids are numbers of rows."""

    def tell_sizes(self) -> None:
        """Do nothing: the number of rows does not change."""

    def release_ids(self) -> None:
        """Do nothing, as `gather_ids`."""

    def check_rows(self, rows: Tensor) -> None:
        """Do nothing: of `rows` (n,), which are within the table, each is one of a process."""

    # --- all rows ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, function: Callable[[Tensor], object], start: int = 0, stop: int | None = None) -> None:
        """Have `function` fill the rows from `start` to `stop` of the whole table, and keep those of this process.

        Every process draws the numbers of all, so that they are those of one process with the same seed.
        """
        self.rows.catch_up()
        stop = self.num_rows if stop is None else stop
        dim, dtype = self.table.dim, self.rows.dtype
        for part in row_chunks(stop - start, dim * dtype.itemsize):
            values = torch.empty(part.stop - part.start, dim, dtype=dtype, device="cpu")
            function(values)
            self._keep(torch.arange(start + part.start, start + part.stop, device="cpu"), values)

    @torch.no_grad()
    def change(self, function: Callable[[Tensor], object]) -> None:
        """Have `function` change every value in place, each by itself."""
        self.rows.catch_up()
        self.reducer.changes += 1
        size = self.partition.size(self.reducer.exchange.rank)
        for part in row_chunks(size, self.table.dim * self.rows.dtype.itemsize):
            ids = self.own_rows(part.start, part.stop)
            values = self.rows.read(ids.to(self.table.device))["weight"]
            function(values)
            self.rows.put("weight", ids, values)

    def own_rows(self, start: int, stop: int) -> Tensor:
        """Return some of the rows of the table that this process updates: all are, and are numbered from 0."""
        return torch.arange(start, stop, device="cpu")

    def _keep(self, ids: Tensor, values: Tensor) -> None:
        self.reducer.changes += 1
        at, local = self.owned(ids.cpu())
        self.rows.put("weight", local, values[at.to(values.device)])

    def normal_(self, start: int = 0, stop: int | None = None) -> None:
        """Draw weights from N(0, 1): the numbers of one process."""
        self.draw(lambda values: values.normal_(), start, stop)

    @torch.no_grad()
    def load(self, values: Tensor, start: int = 0) -> None:
        """Set rows of the whole table, from `start` on, to `values`, ``(n, dim)``, of which this process keeps its own."""
        self.rows.catch_up()
        for part in row_chunks(len(values), values[:1].nbytes):
            self._keep(torch.arange(start + part.start, start + part.stop, device="cpu"), values[part])

    def store(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(num_rows, dim)``, of which this process keeps its own."""
        if tuple(values.shape) != (self.num_rows, self.table.dim):
            raise InvalidValueError(
                f"{self} is {(self.num_rows, self.table.dim)} but the values given are {tuple(values.shape)}; pass all rows "
                "of the table, to every process"
            )
        self.load(values.detach())

    set_whole = store

    def take_param(self, param: nn.Parameter, kind: type[nn.Parameter]) -> None:
        """Raise: another weight would be that of one process."""
        self._refuse("is given another weight", "set its rows by load_state_dict(), or weight.data = all rows")

    def whole(self, ids: Tensor | None = None) -> Tensor:
        """Raise: other processes have other rows."""
        self._refuse(
            "is used as a whole",
            "look up the rows needed (emb(ids)), set rows by emb.table.scatter, get all by st.full_state_dict(model), "
            "leave it out of fully_shard: ignored_params=st.table_parameters(model)",
        )

    def check_whole(self) -> None:
        """Raise, as `whole`; rows that processes share catch up in all of them together."""
        self.whole()

    def shown(self) -> str:
        """Return what there is of rows: those of others are elsewhere."""
        exchange = self.reducer.exchange
        return (
            f"rows of rank {exchange.rank} of {exchange.ranks}, of {self.num_rows} x {self.table.dim} {self.rows.dtype}"
        )

    def whole_in_graph(self) -> Tensor:
        """Raise, as `whole`."""
        return self.whole()

    def assign_gradient(self, grad: Tensor | None) -> None:
        """Set the gradient to None, or to one made of that of the weight; raise for another, whose rows are those of all."""
        if grad is not None and not isinstance(grad, ShardGradient):
            self._refuse(
                "is assigned a gradient",
                "change weight.grad in place, or give gradients of rows: activate(ids).add_grad",
            )
        super().assign_gradient(grad)

    def __reduce__(self) -> Any:
        self._refuse("is pickled", "use st.save_checkpoint, or st.full_state_dict(model)")

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        self.rows.catch_up()
        made = type(self)(
            self.rows.copy(),
            self.partition,
            self.reducer.exchange,
            self.requires_grad,
            self.idle,
            self.reducer.comm_dtype,
        )
        made.__dict__.update(self._of_module())
        if self.features is not None:
            made.features = Features(self.features.names, self.features.starts)
        memo[id(self)] = made
        return made

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        count = self.reducer.exchange.ranks
        raise InvalidValueError(f"{self} {what}, but its rows are owned by {count} processes; {remedy}")
