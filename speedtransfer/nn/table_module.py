"""What `Embedding` and `EmbeddingBag` share: a table behind a module of torch.nn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from speedtransfer.encoding import check_dtypes
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.nn.options import TableOptions, complete
from speedtransfer.nn.tracing import refuse_to_record, unrecorded
from speedtransfer.nn.weight import table_weight, take_weight
from speedtransfer.optim import Handle, Rows, find_handle, install
from speedtransfer.tables import Table

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


def make_handle(
    weight: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype | None,
    requires_grad: bool,
    options: TableOptions,
) -> Handle:
    """Make a table of `shape` and its handle: with the values of `weight`, or of zeros. `options` are complete."""
    memory, path, storage_dtype = options["memory"], options["path"], options["storage_dtype"]
    if weight is not None:
        # With storage_dtype rows are float32, whatever floats they were given as.
        dtype = torch.float32 if storage_dtype is not None and weight.is_floating_point() else weight.dtype
    assert dtype is not None
    _follow_names()
    check_dtypes(dtype, storage_dtype, options["state_dtype"])
    stored = dtype if storage_dtype is None else storage_dtype
    if weight is not None and weight.dtype == stored:
        table, given = Table.from_array(weight, memory=memory, path=path, device=device, copy=False), None
    else:
        table, given = Table(shape[0], shape[1], stored, memory=memory, path=path, device=device), weight
    install()
    store = Rows(table, storage_dtype, options["state_dtype"])
    if given is not None:
        store.load("weight", given)
    return Handle(table, requires_grad, options["idle"], store)


@functools.cache
def _follow_names() -> None:
    """Have tables know the names of their modules, for messages: as in ``named_modules()`` of the outermost so far."""

    def name(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        for path, module in [] if child is None else child.named_modules(prefix=name):
            if isinstance(module, TableModule) and "_handle" in module.__dict__:
                module._handle.name = path

    register_module_module_registration_hook(name)


class TableModule(nn.Module):
    """A module whose weight is a table. `weight` reads and writes as the whole table (`nn.weight`)."""

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
        options: TableOptions,
    ) -> None:
        """Make the table and its handle: with the values of `weight`, or fresh ones."""
        options = complete(options)
        shape = (check_size(self.num_embeddings, "num_embeddings"), check_size(self.embedding_dim, "embedding_dim"))
        if self.padding_idx is not None:
            rows = self.num_embeddings
            # The built-in's type, that of torch.nn, so that code which catches it goes on to work.
            assert -rows <= self.padding_idx < rows, (
                f"padding_idx must be within num_embeddings: it is {self.padding_idx} but there are {rows} rows"
            )
            self.padding_idx %= rows
        self.idle = options["idle"]
        device = torch.get_default_device() if device is None else torch.device(device)
        if weight is None:
            dtype = torch.get_default_dtype() if dtype is None else dtype
        elif tuple(weight.shape) != shape:
            raise InvalidValueError(
                f"the weight given has shape {tuple(weight.shape)} but num_embeddings and embedding_dim say {shape}; "
                "pass a weight of that shape"
            )
        else:
            dtype = weight.dtype
        if device.type == "meta":
            self._wait(nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=not freeze), options)
            return
        self._handle = make_handle(weight, shape, device, dtype, not freeze, options)
        self._describe()
        self.register_parameter("weight", table_weight(self._handle))
        weight_now = self._parameters["weight"]
        if weight_now is not None and weight_now.is_meta:  # accelerate's init_empty_weights
            self._wait(weight_now, options)
        elif weight is None:
            self.reset_parameters()

    def _describe(self) -> None:
        """Tell the handle what a step must know of this module."""
        self._handle.sparse, self._handle.padding_idx = bool(self.sparse), self.padding_idx

    # --- on the meta device: no rows yet --------------------------------------------------------------------------------

    def _wait(self, weight: nn.Parameter, options: TableOptions) -> None:
        """Be a module of torch.nn with a weight on the meta device, until one with values comes in its place."""
        self.__dict__.pop("_handle", None)
        self._parameters["weight"] = weight
        self._options = options

    def _is_waiting(self) -> bool:
        return "_handle" not in self.__dict__ and "_options" in self.__dict__

    def _end_wait(self, weight: Tensor | None, device: torch.device, dtype: torch.dtype, param: nn.Parameter) -> None:
        """Make the table, of the values of `weight`, and `param` its weight."""
        shape = (self.num_embeddings, self.embedding_dim) if weight is None else (len(weight), weight.shape[1])
        handle = make_handle(weight, shape, device, dtype, param.requires_grad, self._options)
        del self._options
        self._handle = handle
        self._describe()
        self._parameters["weight"] = table_weight(handle, param)

    @property
    def table(self) -> Table:
        """The table with all the rows as they are stored: of int8 the codes, in plane "weight", and their scales."""
        if self._is_waiting():
            raise InvalidValueError(
                "this module is on the meta device and has no rows yet; give it some: to_empty(device=...), "
                "load_state_dict(..., assign=True), or weight = nn.Parameter(rows)"
            )
        return self._handle.table

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), the padding row zero: with one seed the numbers of ``torch.nn``."""
        if not self._has_rows():
            super().reset_parameters()  # type: ignore[misc]
            return
        self._handle.rows.normal_()
        if self.padding_idx is not None:
            self.table.torch()[self.padding_idx] = 0

    @unrecorded
    def activate(self, ids: Any) -> ActiveRows:
        """Return the unique rows of `ids` on the compute device; what forward is built on.

        Parameters
        ----------
        ids : tensor, ndarray, list or UniqueRows
            Row numbers, any integer dtype, shape and device. Or what `tables.unique_rows` has found among some on the CPU,
            where it looked for `padding_idx`, if there is one.
        """
        if not self._has_rows():
            raise InvalidTypeError(
                f"weight of {type(self).__name__} was swapped from outside (functional_call, a parametrization), so there are "
                "no rows of the table to activate; call the module instead, which computes with what was swapped in"
            )
        training = torch.is_grad_enabled() and self._handle.requires_grad
        return activate(self._handle, ids, training, self.max_norm, self.norm_type, self.padding_idx)

    def _has_rows(self) -> bool:
        """Tell whether the weight is that of the table, and not what functional_call or a parametrization put in its place."""
        weight, handle = self._parameters.get("weight"), self.__dict__.get("_handle")
        return weight is not None and handle is not None and weight is handle.param_ref()

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    @property
    def __overloads__(self) -> NoReturn:  # torch.jit asks for it before it compiles or traces anything
        refuse_to_record(self, "torch.jit")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        if self._is_waiting():
            return self._apply_waiting(fn, recurse)
        if not self._has_rows():
            super()._apply(fn, recurse)
            return self
        path, dtype = self.table.path, self._handle.rows.dtype
        if path is not None and fn(torch.empty(0, dtype=dtype, device=self.table.device)).dtype != dtype:
            raise InvalidValueError(
                f"the file {str(path)!r} holds {dtype} and cannot change its dtype; save the table, or make a new module with "
                "dtype= and another path"
            )
        handle = self._handle
        with torch.no_grad(), torch.inference_mode(False):
            sample = fn(torch.empty(0, handle.table.dim, dtype=dtype, device=handle.table.device))
        if sample.is_shared() and sample.device.type == "cpu":
            raise InvalidTypeError(
                f"{handle} is the weight of a table, which cannot be shared by forked processes (share_memory); make the "
                "model in each process, or train it in one"
            )
        # The weight goes its own way: to convert it as torch does would make a copy of the whole.
        weight, self._parameters["weight"] = self._parameters["weight"], None
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        if sample.dtype != handle.rows.dtype:
            handle.convert(sample.dtype)
        if sample.device != handle.table.device:
            handle.move(sample.device)
        return self

    def _apply_waiting(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> TableModule:
        weight = self._parameters["weight"]
        assert weight is not None
        sample = fn(torch.empty(0, weight.shape[1], dtype=weight.dtype, device="meta"))
        if sample.is_meta:
            super()._apply(fn, recurse)
            return self
        self._parameters["weight"] = None  # which would be made in full on the device
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        param = nn.Parameter(torch.empty(0, dtype=sample.dtype, device=sample.device), weight.requires_grad)
        self._end_wait(None, sample.device, sample.dtype, param)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "_handle" in self.__dict__:
            self._handle.recover()  # of a step that failed it would be the active rows
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, nn.Parameter):
            if self._is_waiting():
                if not value.is_meta:
                    self._end_wait(value.detach(), value.device, value.dtype, value)
            elif "_handle" in self.__dict__ and not value.is_meta:
                self._take_weight(value)
        super().__setattr__(name, value)

    def _take_weight(self, param: nn.Parameter) -> None:
        """Make `param` the weight: it stays the object that it is, so modules that share it go on to share it."""
        if type(param.data) is not Tensor and find_handle(param) is None:
            raise InvalidTypeError(
                f"{self._handle} is the weight of a table and cannot become a {type(param.data).__name__} (fully_shard, "
                "quantization); leave the module out there, or use torch.nn for it"
            )
        other = find_handle(param)
        if other is self._handle:
            return
        if other is not None:  # two embeddings become one table
            self._handle = other
            return
        with torch.no_grad():
            take_weight(self._handle, param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._is_waiting():
            self._describe()
        install()  # unpickled in a process that has made no module yet
        if self._parameters.get("weight") is not None and find_handle(self._parameters["weight"]) is None:
            self._parameters["weight"] = table_weight(self._handle)  # pickled by an older version

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the whole plane under the name that ``torch.nn`` uses: a view, or of int8 the values, in float32."""
        met = _stand_ins.get()
        if not self._has_rows():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        weight, self._parameters["weight"] = self._parameters["weight"], self._stand_in()  # type: ignore[assignment]
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            self._parameters["weight"] = weight
        self._handle.name = prefix[:-1]
        if met is None:
            self._handle.recover()
            destination[prefix + "weight"] = weight if keep_vars else self._handle.rows.whole("weight")
        else:
            destination[prefix + "weight"] = self._stand_in()
            met.append((destination[prefix + "weight"], self._handle))

    def _stand_in(self) -> Tensor:
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._handle.rows.dtype, device="meta")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load the whole plane as ``torch.nn`` loads a weight; ``assign=True`` copies too: the table keeps its memory."""
        if not self._has_rows():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            return
        met, rows, weight = _stand_ins.get(), self._handle.rows, self._parameters["weight"]
        self._handle.recover()
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
            self._parameters["weight"] = weight

    def extra_repr(self) -> str:
        """Say what torch.nn says, and where the rows live."""
        text = super().extra_repr()
        memory, rows = f"memory={self.table.memory!r}", self._handle.rows
        for name in ("storage_dtype", "state_dtype"):
            memory += f", {name}={getattr(rows, name)}" if getattr(rows, name) is not None else ""
        return f"{text}, {memory}" if text else memory
