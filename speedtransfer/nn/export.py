"""Copy a model with ordinary ``torch.nn`` embeddings in place of tables, for exporters."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import HostMemoryError, InvalidTypeError, format_bytes
from speedtransfer.nn.feature import Feature
from speedtransfer.nn.multi import MultiEmbedding
from speedtransfer.nn.options import check_model
from speedtransfer.nn.subclasses import empty_dense_module
from speedtransfer.nn.table_module import TableModule
from speedtransfer.optim import Handle, find_handle
from speedtransfer.system import physical_bytes

# Attributes of a table module that one of torch.nn does not have.
_OF_OURS = {"_handle", "_key", "_options", "idle", "_feature_ids", "_shared_parameters"}
# By this name pickles of earlier versions find it.
_empty = empty_dense_module


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
    check_model(model)
    found: dict[int, nn.Module] = {}
    _refuse_rows_elsewhere(model)
    names: dict[Handle, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Feature) or (
            isinstance(module, TableModule) and vars(module).keys() & {"_handle", "_options"}
        ):
            found[id(module)] = module
        for handle in filter(None, map(find_handle, module._parameters.values())):
            names.setdefault(handle, name or type(module).__name__)
    place = None if device is None else _place(device)
    places = {handle: handle.table.device if place is None else place for handle in names}
    check_room(names, places)
    memo: dict[int, Any] = {}
    copied: list[tuple[nn.Module, nn.Module]] = []
    shared = {find_handle(module.weight) for module in found.values() if isinstance(module, MultiEmbedding)}
    for handle in names.keys() - shared:
        rows = _rows(handle, places[handle])
        memo[id(handle.param)] = nn.Parameter(rows, requires_grad=handle.param.requires_grad)
    for key, module in found.items():
        memo[key] = empty_dense_module(type(module))
        copied.append((memo[key], module))
    # All are in `memo` by now: hooks may hold modules.
    for made, module in copied:
        state = {name: value for name, value in vars(module).items() if name not in _OF_OURS}
        # It may have grown.
        state["num_embeddings"] = module.num_embeddings
        if isinstance(module, MultiEmbedding | Feature):
            # The features have the rows, each its own.
            state["_parameters"] = {}
        vars(made).update(copy.deepcopy(state, memo))
        if isinstance(module, Feature):
            owner, weight = module._handle, module.weight
            rows = _rows(owner, places[owner], module.start, module.stop) if owner else weight.detach().clone()
            made.weight = nn.Parameter(rows, requires_grad=weight.requires_grad)
    result: nn.Module = copy.deepcopy(model, memo)
    return result if place is None else result.to(place)


def _place(device: Any) -> torch.device:
    """Return the device that `device` names, any that torch makes tensors on; or raise as for a compute device."""
    try:
        return torch.empty(0, device=device).device
    except Exception:  # each kind of device has its own
        return resolve_device(device)


def _refuse_rows_elsewhere(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_table(module) and not module._handle.owners.has_whole:
            raise InvalidTypeError(
                f"{name or type(module).__name__!r} has rows that {module._handle.owners.exchange.ranks} processes share, "
                "and a copy would have those of one alone; call st.full_state_dict(model) in all, and load it in rank 0 into "
                "the model made without process_group"
            )
        if isinstance(module, TableModule) and module.vocabulary is not None:
            raise InvalidTypeError(
                f"{name or type(module).__name__!r} has a vocabulary, and modules of torch.nn know no ids but the numbers "
                "of their rows; export the modules behind it, and its ids and rows by vocabulary.export()"
            )
        if is_table(module) and not module._handle.id_space.by_row:
            raise InvalidTypeError(
                f"{name or type(module).__name__!r} looks {module._handle.id_space.kind} up, and modules of torch.nn know no "
                "ids but the numbers of their rows; export the modules behind it"
            )


def is_table(module: nn.Module) -> bool:
    """Tell whether the weight of `module` is that of a table, or a parametrization's of it.

    It is not in a copy of a subclass made by `to_dense`, and where another tensor was put in its place.
    """
    if not isinstance(module, TableModule) or "_handle" not in vars(module):
        return False
    param = module._handle.param_ref()
    return param is not None and module._parameters.get("weight", param) is param


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
    """Return the bytes that `place` has left, or None where that is unknown."""
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    if place.type != "cpu":
        return None
    have = physical_bytes()
    held = sum(handle.table.nbytes for handle in handles if handle.table.memory not in ("mmap", "device"))
    return max(have - held, 0) if have else None


@torch.no_grad()
def _rows(handle: Handle, place: torch.device, start: int = 0, stop: int | None = None) -> Tensor:
    """Return a copy of all rows, or of some, ``(n, dim)``, on `place`, in the dtype that they are computed in."""
    whole = handle.rows.whole("weight", start, stop)
    return torch.empty(whole.shape, dtype=handle.rows.dtype, device=place).copy_(whole)
