"""Save and load a model by its `state_dict`, in which the rows of tables are placeholders and streamed beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.checkpoint.plain_data import decode, encode
from speedtransfer.checkpoint.table_rows import Keeps, Readers, SavedRows, encode_rows
from speedtransfer.checkpoint.together import like
from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.nn.module_state import OF_VOCABULARY, ids_of, placeholder_rows, refuse_ids
from speedtransfer.optim import Handle
from speedtransfer.vocabulary import LoadPlan


def _state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Handle]]:
    """Return the state dict with placeholders for the rows of tables, and the tables by their keys."""
    with placeholder_rows() as met:
        try:
            state = model.state_dict()
        except NotImplementedError as error:
            raise InvalidTypeError(
                f"state_dict() of {type(model).__name__}, or a hook of it, does something to the rows of tables, which are "
                f"placeholders there ({error}); leave entries of tables as they are"
            ) from error
    handles = {id(placeholder): handle for placeholder, handle in met}
    return state, {key: handles[id(value)] for key, value in state.items() if id(value) in handles}


def tables_of(model: nn.Module) -> dict[str, Handle]:
    """Return the tables of a model by their keys in its state dict; one in two places by the first."""
    found: dict[int, str] = {}
    tables = _state(model)[1]
    return {key: handle for key, handle in tables.items() if found.setdefault(id(handle), key) == key}


def encode_model(model: nn.Module, keeps: Keeps) -> dict[str, Any]:
    """Return the model as the manifest knows it, and have its tensors kept."""
    state, tables = _state(model)
    entries, counters, first = {}, {}, dict[int, str]()
    for key, value in state.items():
        handle = tables.get(key)
        if handle is None:
            entries[key] = encode(value, key, keeps.whole)
        elif first.setdefault(id(handle), key) != key:  # a module in two places
            entries[key] = {"$": "same", "v": first[id(handle)]}
        else:
            handle.step.recover()
            entries[key] = encode_rows(handle, "weight", key, keeps, tuple(value.shape[1:]), value.dtype)
            counters[key] = keeps.rows.counters(handle.rows)
    metadata = encode(getattr(state, "_metadata", None), "metadata of the model's state_dict", keeps.whole)
    return {"entries": entries, "counters": counters, "metadata": metadata}


class SavedModel:
    """A model in a checkpoint, checked against the one that it goes into. Making it changes nothing.

    InvalidValueError: the two differ in keys, shapes or dtypes. ValueError, TypeError or KeyError: `node` is malformed.
    The rows of the tables `left_out`, and the ids that these belong to, stay as they are.
    """

    def __init__(
        self, node: dict[str, Any], model: nn.Module, readers: Readers, left_out: Collection[Handle] = ()
    ) -> None:
        self.model, entries, reader = model, node["entries"], readers.whole
        state, self._tables = _state(model)
        for key in [key for key, handle in self._tables.items() if handle in left_out]:
            start = key.removesuffix("weight") + OF_VOCABULARY
            state = OrderedDict((k, v) for k, v in state.items() if k != key and not k.startswith(start))
            entries = {k: entry for k, entry in entries.items() if k != key and not k.startswith(start)}
            del self._tables[key]
        self._is_whole = not left_out
        # Of the tables that it goes into.
        self.handles = list(self._tables.values())
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_meta and key not in self._tables:
                raise InvalidValueError(
                    f"{key!r} of the model is on the meta device, where nothing can be loaded; call "
                    "model.to_empty(device=...) first"
                )
        parts = {key.removesuffix("weight") + OF_VOCABULARY for key in self._tables if key.endswith("weight")}
        ids = {key for key in {*entries, *state} if key.startswith(tuple(parts))}
        _check_keys(set(entries) - ids, set(state) - ids)
        self._rows: dict[str, SavedRows] = {}
        self._plans: dict[Handle, LoadPlan] = {}
        self._state: OrderedDict[str, Any] = OrderedDict()
        for key in sorted(ids & set(entries)):
            self._state[key] = decode(entries[key], reader.read)
        for key, current in state.items():
            if key in ids:
                continue
            entry = entries[key]
            if isinstance(entry, dict) and entry.get("$") == "same":
                entry = entries[entry["v"]]
            if not isinstance(current, Tensor):
                self._state[key] = decode(entry, reader.read)  # extra state
                continue
            saved: Any = decode(entry, reader.mapped) if "complex" in entry else SavedRows(entry, readers)
            shape, dtype = tuple(saved.shape), saved.dtype
            handle = self._tables.get(key)
            if handle is not None and (handle.id_space.come_and_go or reader.rows_come_apart):
                # Of any number of rows; a delta says itself of how many.
                current = torch.empty(*shape[:1], *current.shape[1:], dtype=current.dtype, device="meta")
            if shape != tuple(current.shape) or dtype != current.dtype:
                raise InvalidValueError(
                    f"{key!r} is {shape} {dtype} in the checkpoint but {tuple(current.shape)} {current.dtype} in the "
                    "model; make the model as it was saved (model.to(dtype) before loading)"
                )
            if key in self._tables:
                self._rows[key], self._state[key] = saved, current  # the placeholder
                assert handle is not None
                if handle.id_space.come_and_go:
                    state_of_ids = ids_of(self._state, key.removesuffix("weight"))
                    self._plans[handle] = handle.id_space.vocabulary.plan_load(state_of_ids, shape[0])
                else:
                    refuse_ids(self._state, key.removesuffix("weight"), handle)
                if handle.table.is_read_only:
                    saved.check_equal(handle)
                else:
                    handle.table.check_writable()
            else:
                self._state[key] = like(saved if isinstance(saved, Tensor) else saved.mapped(), current)
        metadata = decode(node["metadata"], reader.read)
        if metadata is not None:
            for inner in metadata.values():  # that modules can read it: in the middle of loading would be too late
                if not isinstance(inner, dict) or type(inner.get("version")) not in (int, type(None)):
                    raise TypeError("metadata of the model without versions")
            self._state._metadata = metadata  # type: ignore[attr-defined]
        # Under the first of two places.
        first = {key: entries[key]["v"] if entries[key].get("$") == "same" else key for key in self._tables}
        self._counters = {key: node["counters"].get(first[key], {}) for key in self._tables}
        if not all(type(n) is int for counters in self._counters.values() for n in counters.values()):
            raise TypeError("counters that are no integers")

    def allocate(self) -> None:
        """Give tables the rows that they lack for their ids. May run out of memory, as `SavedOptimizer.allocate`."""
        for handle, plan in self._plans.items():
            if plan.num_rows > handle.table.num_rows:
                handle.grow(plan.num_rows)

    def load(self, advance: Callable[[int], None]) -> None:
        """Load the model, the rows of tables in chunks."""
        keys = {id(self._state[key]): key for key in self._tables}
        # Of a table in two places the last, as in torch.
        last: dict[Handle, str] = {}
        with placeholder_rows(self._plans) as met:
            self.model.load_state_dict(self._state, strict=self._is_whole)
        for placeholder, handle in met:
            key = keys.get(id(placeholder))
            if key is None:
                raise InvalidValueError(
                    "a hook of load_state_dict made other values of a table's rows, which it does not see here; remove the "
                    "hook, or load them with model.load_state_dict"
                )
            last[handle] = key
        for handle, key in last.items():
            rows = self._rows[key]
            if handle.table.is_read_only:
                # Equal, as was checked.
                advance(handle.num_rows * rows.row_bytes)
                continue
            rows.copy_into(handle, "weight", advance)
            handle.rows.load_state_dict(self._counters[key] if rows.stored_as(handle.rows, "weight") else {})


def _check_keys(saved: set[str], ours: set[str]) -> None:
    missing, extra = sorted(ours - saved), sorted(saved - ours)
    if missing and {key.removeprefix("module.") for key in saved} == {key.removeprefix("module.") for key in ours}:
        raise InvalidValueError(
            f"the checkpoint has {extra[0]!r} and the model {missing[0]!r}: one is wrapped (DistributedDataParallel) and the "
            "other is not; pass the model as it was saved: wrapped, or wrapped.module"
        )
    more = f" and {len(missing or extra) - 1} more" if len(missing or extra) > 1 else ""
    if missing:
        near = suggest(missing[0], extra or sorted(saved) or ["nothing"])
        raise InvalidValueError(f"the checkpoint has no {missing[0]!r}{more} that the model has{near}")
    if ids := [key for key in extra if f".{OF_VOCABULARY}ids" in f".{key}"]:
        raise InvalidValueError(
            f"the checkpoint has ids ({ids[0][:80]!r}), whose rows are in no order, and the model has no vocabulary there; "
            "make the module with vocabulary=st.Vocabulary(), or load what vocabulary.export() returned"
        )
    if extra:
        raise InvalidValueError(
            f"the checkpoint has {extra[0][:80]!r}{more}, which the model does not have; make the model as it was saved"
        )
