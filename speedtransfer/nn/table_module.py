"""The base class of `Embedding` and `EmbeddingBag`: a module of ``torch.nn`` whose weight is a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from speedtransfer.cuda import resolve_device
from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.eager import tracing_mode
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.nn import autograd_grad, weight_rows  # noqa: F401
from speedtransfer.nn.active import ActiveRows, activate, rows_for_lookup
from speedtransfer.nn.fused_lookup import read_ahead
from speedtransfer.nn.lookup_ops import new_key, register
from speedtransfer.nn.module_state import ModuleState, with_weight
from speedtransfer.nn.new_rows import NewRows
from speedtransfer.nn.new_table import make_handle
from speedtransfer.nn.options import TableOptions, complete, options_of
from speedtransfer.nn.patches import install
from speedtransfer.nn.sharded_table import ShardedTable
from speedtransfer.nn.ticket import Ticket
from speedtransfer.nn.tracing import refuse_to_quantize, refuse_to_record, unrecorded
from speedtransfer.nn.vocabulary_module import VocabularyModule
from speedtransfer.nn.weight import TableWeight, WeightData, check_ordinary
from speedtransfer.optim import Handle, Sharded, find_handle
from speedtransfer.optim.assignment import take_param
from speedtransfer.tables import Table, check_dtype


class TableModule(VocabularyModule, ModuleState):
    """A module of ``torch.nn`` whose weight is a table; `weight` reads and writes as the whole table (`nn.weight`).

    On the meta device it is waiting: it has `_options`, a weight without memory, and no `_handle` yet.
    """

    sparse: bool
    idle: str
    # Whether lookups read the weight by name: a `__getattr__` that is not ours or torch's may do something there (Pyro's).
    _reads_weight: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found = cls.__getattr__, super().__getattr__
        cls._reads_weight = found != (TableModule.__getattr__, nn.Module.__getattr__)

    def _set_up(
        self,
        weight: Tensor | Table | None,
        freeze: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        options: TableOptions,
    ) -> None:
        """Make the table, with the values of `weight` or random ones, and the weight of this module.

        A table as `weight` is used itself unless `options` ask for a copy; then `dtype` is that of lookups.
        """
        if tracing_mode() == "FakeTensorMode":
            raise InvalidTypeError(
                f"{type(self).__name__} is made under FakeTensorMode, where tensors have no values, but a table has memory; "
                "make a module of torch.nn there"
            )
        options = complete(options)
        shape = (check_size(self.num_embeddings, "num_embeddings"), check_size(self.embedding_dim, "embedding_dim"))
        # With a vocabulary it is an id, which is checked there.
        if options["vocabulary"] is None:
            self.padding_idx = self._checked_padding(self.padding_idx)
        self.idle = options["idle"]
        if device is None:
            device = torch.get_default_device()
        else:
            device = torch.device("meta") if str(device).startswith("meta") else resolve_device(device)
        if dtype is not None:
            check_dtype(dtype)
        given = shape if weight is None else shape_of(weight)
        if given != shape:
            raise InvalidValueError(
                f"the weight given has shape {given} but num_embeddings and embedding_dim say {shape}; "
                "pass a weight of that shape"
            )
        if isinstance(weight, Tensor):
            dtype = weight.dtype
            if isinstance(weight, nn.Parameter):
                check_ordinary(weight)
        elif dtype is None and weight is None:
            dtype = torch.get_default_dtype()
        if device.type == "meta":
            if options["vocabulary"] is not None:
                NewRows(
                    None, shape, device, dtype or torch.get_default_dtype(), options, self.padding_idx, None
                ).check()
            self._wait(nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=not freeze), options)
            return
        if weight is None and dtype in FLOAT8_DTYPES:
            raise InvalidTypeError(
                f"dtype is {dtype}, of which torch draws no random numbers and in which nothing is trained; pass "
                f"storage_dtype={dtype} in place of dtype, or weights (from_pretrained)"
            )
        self._use(make_handle(weight, shape, device, dtype, not freeze, options, self.padding_idx))
        self.register_parameter("weight", self._handle.new_param(TableWeight))
        registered = self._parameters["weight"]
        # accelerate's init_empty_weights registers a meta tensor instead.
        if registered is not None and registered.is_meta:
            self._wait(registered, options)
        elif weight is None:
            self.reset_parameters()

    def _use(self, handle: Handle) -> None:
        """Make `handle` that of this module, and tell it what a step must know of the module."""
        register()
        self._handle, self._key = handle, new_key(self)
        if self.max_norm is not None and not handle.table.writable:
            raise InvalidValueError(
                f"max_norm is {self.max_norm}, which shortens rows where they are stored, but these are read in place and "
                "cannot be changed; leave it out, or copy the table (memory='pageable')"
            )
        handle.sparse = bool(self.sparse)
        handle.renormalizes = handle.renormalizes or self.max_norm is not None
        handle.set_padding(self.padding_idx)

    def _wait(self, weight: nn.Parameter, options: TableOptions) -> None:
        """Have no rows until the meta tensor `weight` is replaced by one with values."""
        self.__dict__.pop("_handle", None)
        self._parameters["weight"] = weight
        self._options = options

    def _is_waiting(self) -> bool:
        weight = self._parameters.get("weight")
        return "_handle" not in self.__dict__ and weight is not None and weight.is_meta

    def _end_wait(self, weight: Tensor | None, param: nn.Parameter) -> None:
        """Make the table with the values of `weight`, or zeros, on the device of `param`, which becomes the weight."""
        shape = (self.num_embeddings, self.embedding_dim) if weight is None else (len(weight), weight.shape[1])
        about = param.device, param.dtype, param.requires_grad, self._options, self.padding_idx
        self._use(make_handle(weight, shape, *about))
        del self._options
        self._parameters["weight"] = self._handle.bind(param, TableWeight)

    @property
    def table(self) -> Table:
        """The table with all rows as they are stored: int8 and float8 rows as codes, in plane "weight", and their scales; of
        rows of 24 bits the nearest bfloat16, and the other bits in plane "weight.low".

        With `process_group` a :class:`~speedtransfer.nn.ShardedTable`.
        """
        if self._parameters.get("weight") is not None and not self._has_rows():
            raise self._without_rows("read emb.weight")
        if isinstance(self._handle.owners, Sharded):
            return ShardedTable(self._handle, self._handle.owners)  # type: ignore[return-value]
        return self._handle.table

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 1), the padding row zero: the same numbers as ``torch.nn`` with the same seed.

        Those of more than 2**26 values that several processes own are drawn by each for its own rows.
        """
        if not self._has_rows():
            super().reset_parameters()  # type: ignore[misc]
            return
        self._handle.normal_()
        padding = None if self.vocabulary is not None else self._handle.id_space.padding_row(self.padding_idx)
        if padding is not None:
            self._handle.load(torch.zeros(1, self.embedding_dim, device="cpu"), padding)

    @unrecorded
    def activate(self, ids: Any) -> ActiveRows:
        """Return the unique rows of `ids` on the compute device; what forward is built on.

        Parameters
        ----------
        ids : tensor, ndarray, list or UniqueRows
            Row numbers, any integer dtype, shape and device. Or the result of `tables.unique_rows` for ids on the CPU, made
            with the `padding_idx` of this module, if it has one. With a vocabulary its ids; what is returned has the numbers
            of their rows in the table. Ids without a row all have that of unseen ids there, which holds zeros unless it is
            trained (``unseen="row"``): what forward reads for them with ``unseen="initial"`` is not in the table.
        """
        if not self._has_rows():
            raise self._without_rows("call the module instead of activate(), which computes with what was swapped in")
        training = torch.is_grad_enabled() and self._handle.requires_grad
        if self._handle.id_space.come_and_go:
            return self._activate_by_id(ids, training)
        rows, padding = rows_for_lookup(self._handle, ids, self.padding_idx, self._handle.requires_grad)
        return activate(self._handle, rows, training, self.max_norm, self.norm_type, padding, by_hand=True)

    @unrecorded
    def prefetch(self, ids: Any) -> Ticket:
        """Begin to read the rows of `ids`, in threads of their own, and return a ticket for the lookup that uses them.

        The lookup takes the ticket in the place of the ids, or the ids again. Its numbers are those without a ticket: rows
        that were written since are read again. A ticket serves one lookup; another that gets it reads by itself.

        On a CUDA device the rows cross the bus on a stream of their own. Ids on the device are found again if they are the
        same tensor, or a view like it; copies of them are not, as the host would have to wait to compare values.

        The ticket has ids alone where rows are not read ahead: those of ``memory="device"`` and ``"shared"``, and of several
        processes those of a vocabulary or with `max_norm`.

        Parameters
        ----------
        ids : tensor, ndarray or list
            As for the module.

        Raises
        ------
        InvalidTypeError
            They are no integers. That one is out of range is told where the ticket is used.
        """
        if not self._has_rows():
            raise self._without_rows("leave prefetch out")
        return read_ahead(self, ids)

    def _found(self, ids: Any) -> Any:
        """Return what features make of `ids`, given as to the module; None: they are those of the table."""
        return None

    def _without_rows(self, remedy: str) -> InvalidTypeError | InvalidValueError:
        """Return the error for what needs the rows of the table, while the weight is not theirs."""
        if self._is_waiting():
            return InvalidValueError(
                "this module is on the meta device and has no rows yet; give it some: to_empty(device=...), "
                "load_state_dict(..., assign=True), or weight = nn.Parameter(rows)"
            )
        handle = self.__dict__.get("_handle")
        name = f"weight of {type(self).__name__}" if handle is None or handle.name is None else str(handle)
        return InvalidTypeError(
            f"{name} was swapped from outside (functional_call, a parametrization, a loader that writes to "
            f"module._parameters), so there are no rows of a table; {remedy}, or assign it, for the table to have its rows "
            "(module.weight = nn.Parameter(rows))"
        )

    def extra_repr(self) -> str:
        """Describe the module as torch.nn does, and where its rows live."""
        self.num_embeddings = self.num_embeddings  # which torch.nn reads from __dict__
        text = super().extra_repr()
        if self._parameters.get("weight") is not None and not self._has_rows():
            return text
        memory, rows = f"memory={self.table.memory!r}", self._handle.rows
        for name in ("storage_dtype", "state_dtype", "scale_block"):
            memory += f", {name}={getattr(rows, name)!r}" if getattr(rows, name) is not None else ""
        memory += f", layout={self.table.layout!r}" if self.table.layout != "planes" else ""
        memory += f", cache_rows={self.table.cache_rows}" if self.table.cache_rows is not None else ""
        if self.vocabulary is not None:
            memory += f", vocabulary={self.vocabulary}"
        if not self._handle.owners.has_whole:
            exchange = self._handle.owners.exchange
            memory += f", rank {exchange.rank} of {exchange.ranks}"
        return f"{text}, {memory}" if text else memory

    # --- nn.Module ----------------------------------------------------------------------------------------------------

    # torch.jit reads it before it compiles or traces anything.
    @property
    def __overloads__(self) -> NoReturn:
        refuse_to_record(self, "torch.jit")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        weight, waiting = self._parameters.get("weight"), self._is_waiting()
        if weight is None or not (waiting or self._has_rows()):
            super()._apply(fn, recurse)
            return self
        dtype, device = (weight.dtype, weight.device) if waiting else (self._handle.rows.dtype, self.table.device)
        with torch.no_grad(), torch.inference_mode(False):
            sample = fn(torch.empty(0, self.embedding_dim, dtype=dtype, device=device))
        if waiting and sample.is_meta:
            super()._apply(fn, recurse)
            return self
        options = options_of(self._handle) if sample.is_meta else None
        if not waiting:
            self._check_conversion(sample)
        # Not with the weight: torch would convert a copy of the whole.
        with with_weight(self, None) as double:
            super(TableModule, double)._apply(fn, recurse)
        if waiting:
            self._end_wait(None, nn.Parameter(sample, weight.requires_grad))
            return self
        if options is not None:
            known = self.vocabulary
            shape = self.num_embeddings if known is None else known.capacity, self.embedding_dim
            empty = nn.Parameter(torch.empty(shape, dtype=sample.dtype, device="meta"), weight.requires_grad)
            empty.grad = None if self._handle.pending.grad is None else torch.empty_like(empty)
            self._wait(empty, options)
            self.num_embeddings = shape[0]
            return self
        if sample.dtype != dtype:
            self._handle.convert(sample.dtype)
        if sample.device != device:
            self._handle.move(sample.device)
        return self

    def _check_conversion(self, sample: Tensor) -> None:
        """Raise unless the table can get the dtype and the memory of `sample`."""
        table, dtype = self._handle.table, self._handle.rows.dtype
        fixed = table.path is not None or not table.writable
        if fixed and sample.dtype != dtype and not self._handle.rows.reads_as(sample.dtype):
            remedy = "save the table, or make a new module with dtype= and another path"
            if not table.writable:
                remedy = "leave the module out, or copy the table (from_pretrained(table, memory='pageable'))"
            where = f"the file {str(table.path)!r} holds" if table.path is not None else "the files of the table hold"
            raise InvalidValueError(
                f"{where} {dtype} and cannot change {'its' if table.path else 'their'} dtype; {remedy}"
            )
        if sample.is_shared() and sample.device.type == "cpu":
            raise InvalidTypeError(
                f"{self._handle} is the weight of a table, which cannot be shared by forked processes (share_memory); make "
                "the model in each process, or train it in one"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "_handle" in self.__dict__:
            # After a step that failed the parameter would still be the active rows; in that of another thread it is.
            self._handle.step.recover()
            weight = super().__getattr__(name)
            # Last: it may begin meanwhile.
            if self._handle.state is not None and self._handle.state.running:
                return WeightData(self._handle)
            return weight
        return super().__getattr__(name)

    # With it fully_shard asks here, too, before it replaces the weight.
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":
            refuse_to_quantize(self, value)
        handle = self.__dict__.get("_handle")
        if name == "sparse" and handle is not None:
            if handle.state is not None and bool(value) != handle.sparse:
                raise InvalidValueError(
                    f"sparse of {handle} becomes {value!r} after a step, when the optimizer has state for gradients of the "
                    "other kind; set it before"
                )
            handle.sparse = bool(value)
        if name == "padding_idx" and self.__dict__.keys() & {"_handle", "_options"}:
            if self.vocabulary is None:
                value = self._checked_padding(value)
            elif value != self.padding_idx:
                raise InvalidValueError(
                    f"padding_idx of {handle or 'this module'} becomes {value!r} but its vocabulary has {self.padding_idx!r}; "
                    f"make the module with padding_idx={value!r}"
                )
            if handle is not None:
                handle.set_padding(value)
        super().__setattr__(name, value)

    def _reads_another(self) -> bool:
        """Read the weight by name; tell whether that is another than the parameter."""
        return self.weight is not self._parameters["weight"]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; as `weight` it becomes that of the table. Assignment of parameters ends here too."""
        if name == "weight" and isinstance(param, nn.Parameter):
            check_ordinary(param, self.__dict__.get("_handle", "weight"))
            if not param.is_meta and self.__dict__.keys() & {"_handle", "_options"}:
                self._take_weight(param)
        super().register_parameter(name, param)

    def _take_weight(self, param: nn.Parameter) -> None:
        """Make `param` the weight. It stays the same object, so that modules which share it still do."""
        other = find_handle(param)
        self._check_same_ids(other)
        if other is None and "_handle" not in self.__dict__:
            self._end_wait(param.detach(), param)
        elif other is None:
            with torch.no_grad():
                take_param(self._handle, param, TableWeight)
        elif other is not self.__dict__.get("_handle"):
            # The modules share one table from now on.
            self._handle = other
            other.renormalizes = other.renormalizes or self.max_norm is not None
            self.__dict__.pop("_options", None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the weight to the table while another thread steps: the parameter then has some of the rows."""
        state = dict(self.__dict__)
        if self._has_rows() and self._handle.state is not None and self._handle.state.running:
            state["_parameters"] = {name: p for name, p in self._parameters.items() if name != "weight"}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Unpickled in a process that may have made no module yet.
        install()
        if "_handle" not in self.__dict__:
            return
        # A weight may have another name, or place: that of spectral_norm and the like.
        if "weight" not in self._parameters and all(find_handle(p) is not self._handle for p in self.parameters()):
            param = self._handle.param_ref()
            self._parameters["weight"] = self._handle.new_param(TableWeight) if param is None else param
        self._use(self._handle)
        if self._has_rows() and find_handle(self._parameters.get("weight", self._handle.param_ref())) is None:
            # Pickled by an older version.
            self._parameters["weight"] = self._handle.new_param(TableWeight)


def shape_of(weight: Tensor | Table) -> tuple[int, ...]:
    """Return the shape of the rows that a module is given."""
    if not isinstance(weight, Table | Tensor):
        raise InvalidTypeError(
            f"the weight given is a {type(weight).__name__} but must be a tensor or a Table; pass one (torch.as_tensor)"
        )
    return (weight.num_rows, weight.dim) if isinstance(weight, Table) else tuple(weight.shape)
