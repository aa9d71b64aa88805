"""Tie a parameter to the rows of a table. The way of a row, from forward to step and back:

forward
    `nn.active.activate` finds the unique ids of a batch. `Rows.read` gathers their rows (`fetch`), decodes them and applies
    the steps that they have missed (`finish`). They become `ActiveRows.rows`, in the graph of autograd, which
    `nn.lookup.lookup` indexes.
backward
    The node between them and the parameter, `graph.TableRows`, calls `Handle.deposit`, which adds their gradient to the
    pending one: `ids`, `grad`, `active`. Where hooks look at the parameter, they get it first, and `graph.receive` deposits.
step
    Before it `hooks._load` probes an optimizer that is new to the table (`give_state` adds planes for its state) and calls
    `Handle.begin_step`: `refresh` reads the active rows again if the table has changed, `RowState.load` puts their state into
    `optimizer.state`, and `_enter` makes the parameter an ordinary one that holds the active rows and their gradient.
    The optimizer updates them. After it `hooks._after_step` calls `Handle.end_step`: `RowState.store` writes rows and state
    (`Rows.write`: encode, scatter, record the step for idle rows), and `_leave` makes the parameter a placeholder again.
    Where `fused_step.plan_step` says so, one kernel reads, updates and writes the state instead.
    A step that raises ends in `abort_step`, or in `recover` when the table is used next; neither writes to the table.
zero_grad
    ``weight.grad = None`` calls `assign_gradient`, which calls `clear`.

What differs between tables a handle asks of two objects. `owners` say who has which rows: this process alone
(`owners.Owners`), or several, each some (`sharded.Sharded`), all in one memory (`shared.SharedOwners`), or each a copy
(`replicas.Replicas`). `id_space` says what an id means: the number of a row (`id_space.IdSpace`), or something that gets a row
when it comes (`vocabulary_ids.VocabularyIds`).

The parts of a handle, each the base of the one before: `Handle`, `Binding`, `PendingGradient`, `Stepping`, `TableParam`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.cuda import check_not_capturing
from speedtransfer.dtypes import bits_of
from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.interrupts import to_its_end
from speedtransfer.optim.binding import Binding
from speedtransfer.optim.features import Features
from speedtransfer.optim.graph import KEY
from speedtransfer.rows import Rows
from speedtransfer.tables import Table, padded_anew

_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def find_handle(param: Any) -> Handle | None:
    """Return the handle of `param`, or None for an ordinary parameter."""
    handle: Handle | None = getattr(param, "__dict__", {}).get(KEY)
    return handle if handle is not None and handle.param_ref() is param else None


def handles_over(table: Table) -> list[Handle]:
    """Return the handles whose rows are those of `table`."""
    return [handle for handle in _handles if handle.rows.table is table]


def any_handles() -> bool:
    """Tell whether there is any handle: without one the hooks do nothing."""
    return len(_handles) > 0


class Handle(Binding):
    """Tie a parameter to a table.

    Between steps the parameter is a placeholder for the whole table, of a class that reads and writes the table
    (`nn.weight.TableWeight`); the active rows and their gradient are kept here. In the step of an optimizer it is an ordinary
    ``nn.Parameter``: its data the active rows, ``(n, dim)``, its grad their gradient. It never enters autograd.

    Parameters
    ----------
    table : Table
    requires_grad : bool
        Whether the rows are trained.
    idle : {"auto", "exact", "lazy"}
        What happens to rows that a step does not touch.
    rows : Rows, optional
        Reads and writes the rows of `table`; by default without a codec.
    """

    def __init__(self, table: Table, requires_grad: bool = True, idle: str = "lazy", rows: Rows | None = None) -> None:
        super().__init__(table, requires_grad, idle, rows)
        _handles.add(self)

    def whole(self, ids: Tensor | None = None) -> Tensor:
        """Return all rows, caught up, ``(num_rows, dim)`` on the compute device; if `aliased` over the table's memory.

        Then only the rows `ids` (n,), sorted and unique, need be caught up, if others are not used.
        """
        self.check_whole()
        self.recover()
        if ids is not None and self.aliased:
            self.rows.catch_up(ids.to(self.table.device))
            self.table.wait()
            return self.table.stored("weight").detach()
        copied = not self.rows.is_viewable("weight")
        values = self.rows.whole("weight").detach()
        # Writes to this memory may go unnoticed (NumPy), so that the next step must read its rows again.
        self._exposed = True
        if self.aliased:
            return self.track_alias(values)
        try:
            # An inference tensor has no version, which shows writes.
            with torch.inference_mode(False):
                moved = values.to(self.table.device, self.rows.dtype)
                return moved.clone() if moved is values and not copied else moved
        except torch.OutOfMemoryError as error:
            raise InvalidValueError(
                f"{self} is used as a whole, but its {self.table.num_rows} rows do not fit on {self.table.device}; use the "
                "rows that are needed (emb(ids)), or emb.table.torch(), where the rows live"
            ) from error

    def note_use(self, ids: Tensor, version: int) -> None:
        """Note that since a version of the table the rows `ids` (n,) may have changed, and that views of them may be held.

        Active rows that are not among them need not be read again.
        """
        with self.rows.lock:
            self._exposed_rows.append(ids)
            if len(self._exposed_rows) > 16:
                self._exposed_rows, self._exposed = [], True
            if self.ids is not None and self._version == version and not self.is_active(ids):
                self._version = self.table.version

    def check_whole(self) -> None:
        """Raise unless this process may read all rows of the weight by itself."""
        self.owners.check_whole(
            "is used as a whole",
            "look up the rows needed (emb(ids)), set rows by emb.table.scatter, get all by st.full_state_dict(model), "
            "leave it out of fully_shard: ignored_params=st.table_parameters(model)",
        )

    def shown(self) -> str:
        """Return all rows as text, or what there is of them here."""
        return self.owners.shown()

    def whole_in_graph(self) -> Tensor:
        """Return all rows, ``(num_rows, dim)``, as what a graph made of the weight; backward deposits the gradient of all."""
        if self.table.device.type == "cuda":
            check_not_capturing(f"a use of all of {self}", "look the rows up that are needed (emb(ids))")
        # Each time anew where rows are pinned until their gradient comes.
        if self._whole is not None and not self.id_space.come_and_go:
            known = self._whole[0]()
            if known is not None and self._whole[1] == self.table.version:
                # Torch asks for that of who has it by a weak reference.
                known._fix_weakref()  # type: ignore[attr-defined]
                return known
        with torch.inference_mode(False), _outside_of_transforms():
            values = self.whole().detach()
            every = None if self.features is None else self.features.every
            made = self.join(values, None, functools.partial(self.deposit_whole, values), every)
        self._whole = weakref.ref(made), self.table.version
        return made

    def normal_(self, start: int = 0, stop: int | None = None) -> None:
        """Draw the weights of the rows from `start` to `stop` from N(0, 1): the numbers of ``torch.nn`` with the same seed.

        Rows of ids that have initial values get these.
        """
        if self.id_space.reset_rows():
            return
        self.table.check_writable()
        self.owners.normal_(start, stop)

    def load(self, values: Tensor, start: int = 0) -> None:
        """Set rows, from `start` on, to `values`, ``(n, dim)``, rounded to nearest; each process keeps its own."""
        self.id_space.check_written("written as a whole")
        self.owners.load(values, start)

    def set_padding(self, padding_idx: int | None) -> None:
        """Keep the row that sparse gradients leave out, if this process has it: that of the padding of the module."""
        self.padding_idx = self.owners.own_row(self.id_space.padding_row(padding_idx))

    def store(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(num_rows, dim)``, and keep the state of the optimizer; each process keeps its own."""
        self.id_space.check_written("written as a whole")
        self.owners.store(values)

    def check_equal(self, values: Tensor) -> None:
        """Raise unless the rows, which are only read, are `values`, ``(num_rows, dim)``: what is loaded there."""
        differs = self.rows.first_difference("weight", lambda rows: values[rows])
        if differs is not None:
            raise InvalidValueError(
                f"{self} is read in place and cannot be loaded, and row {differs} of what is to be loaded is another one; "
                "leave its key out (strict=False), or copy the table (from_pretrained(table, memory='pageable'))"
            )

    def take_param(self, param: nn.Parameter, kind: type[nn.Parameter]) -> None:
        """Make an ordinary parameter, with its values, the weight.

        If the table takes over its memory, the weight so far becomes an ordinary parameter; else it can no longer be used.
        """
        self.id_space.check_written("replaced by another parameter")
        # It would be that of one process.
        self.owners.check_whole(
            "is given another weight", "set its rows by load_state_dict(), or weight.data = all rows"
        )
        self.table.check_writable()
        values, grad = param.detach(), self.gradient()
        self.drop_state("another weight was assigned to the module")
        self.clear()
        release = self._can_take(values) and len(values) == self.table.num_rows and values.dtype == self.rows.dtype
        old = self.param_ref() if release else None
        if old is not None:
            # `set_whole` must not make it show the new memory.
            self.param_ref = lambda: None
        try:
            self.set_whole(values)
        finally:
            if old is not None:
                self.param_ref = weakref.ref(old)
        self.bind(param, kind, release)
        if old is not None:
            # It may still be held, and trained, elsewhere.
            old.grad = grad

    def set_whole(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(any, dim)``. Another number of rows makes a new table, without state.

        The device of the rows becomes that of `values`, as in torch, and without `storage_dtype` their dtype too. Several
        processes each keep their own rows of `values`, ``(num_rows, dim)``.
        """
        self.id_space.check_written("assigned")
        if not self.owners.has_whole:
            self.owners.store(values)
            return
        table, rows = self.table, self.rows
        table.check_writable()
        if values.dim() != 2 or values.shape[1] != table.dim:
            remedy = f"pass rows of {table.dim} values, or make a new module of that width (from_pretrained)"
            if not values.numel():
                remedy = (
                    "what empties parameters between their uses (ZeRO-3 of DeepSpeed) must leave tables out, which are "
                    "st.table_parameters(model)"
                )
            raise InvalidValueError(
                f"{self} is {(table.num_rows, table.dim)} but the values assigned are {tuple(values.shape)}; {remedy}"
            )
        if self.features is not None and len(values) != table.num_rows:
            raise InvalidValueError(
                f"{self} has {table.num_rows} rows, those of {len(self.features.names)} features, but the values assigned are "
                f"{tuple(values.shape)}; make a new MultiEmbedding for another number of rows"
            )
        resized, retyped = len(values) != table.num_rows, rows.storage_dtype is None and values.dtype != rows.dtype
        if table.path is not None and (resized or retyped):
            raise InvalidValueError(
                f"{self} is the file {str(table.path)!r} of {table.num_rows} rows of {rows.dtype}, which cannot become "
                f"{tuple(values.shape)} of {values.dtype}; make a new module with another path"
            )
        values = values.detach()
        for other in _handles:
            own = other.table.cache_rows is not None or other.table.max_rows is not None
            if other is self or not (other.aliased or own):
                continue
            if _shares(values, other.table.stored("weight")):
                raise InvalidValueError(
                    f"{self} is assigned the memory of {other}, another table, and one memory cannot be two tables; write its "
                    "values (weight.data.copy_(other)), or share the weight itself (module.weight = other.weight)"
                )
        if values.device != table.device:
            self.move(values.device)
        if not resized and not retyped and self._can_take(values):
            self.rows.catch_up()
            # As in torch: `values` becomes the memory of the weight, and other tensors over the memory so far keep it.
            table.take("weight", values)
            self.reset_param()
            return
        self._detach_aliases()
        if resized or retyped:
            dtype = values.dtype if rows.storage_dtype is None else rows.storage_dtype
            options: Any = {"memory": table.memory, "layout": table.layout, "max_rows": table.max_rows}
            made = Table(len(values), table.dim, dtype, device=table.device, **options)
            made._start_cache(table._options_of_cache(len(values)))
            reason = f"the table got {len(values)} rows" if resized else f"the table became {values.dtype}"
            self.replace(Rows(made, rows.storage_dtype, rows.state_dtype, rows.scale_block), reason)
        self.store(values)

    def _can_take(self, values: Tensor) -> bool:
        """Tell whether `values` can become the memory of the table."""
        ordinary = values.is_contiguous() and not values.is_inference() and type(values) is Tensor
        own = self.table.memory == "pageable" and values.device.type == "cpu"
        own = own or (self.table.memory == "device" and values.device == self.table.device)
        return self.aliased and ordinary and own

    def _detach_aliases(self) -> None:
        """Give the tensors that alias the table a copy of its values, before others are written there."""
        alive = [tensor for tensor in (reference() for reference in self._aliases) if tensor is not None]
        if alive:
            kept = self.whole().clone()
            for tensor in alive:
                if type(tensor) is Tensor:
                    tensor.data = kept
                else:
                    tensor.detach_from_table(kept)  # type: ignore[attr-defined]
        self._aliases = []

    def grow(self, num_rows: int) -> None:
        """Give the weight more rows, zero, as `Table.grow`; the pending gradient and the optimizer's state stay.

        Raises
        ------
        OptimizerError
            A step runs.
        InvalidValueError
            Several processes, or several weights, have this table; or as `Table.grow`.
        """
        with self.rows.lock:
            if self.state is not None and self.state.running:
                raise OptimizerError(
                    f"{self} cannot grow to {num_rows} rows while an optimizer steps; grow it before the step, or after it"
                )
            # Where ids come and go each process grows its own rows, without a collective call.
            alone = self.owners.is_alone or self.id_space.come_and_go
            if not alone or len(handles_over(self.table)) > 1:
                what = "weights" if alone else "processes"
                raise InvalidValueError(
                    f"{self} cannot grow to {num_rows} rows, as several {what} have its table; make it of one (without "
                    "process_group, with a table of its own)"
                )
            before, ids = self.table.num_rows, self.ids
            try:
                self.rows.grow(num_rows)
            finally:
                # After an interrupt the table may have grown.
                to_its_end(lambda: self._follow_growth(before, ids))

    def _follow_growth(self, before: int, given: Tensor | None) -> None:
        """Show as many rows as the table has, which had `before`, when those of the pending gradient were `given` (n,)."""
        if self.table.num_rows == before:
            return
        self.has_grown = True
        if self.ids is not None and self.grad is not None:
            self.ids = padded_anew(self.ids, self.table.num_rows)
        for task, (ids, grad) in self._arriving.items():
            self._arriving[task] = padded_anew(ids, self.table.num_rows), grad
        self.show_growth()
        self.id_space.follow_growth(given)

    def show_growth(self) -> None:
        """Let the weight, and its gradient, have as many rows as there are by now."""
        self._whole = self._shown = None
        self.reset_param()

    def __reduce__(self) -> Any:
        """Pickle the rows without their state, which is the optimizer's, and without a gradient, as torch does."""
        self.owners.check_whole("is pickled", "use st.save_checkpoint, or st.full_state_dict(model)")
        # The copy uses no file, and may be unpickled where memory cannot be pinned.
        memory, device = "device" if self.table.memory == "device" else "auto", str(self.table.device)
        weight = bits_of(self.table.torch())
        arguments = weight, memory, device, self.requires_grad, self.idle, self.rows.pickled()
        return self.id_space.pickled((_unpickle, arguments, self._of_module()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        self.owners.begin_copy()
        # Without the planes of state, which a copy of the optimizer has.
        rows = self.rows.copy()
        duplicate = Handle(rows.table, self.requires_grad, self.idle, rows)
        self.owners.copy_to(duplicate)
        self.id_space.copy_to(duplicate, memo)
        duplicate.__dict__.update(self._of_module())
        if self.features is not None:
            duplicate.features = Features(self.features.names, self.features.starts, duplicate.id_space)
        memo[id(self)] = duplicate
        return duplicate

    def _of_module(self) -> dict[str, Any]:
        """Return the attributes that the module has set, which copies keep."""
        return {name: getattr(self, name) for name in ("name", "sparse", "renormalizes", "padding_idx")}


def _shares(values: Tensor, plane: Tensor) -> bool:
    """Tell whether the memory of two dense tensors overlaps; tensors of one storage need not."""
    if values.device != plane.device or not values.is_contiguous() or values.is_meta:
        return False
    return values.data_ptr() < plane.data_ptr() + plane.nbytes and plane.data_ptr() < values.data_ptr() + values.nbytes


def _unpickle(
    weight: Tensor, memory: Any, device: str, param: nn.Parameter | bool, idle: str, rows: dict[str, Any]
) -> Handle:
    # An older version named no dtype.
    weight = weight.view(rows.get("stored", weight.dtype))
    table = Table.from_array(weight, memory, device=device, copy=False)
    trained = param if isinstance(param, bool) else param.requires_grad
    handle = Handle(table, trained, idle, Rows.unpickled(table, rows))
    if not isinstance(param, bool):
        # That of the module, which looks whether it has another.
        handle.param_ref = weakref.ref(param)
    return handle


def _outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave transforms of torch.func (vmap, grad), within which no tensor becomes a leaf."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
