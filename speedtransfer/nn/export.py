"""A copy of a model with ordinary ``torch.nn`` embeddings: for exporters, which need modules that they know."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.errors import HostMemoryError, format_bytes
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.embedding import Embedding
from speedtransfer.nn.table_module import TableModule
from speedtransfer.optim import Handle
from speedtransfer.system import physical_bytes

_OURS: dict[type[TableModule], type[nn.Module]] = {Embedding: nn.Embedding, EmbeddingBag: nn.EmbeddingBag}
_OF_OURS = {"_handle", "idle"}  # attributes of a table module that one of torch.nn does not have
# What every class has of its own.
_OF_A_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"}


def to_dense(model: nn.Module, device: torch.device | str | int | None = None) -> nn.Module:
    """Copy a model with each table as an ordinary ``torch.nn.Embedding`` or ``torch.nn.EmbeddingBag``.

    For ``torch.jit``, ``torch.onnx``, ``torch.export``, ``torch.fx`` and quantization, which trace or replace the modules of
    ``torch.nn``. Rows are those of ``model.state_dict()``. Ties, hooks, flags and the forward of subclasses are kept; `model`
    stays as it is, and nothing is shared with it.

    Parameters
    ----------
    model : nn.Module
    device : torch.device, optional
        Where the copy goes. By default tables go to their compute device, the rest stays where it is.

    Returns
    -------
    nn.Module

    Raises
    ------
    HostMemoryError
        The rows of all tables do not fit there.
    """
    found: dict[int, TableModule] = {}
    names: dict[Handle, str] = {}
    for name, module in model.named_modules():
        if is_table(module):
            found[id(module)] = module
            names.setdefault(module._handle, name or type(module).__name__)
    places = {handle: handle.table.device if device is None else torch.device(device) for handle in names}
    check_room(names, places)
    memo: dict[int, Any] = {}
    copied: list[tuple[nn.Module, TableModule]] = []
    for handle in names:
        rows = _rows(handle, places[handle])
        memo[id(handle.param)] = nn.Parameter(rows, requires_grad=handle.param.requires_grad)
    for key, module in found.items():
        made = _empty(type(module))
        memo[key] = made
        copied.append((made, module))
    for made, module in copied:  # all are in `memo` by now: hooks may hold modules
        state = {name: value for name, value in vars(module).items() if name not in _OF_OURS}
        vars(made).update(copy.deepcopy(state, memo))
    result: nn.Module = copy.deepcopy(model, memo)
    return result if device is None else result.to(device)


def is_table(module: nn.Module) -> bool:
    """Tell whether `module` looks rows up in a table (a copy of a subclass made by `to_dense` does not)."""
    return isinstance(module, TableModule) and "_handle" in vars(module)


def check_room(names: dict[Handle, str], places: dict[Handle, torch.device]) -> None:
    """Raise `HostMemoryError` where the rows of tables do not fit on the devices that they go to."""
    for place in set(places.values()):
        sizes = {names[h]: h.table.num_rows * h.table.dim * h.rows.dtype.itemsize for h in names if places[h] == place}
        needed, room = sum(sizes.values()), _room(place, names)
        if room is not None and needed > room:
            largest = max(sizes, key=lambda name: sizes[name])
            other = "" if place.type == "cpu" else "pass device='cpu', "
            raise HostMemoryError(
                f"the tables of this model take {format_bytes(needed)} as torch.nn modules (the largest, {largest!r}, "
                f"{format_bytes(sizes[largest])}) but {place} has {format_bytes(room)} left; {other}export the modules "
                "behind the tables alone, and look rows up here"
            )


def _room(place: torch.device, handles: Iterable[Handle]) -> int | None:
    """Return the bytes that `place` has left, or None where nobody knows."""
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    if place.type != "cpu":
        return None
    have = physical_bytes()
    held = sum(handle.table.nbytes for handle in handles if handle.table.memory not in ("mmap", "device"))
    return max(have - held, 0) if have else None


@torch.no_grad()
def _rows(handle: Handle, place: torch.device) -> Tensor:
    """Return a copy of all rows, ``(num_rows, dim)``, on `place`, of the dtype that they are computed with."""
    whole = handle.rows.whole("weight")
    rows = torch.empty(whole.shape, dtype=handle.rows.dtype, device=place)
    return rows.copy_(whole)


# --- classes ------------------------------------------------------------------------------------------------------------


def _empty(cls: type[TableModule]) -> nn.Module:
    """Return a module without attributes, of the class that stands for `cls`."""
    # mypy takes the class's __hash__ for that of its objects.
    dense = _dense_class(cls)  # type: ignore[arg-type]
    return dense.__new__(dense)


@functools.cache
def _dense_class(cls: type[TableModule]) -> type[nn.Module]:
    """Return the class of ``torch.nn`` for one of ours, or a subclass of `cls` with the methods of ``torch.nn`` for ours.

    There ``super().forward(ids)`` looks up in the weight, whichever way the code of `cls` spells super().
    """
    if cls in _OURS:
        return _OURS[cls]
    before: type[nn.Module] | None = vars(cls).get("_without_table")  # of classes that replace_embeddings made
    if before is not None:
        return before
    ours = next(base for base in cls.__mro__ if base in _OURS)
    theirs = _OURS[ours]
    replaced = (vars(TableModule).keys() | vars(ours).keys()) - _OF_A_CLASS
    methods = {name: inspect.getattr_static(theirs, name) for name in replaced if hasattr(theirs, name)}
    base = type(f"Dense{ours.__name__}", (ours,), {**methods, "__module__": __name__})
    return type(
        cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce}
    )


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy by the class that people wrote: the other has no name to be found under."""
    return _empty, (type(module).__mro__[1],), vars(module).copy()
