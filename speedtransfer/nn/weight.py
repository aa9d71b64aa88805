"""The weight of a table module: a parameter that reads and writes as the whole table.

Every function of torch that is given the weight gets all rows, caught up: the memory of the table where a tensor can alias it,
else a copy, which is written back if the function has changed it. With gradients enabled the graph has these by the weight,
and the gradient of all rows is deposited; lookups (``F.embedding``, indexing by integers) read the rows they name, no others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from speedtransfer.eager import uncompiled, uncompiled_between_graphs, unseen
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim import Handle, find_handle
from speedtransfer.optim.copied_rows import Copied, CopiedRows, writes_to, writing_back
from speedtransfer.optim.graph import as_tensor
from speedtransfer.optim.views import outside_of_transforms
from speedtransfer.ranks.collectives import refuse_irecv, wait_for
from speedtransfer.tables import Table

# Both are filled by `weight_calls`, `weight_rows` and `fills`.
# Functions that need no rows (shape, dtype, hooks): called with the placeholder itself.
rowless: set[Any] = set()
# Called in place of a function. If it returns NotImplemented, the function itself is called with the whole table.
special: dict[Any, Callable[..., Any]] = {}


class TableWeight(nn.Parameter):
    """The parameter of a table module between steps. In the step of an optimizer it is an ordinary ``nn.Parameter``."""

    @staticmethod
    def __new__(cls, data: Any = None, requires_grad: bool = True, **_: Any) -> Any:
        """Return an ordinary parameter: code that calls ``type(weight)(data)`` makes no table."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    @uncompiled_between_graphs
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `func` with the whole table."""
        return _call(func, args, kwargs or {})

    # Never called: torch looks for it when a tensor is made, and a weight gets this class later. `torch.compile` takes what
    # has one for an object and no tensor; to trace with a tensor it would ask for all rows.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    # Not by __torch_function__, which is slower: every zero_grad() reads it twice.

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the whole table."""
        return handle_of(self).gradient()

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        handle_of(self).assign_gradient(grad)

    @grad.deleter
    def grad(self) -> None:
        handle_of(self).assign_gradient(None)

    # For these two methods torch does not call __torch_function__.

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Write the rows of a tensor to the table."""
        return _call(Tensor.set_, (self, *args), kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Return the whole table as a tensor of another class."""
        return with_whole(Tensor.as_subclass, (self, cls), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            handle = copy.deepcopy(handle_of(self), memo)
            memo[id(self)] = _weight_of(handle)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _weight_of, (handle_of(self),)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch.no_grad():
            return f"Parameter containing:\n{handle_of(self).shown()}"


class WeightData(Tensor):
    """``weight.data`` of a table that no tensor can alias: reads and writes as the weight does, without gradients.

    Code that does not call __torch_function__ (torch.tensor, vmap, compiled scripts) reaches __torch_dispatch__. Its own
    memory is a placeholder: NaN.
    """

    handle: Handle

    @staticmethod
    def __new__(cls, handle: Handle) -> Any:
        """Return the data of the weight of `handle`."""
        made = Tensor._make_subclass(cls, handle.placeholder())
        made.handle = handle
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in _LIKE:
            args, kwargs = tree_map_only(WeightData, lambda data: data.handle.placeholder(), (args, kwargs or {}))
            return func(*args, **kwargs)
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.alias):
            return args[0].handle.track_alias(WeightData(args[0].handle))
        return with_whole(func, args, kwargs or {})

    @classmethod
    @uncompiled_between_graphs
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch.no_grad():
            return _call(func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Write the rows of a tensor to the table."""
        return _call(Tensor.set_, (self, *args), kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Return the whole table as a tensor of another class."""
        return self.handle.whole().as_subclass(cls)

    def detach_from_table(self, kept: Tensor) -> None:
        """Read and write `kept`, ``(num_rows, dim)``, from now on: the table gets other rows."""
        memory: Any = "pageable" if kept.device.type == "cpu" else "device"
        self.handle = Handle(Table.from_array(kept, memory, device=kept.device, copy=False))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.handle.whole().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.handle.whole().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return self.handle.shown()


# Functions whose result depends on shape, dtype and device only.
_NAMES = """
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided
"""
_LIKE = {getattr(torch.ops.aten, name) for name in _NAMES.split()}


def _weight_of(handle: Handle) -> nn.Parameter:
    param = handle.param_ref()
    return handle.new_param(TableWeight) if param is None else param


def handle_of(weight: Any) -> Handle:
    """Return the handle of a weight or of its data; raise if another weight has taken its place."""
    handle = weight.handle if isinstance(weight, WeightData) else find_handle(weight)
    if handle is None:
        raise InvalidValueError(
            "this parameter was the weight of a table until another was assigned in its place; use that of the module, and to "
            "untie two modules assign a copy to the one without a table (head.weight = nn.Parameter(weight.detach().clone()))"
        )
    return handle


def is_trained(weight: Any, handle: Handle) -> bool:
    """Tell whether what is computed from `weight`, with its handle, has a graph now; from the data of one it has none."""
    return torch.is_grad_enabled() and handle.requires_grad and not isinstance(weight, WeightData)


def is_lent_elsewhere(param: Tensor) -> bool:
    """Tell whether `param` was a weight when a function was called with it, and is lent to a step of another thread now."""
    handle = find_handle(param) if type(param) is nn.Parameter else None
    return handle is not None and handle.state is not None and handle.state.stepping_elsewhere()


def is_ordinary(param: Any) -> bool:
    """Tell whether a table can have the values of `param`: other classes than those of torch have rules of their own."""
    if find_handle(param) is not None:
        return True
    return type(param) in (nn.Parameter, Tensor) and type(param.data) is Tensor


def check_ordinary(param: nn.Parameter, name: object = "weight") -> None:
    """Raise unless `param` can become the weight of a table, called `name`."""
    if isinstance(param, TableWeight):
        handle_of(param)
    elif isinstance(param, CopiedRows):
        raise InvalidTypeError(
            f"{name} is the weight of a table and would not follow the rows of another table that it is given; copy them: "
            "nn.Parameter(rows.detach().clone())"
        )
    elif not is_ordinary(param):
        raise InvalidTypeError(
            f"{name} is the weight of a table and cannot become a {type(param).__name__} (fully_shard, "
            "quantization, a manifold), of which the table would keep neither class nor rules; leave the module out there, or "
            "use torch.nn for it"
        )


# --- functions that are called with the weight ----------------------------------------------------------------------------


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with the whole table in place of each weight among its arguments."""
    if func in rowless:
        with as_tensor():
            return func(*args, **kwargs)
    instead = special.get(func)
    if instead is not None:
        with unseen():
            result = instead(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return with_whole(func, args, kwargs)


def _breaking_graphs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` as `_called` does, in a compiled model, which is not to have the memory of the table in a graph.

    It would write to that after a lookup that comes later, whose operator reads it without being told.
    """
    result, handles = _called(func, args, kwargs), list[Handle]()
    if func in rowless:
        return result
    tree_map_only((TableWeight, WeightData), lambda weight: handles.append(handle_of(weight)), (args, kwargs))
    sources = [Copied(None, handle.table.view("weight")) for handle in handles if handle.aliased]

    def apart(tensor: Tensor) -> Any:
        # What has a graph of autograd is not written to.
        return tensor if tensor.requires_grad else writing_back(tensor, sources)

    return tree_map_only(Tensor, apart, result)


_call = uncompiled(_called, _breaking_graphs)


def with_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ids: Tensor | None = None) -> Any:
    """Call `func` with all rows of each weight among its arguments; `ids` (n,), sorted and unique: it uses no others."""
    # By id of the whole: the weight, the whole, its handle, the version of the whole before the call.
    given: dict[int, tuple[Any, Tensor, Handle, int]] = {}

    def whole(weight: Any) -> Tensor:
        if not isinstance(weight, weights) and not is_lent_elsewhere(weight):
            return weight
        handle = handle_of(weight)
        trains = is_trained(weight, handle)
        may_not = not handle.table.writable or handle.of.id_space.come_and_go
        writes = (trains or may_not) and writes_to(weight, func, args, kwargs)
        if writes:
            # Now: a copy of all rows may be too large, and others be written by the same call.
            handle.table.check_writable()
            handle.of.id_space.check_written("written as a whole")
        if not handle.aliased:
            refuse_irecv(func, handle)
        if handle.table.has_snapshot and writes_to(weight, func, args, kwargs):
            handle.table.end_snapshot()
        if writes and trains:
            # A leaf, as the weight: torch says what may be done to one in place.
            values = handle.whole(ids).detach().requires_grad_()
        else:
            values = handle.whole_in_graph() if trains else handle.whole(ids)
        given[id(values)] = weight, values, handle, values._version
        return values

    weights = TableWeight, WeightData
    new_args, new_kwargs = tree_map_only(Tensor, whole, (args, kwargs))
    result = func(*new_args, **new_kwargs)
    for _, values, handle, version in given.values():
        if values.shape != (handle.num_rows, handle.table.dim) or not values.is_contiguous():
            raise InvalidTypeError(
                f"{handle} is the weight of a table, whose memory {getattr(func, '__name__', func)}() cannot lay out anew; "
                "use what returns a new tensor (weight.t(), weight.unsqueeze(0)), or weight.data = rows for other rows"
            )
        # By its name, too: torch's CUDA code does not count all writes to lists of tensors.
        if not handle.aliased and (values._version != version or writes_to(values, func, new_args, new_kwargs)):
            wait_for(func, result)
            handle.store(values)
    # Copies, or rows that are only read.
    copies = [(handle, it) for _, it, handle, _ in given.values() if not (handle.aliased and handle.table.writable)]
    if isinstance(result, np.ndarray) and copies:
        # Writes to it would not reach the table.
        result.flags.writeable = False
    sources = [Copied(handle, values.detach()) for handle, values in copies]

    # A function that returned its argument returns the weight; views of a copy write back to the table.
    def returned(tensor: Tensor) -> Any:
        return given[id(tensor)][0] if id(tensor) in given else writing_back(tensor, sources)

    return tree_map_only(Tensor, returned, result)


