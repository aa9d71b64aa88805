"""The gradient of a table as ``weight.grad`` shows it: ``(num_rows, dim)``, stored for the active rows only.

Functions that map zeros to zeros (norms, scaling, clipping, unscaling) act on the active rows; all others get the dense
values, and one that writes, or returns a view that may be written to, makes the gradient dense for good. With ``sparse=True``
it reads as the sparse gradient that torch makes, and still supports what a dense one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map_only

from speedtransfer.cuda import check_not_capturing
from speedtransfer.errors import InvalidValueError
from speedtransfer.tables import NOTHING, Known

aten = torch.ops.aten


# What is called in place of a function of the dispatcher that is given such a gradient, by its name there: filled by
# `row_functions`. NotImplemented: it gets dense values.
by_row: dict[Any, Callable[..., Any]] = {}
# Those that know of rows that are not zero elsewhere.
know_elsewhere: set[Callable[..., Any]] = set()


class Parts:
    """The active rows of a gradient, their values, and what is known of the rows; see :class:`RowGradient`."""

    __slots__ = ("__weakref__", "ids", "known", "rows")
    ids: Tensor
    rows: Tensor
    known: Known

    def set(self, ids: Tensor, rows: Tensor, known: Known) -> None:
        """Have other rows, everywhere that this is shown."""
        self.ids, self.rows, self.known = ids, rows, known

    def count_write(self) -> None:
        """Have the rows show that they were written to, which torch does not do below the dispatcher."""
        torch.autograd.graph.increment_version(self.rows)


class RowGradient(Tensor):
    """The gradient of all rows, zero except in the active rows.

    Attributes
    ----------
    sparse : bool
        Whether it reads as a sparse tensor: ``is_sparse``, ``_indices()``, ``_values()``.
    """

    sparse: bool
    # What aliases (detach(), .data) have in common: what becomes of one the others see.
    parts: Parts
    # Whether it was made by ``backward(create_graph=True)``: in torch one could go back from it.
    of_graph: bool = False
    # What rows have that are not active: not zero in a mask, say of the values that are finite.
    elsewhere: float = 0
    # Where rows are those of ids that come and go: these ids, and their version when it was their gradient.
    stamp: tuple[Any, int] | None = None
    # The features of the table that it is of, bit by bit: some may have no rows.
    features: int = 0
    _changed: Callable[[Tensor, Tensor, Tensor, str], None] | None

    @staticmethod
    def __new__(
        cls,
        num_rows: int,
        ids: Tensor,
        rows: Tensor,
        changed: Callable[[Tensor, Tensor, Tensor, str], None] | None = None,
        sparse: bool = False,
        known: Known = NOTHING,
    ) -> RowGradient:
        """Return the gradient of `num_rows` rows.

        `changed` is called with the rows before, the new ids and rows, and how they have changed: "dense", "trimmed", without
        padding, "zeroed", in place, or "viewed", by what writes to their memory without a word.
        """
        shape = (num_rows, *rows.shape[1:])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)
        made.parts, made._changed, made.sparse = Parts(), changed, sparse
        # Not by `set`: each step makes one, and a call costs.
        made.parts.ids, made.parts.rows, made.parts.known = ids, rows, known
        # There is no memory: what reads or writes it natively raises, and does not end the process.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Handle functions that the dispatcher does not see: assigning ``grad.data``, and those of sparse tensors."""
        if func == Tensor.data.__set__ and isinstance(args[0], RowGradient):  # type: ignore[attr-defined]
            args[0].make_dense().copy_(args[1])
            args[0].parts.count_write()
            return None
        if not all(issubclass(kind, RowGradient) or kind in (Tensor, torch.nn.Parameter) for kind in types):
            # Torch asks the weight of a table next.
            return NotImplemented
        if func in _OF_SPARSE and isinstance(args[0], RowGradient) and args[0].sparse:
            return _OF_SPARSE[func](*args, **(kwargs or {}))
        if func is Tensor.__setitem__ and type(args[0]) is RowGradient and by_row[func](*args):
            return None
        # The default of Tensor would wrap dense results in a RowGradient without rows.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute on the active rows if the result is that of the dense gradient; else on dense values."""
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # Tensors that it makes would have no versions, and functions of several parts come here as one.
            with torch.inference_mode(False), torch.no_grad():
                return func(*args, **kwargs)
        if torch.is_grad_enabled():
            _check_no_graph(func, args)
        if func.namespace == "c10d":
            return _collective(func, args, kwargs)
        if "out" in kwargs:
            return _into(kwargs["out"], func, args, kwargs)
        result = by_rows(func, args, kwargs)
        if result is NotImplemented:
            result = _densely(func, args, kwargs)
        if args and isinstance(args[0], list) and func.__name__.partition(".")[0].endswith("_"):
            # Torch counts the writes of `torch._foreach_add_` itself only if all tensors are its own.
            flat = (each for each in args[0] if isinstance(each, Tensor))
            written = [each for each in flat if not isinstance(each, RowGradient) and not each.is_inference()]
            torch.autograd.graph.increment_version(written)
        return result

    @property
    def ids(self) -> Tensor:
        """``(n,)`` int64, sorted: the active rows; on a CUDA device padded, until something needs to know their number."""
        return self.parts.ids

    @property
    def rows(self) -> Tensor:
        """``(n, dim)``, the gradient of the active rows, zero for padding."""
        return self.parts.rows

    @property
    def known(self) -> Known:
        """What is known of the active rows."""
        return self.parts.known

    def like(self, rows: Tensor) -> RowGradient:
        """Return a gradient of the same rows with the values `rows`, ``(n, dim)``."""
        if rows.device != self.ids.device:
            # Padding is known only where the ids are.
            rows = rows[: len(self.trim().ids)]
        return self._made(self.ids.to(rows.device), rows, self.known)

    def _made(self, ids: Tensor, rows: Tensor, known: Known, changed: Any = None) -> RowGradient:
        made = RowGradient(self.shape[0], ids, rows, changed, self.sparse, known)
        made.stamp, made.features = self.stamp, self.features
        return made

    def agrees(self, is_so: bool) -> bool:
        """Tell whether something is so in all processes that have rows of this gradient. Collective."""
        return is_so

    def trim(self) -> RowGradient:
        """Drop padding, for which the host waits, and return this gradient."""
        if self.known.length is not None:
            check_not_capturing("counting the rows of a gradient")
            n = int(self.known.length)
            before = self.rows
            self.parts.set(self.ids[:n], before[:n], NOTHING)
            self._tell(before, "trimmed")
        return self

    def _tell(self, before: Tensor, how: str) -> None:
        """Tell whose gradient this is that it is another than `before`."""
        if self._changed is not None:
            self._changed(before, self.ids, self.rows, how)

    def is_full(self) -> bool:
        """Tell whether every row is active."""
        return len(self.trim().ids) == self.shape[0]

    def coo(self) -> Tensor:
        """Return the gradient as a sparse tensor of torch, over the memory of `rows`."""
        self.trim()
        ids, rows = self.ids.unsqueeze(0), self.rows
        return torch.sparse_coo_tensor(
            ids, rows, self.shape, device=rows.device, check_invariants=False, is_coalesced=True
        )

    def dense(self) -> Tensor:
        """Return the dense values, ``(num_rows, dim)``: a copy, or `rows` if every row is active."""
        if self.is_full():
            return self.rows
        try:
            return self.rows.new_full(self.shape, self.elsewhere).index_copy_(0, self.ids, self.rows)
        except torch.OutOfMemoryError as error:
            raise InvalidValueError(
                f"the gradient of a weight of {self.shape[0]} rows is used by a function that needs all of them, which do not "
                f"fit on {self.device}; use functions of each value (scaling, clipping, comparisons), norms, sums and means, "
                "which act on the rows that a batch has touched"
            ) from error

    def make_dense(self) -> Tensor:
        """Make every row active, others with zeros, and return the dense values."""
        if not self.is_full():
            before = self.rows
            self.parts.set(torch.arange(self.shape[0], device=before.device), self.dense(), NOTHING)
            self._tell(before, "dense")
        return self.rows

    def view_dense(self) -> Tensor:
        """Make every row active, and return the dense values to be viewed: writes to a view do not count as writes here."""
        self._tell(self.make_dense(), "viewed")
        # Of a part they have moved, where the whole has become dense.
        return self.rows

    # Functions that read or write memory and do not reach the dispatcher. They make the gradient dense.

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a copy of the dense values."""
        return self.dense().clone()

    def numpy(self, **kwargs: Any) -> Any:
        """Return the dense values as an array: over `rows` if every row is active, else a copy, which cannot be written."""
        if self.is_full():
            return self.view_dense().numpy(**kwargs)
        array = self.dense().numpy(**kwargs)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the dense values as nested lists."""
        return self.dense().tolist()

    def data_ptr(self) -> int:
        """Return the address of the dense values."""
        return self.view_dense().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the dense values."""
        return self.view_dense().untyped_storage()

    def apply_(self, function: Callable[[float], float]) -> RowGradient:
        """Replace each of the dense values by what `function` makes of it."""
        self.view_dense().apply_(function)
        return self

    def share_memory_(self) -> RowGradient:
        """Move the dense values to memory that processes share."""
        self.view_dense().share_memory_()
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.view_dense().__dlpack__(*args, **kwargs)

    def __array__(self, dtype: Any = None) -> Any:
        return (self.view_dense() if self.is_full() else self.dense()).__array__(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.coo().clone() if self.sparse else self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (self.coo() if self.sparse else self.to_dense()).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({len(self.trim().ids)} of {self.shape[0]} rows, {self.rows!r})"


def _given(value: Any) -> Callable[..., Any]:
    return lambda grad, *args, **kwargs: value


def _by_coo(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda grad, *args, **kwargs: func(grad.coo(), *args, **kwargs)


# Attributes that tell sparse tensors from dense ones, and functions of sparse tensors only. It is always coalesced.
_OF_SPARSE: dict[Any, Callable[..., Any]] = {
    Tensor.is_sparse.__get__: _given(True),  # type: ignore[attr-defined]
    Tensor.layout.__get__: _given(torch.sparse_coo),  # type: ignore[attr-defined]
    Tensor.is_coalesced: _given(True),
    Tensor.sparse_dim: _given(1),
    Tensor.dense_dim: _given(1),
    Tensor._nnz: lambda grad: len(grad.trim().ids),
    Tensor.coalesce: lambda grad: grad,
    Tensor.to_sparse: _by_coo(Tensor.to_sparse),
    Tensor.to_sparse_coo: _by_coo(Tensor.to_sparse_coo),
    Tensor.sparse_mask: _by_coo(Tensor.sparse_mask),
    **dict.fromkeys((Tensor.indices, Tensor._indices), lambda grad: grad.trim().ids.unsqueeze(0)),
    **dict.fromkeys((Tensor.values, Tensor._values), lambda grad: grad.trim().rows),
    torch._sparse_sum: _by_coo(torch._sparse_sum),
}

# Else clip_grad_norm_(foreach=True) refuses tables.
if RowGradient not in _foreach_utils._foreach_supported_types:
    _foreach_utils._foreach_supported_types.append(RowGradient)  # type: ignore[arg-type]


def by_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func` computed on the active rows; NotImplemented if it needs all rows."""
    instead = by_row.get(func.overloadpacket)
    if instead is None:
        return NotImplemented
    if instead not in know_elsewhere and any(isinstance(it, RowGradient) and it.elsewhere for it in tree_leaves(args)):
        return NotImplemented
    return instead(func, args, kwargs)


