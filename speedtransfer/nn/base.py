"""What `Embedding` and `EmbeddingBag` share: a table behind a module of torch.nn."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.optim import Handle, RowStore, install
from speedtransfer.optim.codecs import check_dtypes
from speedtransfer.tables import Table

IDLE = ("lazy", "exact")
P = ParamSpec("P")
T = TypeVar("T")

# Meta tensors that stand for the rows in a state dict, each with its handle; None: state dicts hold the rows themselves.
_stand_ins: ContextVar[list[tuple[Tensor, Handle]] | None] = ContextVar("stand_ins", default=None)


@contextmanager
def rows_aside() -> Iterator[list[tuple[Tensor, Handle]]]:
    """Within, state dicts of table modules show and take a meta tensor for the rows, which go their own way.

    Yields the list of those met, each with its handle: what streams the rows finds out by it which are whose.
    """
    met: list[tuple[Tensor, Handle]] = []
    token = _stand_ins.set(met)
    try:
        yield met
    finally:
        _stand_ins.reset(token)


def uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Run `method` as it is inside a compiled model too: which rows a batch names is known only when it runs."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class TableModule(nn.Module):
    """A module whose weight is a table. `weight` is the parameter that optimizers see (`optim.Handle`)."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    sparse: bool
    idle: str

    def _set_up(
        self,
        weight: Tensor | None,
        freeze: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        memory: str,
        path: str | os.PathLike[str] | None,
        idle: str,
        storage_dtype: torch.dtype | None,
        state_dtype: torch.dtype | None,
    ) -> None:
        """Make the table and its handle: with the values of `weight`, or fresh ones."""
        if idle not in IDLE:
            raise InvalidValueError(f"idle is {idle!r}, which is no way to treat idle rows{suggest(str(idle), IDLE)}")
        shape = (check_size(self.num_embeddings, "num_embeddings"), check_size(self.embedding_dim, "embedding_dim"))
        if self.padding_idx is not None:
            rows = self.num_embeddings
            # The built-in's type, that of torch.nn, so that code which catches it goes on to work.
            assert -rows <= self.padding_idx < rows, (
                f"padding_idx must be within num_embeddings: it is {self.padding_idx} but there are {rows} rows"
            )
            self.padding_idx %= rows
        self.idle = idle
        device = torch.get_default_device() if device is None else device
        if weight is None:
            dtype = torch.get_default_dtype() if dtype is None else dtype
        else:
            if tuple(weight.shape) != shape:
                raise InvalidValueError(
                    f"the weight given has shape {tuple(weight.shape)} but num_embeddings and embedding_dim say {shape}; "
                    "pass a weight of that shape"
                )
            # With storage_dtype rows are float32, whatever floats they were given as.
            dtype = torch.float32 if storage_dtype is not None and weight.is_floating_point() else weight.dtype
        check_dtypes(dtype, storage_dtype, state_dtype)
        stored = dtype if storage_dtype is None else storage_dtype
        if weight is not None and weight.dtype == stored:
            table, given = Table.from_array(weight, memory=memory, path=path, device=device, copy=False), None
        else:
            table, given = Table(*shape, dtype=stored, memory=memory, path=path, device=device), weight
        install()
        store = RowStore(table, storage_dtype, state_dtype)
        self._handle = Handle(table, requires_grad=not freeze, idle=idle, rows=store)
        self._describe()
        self.register_parameter("weight", self._handle.param)
        if given is not None:
            store.load("weight", given)
        elif weight is None:
            self.reset_parameters()

    def _describe(self) -> None:
        """Tell the handle what a step must know of this module."""
        self._handle.sparse, self._handle.padding_idx = bool(self.sparse), self.padding_idx

    @property
    def table(self) -> Table:
        """The table with all the rows as they are stored: of int8 the codes, in plane "weight", and their scales."""
        return self._handle.table

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), the padding row zero: with one seed the numbers of ``torch.nn``."""
        self._handle.rows.normal_()
        if self.padding_idx is not None:
            self.table.torch()[self.padding_idx] = 0

    @uncompiled
    def activate(self, ids: Any) -> ActiveRows:
        """Return the unique rows of `ids` on the compute device; what forward is built on.

        Parameters
        ----------
        ids : tensor, ndarray, list or UniqueRows
            Row numbers, any integer dtype, shape and device. Or what `tables.unique_rows` has found among some on the CPU,
            where it looked for `padding_idx`, if there is one.
        """
        training = self._training_rows()
        active = activate(self._handle, ids, self.max_norm, self.norm_type, self.padding_idx)
        if training:
            active.track_grad()
        return active

    def _training_rows(self) -> bool:
        """Tell whether a lookup now wants gradients."""
        weight = self._handle.param
        if self._parameters.get("weight") is not weight:
            raise InvalidTypeError(
                f"weight of {type(self).__name__} was swapped from outside (functional_call, a parametrization) but rows are "
                "looked up in its table; write them there with emb.table[ids] = rows, or use torch.nn for this module"
            )
        training = torch.is_grad_enabled() and weight.requires_grad
        if training or self._handle.state is None:  # another thread may evaluate while this one makes a step
            self._handle.check_unwritten()
        return training

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        path, dtype = self.table.path, self._handle.rows.dtype
        if path is not None and fn(torch.empty(0, dtype=dtype, device=self.table.device)).dtype != dtype:
            raise InvalidValueError(
                f"the file {str(path)!r} holds {dtype} and cannot change its dtype; save the table, or make a new module with "
                "dtype= and another path"
            )
        super()._apply(fn, recurse)
        handle, weight = self._handle, self._parameters["weight"]
        assert weight is not None
        if weight is not handle.param:  # torch.__future__.set_overwrite_module_params_on_conversion
            handle.bind(weight)
        if weight.dtype != handle.rows.dtype:
            handle.convert(weight.dtype)
        if weight.device != handle.table.device:
            # Planes of state on the device move along, and the optimizer's views of them do not.
            if handle.table.memory == "device":
                handle.drop_state(f"the table moved to {weight.device}")
            handle.table.to(weight.device)
            if handle.ids is not None:
                handle.ids = handle.ids.to(weight.device)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "_handle" in self.__dict__ and value is not self._handle.param:
            raise InvalidTypeError(
                f"weight of {type(self).__name__} is a handle on the active rows and cannot be replaced or tied; "
                "write the rows with emb.table[ids] = rows, or the whole with load_state_dict or from_pretrained"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._describe()
        install()  # unpickled in a process that has made no module yet

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the whole plane under the name that ``torch.nn`` uses: a view, or of int8 the values, in float32."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        met = _stand_ins.get()
        if met is None:
            destination[prefix + "weight"] = self._handle.rows.whole("weight")
        else:
            destination[prefix + "weight"] = self._stand_in()
            met.append((destination[prefix + "weight"], self._handle))

    def _stand_in(self) -> Tensor:
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._handle.rows.dtype, device="meta")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load the whole plane as ``torch.nn`` loads a weight; ``assign=True`` copies too: the table keeps its memory."""
        met, rows = _stand_ins.get(), self._handle.rows
        whole = nn.Parameter(self.table.torch() if met is None else self._stand_in(), requires_grad=False)
        if met is None and not rows.plain:  # torch.nn checks names and shapes, and then calls this
            vars(whole)["copy_"] = lambda values: rows.load("weight", values)
        self._parameters["weight"] = whole
        try:
            super()._load_from_state_dict(
                state_dict, prefix, {**local_metadata, "assign_to_params_buffers": False}, *rest
            )
            if met is not None and prefix + "weight" in state_dict:
                met.append((state_dict[prefix + "weight"], self._handle))
        finally:
            self._parameters["weight"] = self._handle.param

    def extra_repr(self) -> str:
        """Say what torch.nn says, and where the rows live."""
        text = super().extra_repr()
        memory, rows = f"memory={self.table.memory!r}", self._handle.rows
        for name in ("storage_dtype", "state_dtype"):
            memory += f", {name}={getattr(rows, name)}" if getattr(rows, name) is not None else ""
        return f"{text}, {memory}" if text else memory