def knowing_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tensor that torch does not ask the class of the tensor for, called with all rows of a weight."""

    @functools.wraps(function)
    def called(tensor: Any, *args: Any) -> Any:
        return function(_all_rows(tensor) if isinstance(tensor, TableWeight) else tensor, *args)

    return called


@uncompiled
def _all_rows(weight: Any) -> Tensor:
    handle = handle_of(weight)
    if handle.aliased:
        # Its own memory, with the steps that rows have missed: what is written there, by max_norm, is written to the table.
        with outside_of_transforms():
            handle.whole()
        return weight
    if handle.of.renormalizes:
        raise InvalidTypeError(
            f"{handle} is a copy of its rows in a transform of torch.func, and max_norm would shorten those of the copy; give "
            "it weight.detach()"
        )
    if is_trained(weight, handle):
        return handle.whole_in_graph()
    with outside_of_transforms():
        return handle.whole()


def refusing_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tensor that raises for a weight, as that has to be the tensor itself."""

    @functools.wraps(function)
    def called(tensor: Any, *args: Any) -> Any:
        if isinstance(tensor, TableWeight):
            raise InvalidTypeError(
                f"{handle_of(tensor)} is the weight of a table, whose rows torch.func.functionalize would not see; pass a "
                "copy (weight.detach().clone())"
            )
        return function(tensor, *args)

    return called


def _attribute(name: str) -> property:
    """Return an attribute of a tensor as a property that `torch.compile` runs: by itself it would look at the placeholder."""
    of_tensor = getattr(Tensor, name)

    def read(weight: Any) -> Any:
        return _call(of_tensor.__get__, (weight,), {})

    def write(weight: Any, value: Any) -> None:
        _call(of_tensor.__set__, (weight, value), {})

    return property(read, write)


for _name in ("T", "mT", "H", "mH", "data"):
    setattr(TableWeight, _name, _attribute(_name))