def _check_no_graph(func: Any, args: tuple[Any, ...]) -> None:
    """Raise where torch would record what `func` makes of a gradient that has a graph."""
    name = func.__name__.partition(".")[0]
    if name in ("detach", "alias") or name.endswith("_"):
        return
    if any(isinstance(each, RowGradient) and each.of_graph for each in tree_leaves(args)):
        # No TypeError: torch takes one in `2 * grad` for an operand that it does not know.
        raise InvalidValueError(
            "the gradient of the weight of a table, made by backward(create_graph=True), is used with gradients enabled, but "
            "nothing goes back through it; take torch.autograd.grad(loss, emb.weight, create_graph=True), or, if no graph is "
            "wanted, weight.grad.detach()"
        )


def _into(out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that writes its result to `out`, by rows where that is the gradient of the same rows."""
    if isinstance(out, RowGradient):
        result = func.overloadpacket(*args, **{name: value for name, value in kwargs.items() if name != "out"})
        if (
            isinstance(result, RowGradient)
            and result.ids is out.ids
            and result.dtype == out.dtype
            and not (result.elsewhere or out.elsewhere)
        ):
            out.rows.copy_(result.rows)
            out.parts.count_write()
            return out
    return _densely(func, args, kwargs)


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a collective, which writes to its first argument if to any; its schema does not say so."""
    writes = func.__name__.partition(".")[0].endswith("_")
    first = tree_map_only(RowGradient, RowGradient.view_dense if writes else RowGradient.dense, args[0])
    return func(first, *tree_map_only(RowGradient, RowGradient.dense, args[1:]), **kwargs)


def _densely(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with dense values; if it writes to a gradient or returns a view of it, that is made dense for good."""
    schema = func._schema.arguments
    aliased = any(result.alias_info is not None for result in func._schema.returns)
    dense: dict[int, RowGradient] = {}
    written: list[RowGradient] = []

    def values(grad: RowGradient, info: Any) -> Tensor:
        if info is None or not (info.is_write or aliased):
            made = grad.dense()
        elif grad.sparse and not info.is_write:
            # Of a sparse tensor torch makes copies.
            made = grad.to_dense()
        else:
            made = grad.make_dense() if info.is_write else grad.view_dense()
        dense[id(made)] = grad
        return made

    def filled(argument: Any, value: Any) -> Any:
        info = argument.alias_info
        if info is not None and info.is_write:
            written.extend(item for item in tree_leaves(value) if isinstance(item, RowGradient))
        return tree_map_only(RowGradient, lambda grad: values(grad, info), value)

    by_name = {argument.name: argument for argument in schema}
    new_args = [filled(argument, value) for argument, value in zip(schema, args, strict=False)]
    new_kwargs = {name: filled(by_name[name], value) for name, value in kwargs.items()}
    result = func(*new_args, **new_kwargs)
    for grad in written:
        grad.parts.count_write()
    return tree_map_only(Tensor, lambda tensor: dense.get(id(tensor), tensor), result)
