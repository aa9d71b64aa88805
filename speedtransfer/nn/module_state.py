"""State dicts of table modules: all rows under the name that ``torch.nn`` uses, or placeholders for them."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.shown_rows import ShownRows
from speedtransfer.nn.weight import TableWeight, WeightData, check_ordinary, handle_of
from speedtransfer.optim import Handle, VocabularyIds
from speedtransfer.optim.views import outside_of_transforms
from speedtransfer.vocabulary import LoadPlan

# The keys of the state of a vocabulary begin so, after the name of the module.
OF_VOCABULARY = "vocabulary."
# Placeholders used in state dicts so far, each with its handle; None: state dicts hold the rows themselves.
_placeholders: ContextVar[list[tuple[Tensor, Handle]] | None] = ContextVar("placeholders", default=None)
_plans: ContextVar[Mapping[Handle, LoadPlan]] = ContextVar("plans", default={})  # noqa: B039 - nobody writes to it
# The rows that a state dict has of a weight, for its other names there: what writes files finds ties by their memory.
_shown: weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], Callable[[], Tensor | None], int]]
_shown = weakref.WeakKeyDictionary()


@contextmanager
def placeholder_rows(plans: Mapping[Handle, LoadPlan] | None = None) -> Iterator[list[tuple[Tensor, Handle]]]:
    """Save and load state dicts with meta tensors as placeholders for the rows of tables, which are not copied.

    Yields the list of placeholders saved or loaded so far, each with its handle, for the caller to move the rows. `plans` are
    those by which the caller has checked the ids to load.
    """
    used: list[tuple[Tensor, Handle]] = []
    token, of_plans = _placeholders.set(used), _plans.set(plans or {})
    try:
        yield used
    finally:
        _placeholders.reset(token)
        _plans.reset(of_plans)


def with_placeholders() -> bool:
    """Tell whether state dicts are to have placeholders for the rows of tables."""
    return _placeholders.get() is not None


@contextmanager
def with_weight(module: nn.Module, weight: Tensor | None) -> Iterator[Any]:
    """Yield a double of `module` with another weight, for methods of torch.nn to run on; what they set is set in `module`.

    The weight stays where it is: another thread may be training.
    """
    double: Any = object.__new__(type(module))
    replaced = {"_parameters": {**module._parameters, "weight": weight}}
    # Which torch calls meanwhile, and which see the module.
    replaced |= {name: getattr(module, name) for name in ("get_extra_state", "set_extra_state")}
    before = {**vars(module), **replaced}
    vars(double).update(before)
    yield double
    after = vars(double)
    module._parameters.update({name: param for name, param in after["_parameters"].items() if name != "weight"})
    changed = {name: value for name, value in after.items() if value is not before.get(name, after)}
    vars(module).update(changed)


def _rows_in(destination: Any, handle: Any) -> Tensor:
    """Return all rows of a weight, or of a part of one, where they are stored, for a state dict: the same under each name."""
    handle.of.step.recover()
    known, shown, version = _shown.get(handle, (lambda: None, lambda: None, 0))
    whole = shown() if known() is destination and version == handle.table.version else None
    if whole is None:
        with outside_of_transforms():
            whole = handle.of.rows.whole("weight", handle.start, handle.stop)
        if isinstance(destination, OrderedDict):
            _shown[handle] = weakref.ref(destination), weakref.ref(whole), handle.table.version
    return whole


def knowing_ties(save: Callable[..., None]) -> Callable[..., None]:
    """Return what saves the parameters of any module, with the rows of a table, in place of what stands for all of them."""

    @functools.wraps(save)
    def called(self: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        save(self, destination, prefix, keep_vars)
        if keep_vars or with_placeholders():
            return
        for name, param in self._parameters.items():
            if isinstance(param, TableWeight) and isinstance(destination.get(prefix + name), WeightData):
                handle = handle_of(param)
                if handle.of.is_whole:
                    destination[prefix + name] = _rows_in(destination, handle)

    return called


class ModuleState(nn.Module):
    """The part of :class:`TableModule` that saves and loads its state dict."""

    num_embeddings: int
    embedding_dim: int
    _handle: Handle

    def _has_rows(self) -> bool:
        """Tell whether the weight is that of the table, and was not replaced by functional_call or a parametrization."""
        weight, handle = self._parameters.get("weight"), self.__dict__.get("_handle")
        return weight is not None and handle is not None and weight is handle.param_ref()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save all rows under the name that ``torch.nn`` uses: a view of the table, or of codes a float32 copy."""
        if not self._has_rows():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        self._name_table(prefix)
        if not with_placeholders():
            self._check_saves()
            self._check_has_all_rows()
        with with_weight(self, self._placeholder()) as double:
            super(ModuleState, double)._save_to_state_dict(destination, prefix, keep_vars)
        used = _placeholders.get()
        if used is None:
            whole = self._parameters["weight"] if keep_vars else _rows_in(destination, self._handle)
        else:
            whole = self._placeholder()
            used.append((whole, self._handle))
        destination[prefix + "weight"] = whole
        for name, values in self._handle.id_space.owners.saved().items():
            destination[prefix + OF_VOCABULARY + name] = values if used is not None else ShownRows(values)
        if self._handle.id_space.come_and_go and used is None and not keep_vars:
            destination[prefix + "weight"] = ShownRows(destination[prefix + "weight"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load all rows as ``torch.nn`` loads a weight; ``assign=True`` copies too: the table keeps its memory.

        Rows that are read in place are compared: to load others raises.
        """
        check_assigned(state_dict, prefix, local_metadata)
        waiting = not self._has_rows() and self.__dict__.get("_options", {}).get("vocabulary") is not None
        if waiting and (prefix + "weight" in state_dict or ids_of(state_dict, prefix)):
            self._begin_with_ids(state_dict.get(prefix + "weight"), local_metadata)
        if not self._has_rows():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            weight = self._parameters.get("weight")
            if "_options" in self.__dict__ and weight is not None:
                # Where torch swaps tensors (torch.__future__), nobody has assigned it.
                self.register_parameter("weight", weight)
            return
        # The table keeps its memory and its parameter; that of torch would be new and have no gradient.
        if local_metadata.get("assign_to_params_buffers") and prefix + "weight" in state_dict:
            self._handle.assign_gradient(None)
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        if not with_placeholders():
            self._check_saves()
        if isinstance(self._handle.id_space, VocabularyIds):
            self._load_ids(self._handle.id_space, state_dict, prefix, local_metadata, *rest)
            return
        used, rows = _placeholders.get(), self._handle.rows
        self._handle.step.recover()
        refuse_ids(state_dict, prefix, self._handle)
        if prefix + "weight" in state_dict and not self._handle.table.is_read_only:
            self._handle.table.check_writable()
            self._handle.table.end_snapshot()
        sharded, writable = not self._handle.owners.has_whole, self._handle.table.writable
        whole: Any = self._placeholder()
        if used is None:
            whole = self._handle.table.torch() if writable and not sharded else self._handle.placeholder()
        whole = nn.Parameter(whole, requires_grad=False)
        if used is None and (sharded or not rows.plain or not writable):
            receive(whole, self._handle.store if writable else self._handle.check_equal)
        with with_weight(self, whole) as double:
            super(ModuleState, double)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if used is not None and prefix + "weight" in state_dict:
            used.append((state_dict[prefix + "weight"], self._handle))

    def _name_table(self, prefix: str) -> None:
        """Have messages call the table as its keys of a state dict begin, unless other processes know it by another name."""
        if self._handle.owners.is_alone:
            self._handle.name = prefix[:-1]

    def _check_saves(self) -> None:
        owners = self._handle.owners
        if not owners.has_whole and self._handle.id_space.come_and_go:
            raise InvalidTypeError(
                f"{self._handle} has a vocabulary that {owners.exchange.ranks} processes share out, of which the state "
                "dict of one has only a part; call st.save_checkpoint and st.load_checkpoint in all of them"
            )

    def _check_has_all_rows(self) -> None:
        if not self._handle.owners.has_whole:
            raise InvalidTypeError(
                f"{self._handle} is owned by {self._handle.owners.exchange.ranks} processes, so state_dict() of one has not "
                "all rows; call st.save_checkpoint in all, or st.full_state_dict(model), which gives them to rank 0"
            )

    def _begin_with_ids(self, given: Any, local_metadata: Any) -> None:
        """Make the table of a module with a vocabulary on the meta device where the rows to load are, ``assign=True``."""
        weight: Any = self._parameters["weight"]
        if not isinstance(given, Tensor) or given.is_meta or not local_metadata.get("assign_to_params_buffers"):
            raise InvalidValueError(
                "a module with a vocabulary is on the meta device, where nothing can be loaded; pass assign=True, with the "
                "rows, or call to_empty(device=...) of the model first"
            )
        waiting: Any = self
        waiting._end_wait(None, nn.Parameter(given.new_empty(0), requires_grad=weight.requires_grad))

    def _load_ids(self, id_space: VocabularyIds, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load rows and their ids, of a table with any number of rows: those of a table without ids are numbered from 0 on.

        Raises
        ------
        InvalidValueError, HostMemoryError
            The ids are malformed, or too many. Nothing has changed.
        """
        handle, key, start = id_space.handle, prefix + "weight", prefix + OF_VOCABULARY
        state = ids_of(state_dict, prefix)
        used, given = _placeholders.get(), state_dict.get(key)
        if state and not isinstance(given, Tensor):
            raise InvalidValueError(
                f"{handle}: there are ids to load ({start}ids) but not their rows ({key}); load all that state_dict() returned"
            )
        failed: list[Exception] = []

        def load(values: Tensor) -> None:
            try:
                id_space.load_saved(state, len(values), None if used is not None else values, _plans.get().get(handle))
            except Exception as error:
                # torch.nn would make a RuntimeError of it.
                failed.append(error)

        # Of as many rows as there are to load; torch.nn compares the rest of the shape.
        shape = (
            (len(given), self.embedding_dim) if isinstance(given, Tensor) and given.dim() else (0, self.embedding_dim)
        )
        whole: Any = torch.zeros((), dtype=handle.rows.dtype, device="cpu").expand(shape)
        whole = nn.Parameter(whole if used is None else whole.to("meta"), requires_grad=False)
        receive(whole, load)
        others = {name: value for name, value in state_dict.items() if not name.startswith(start)}
        with with_weight(self, whole) as double:
            super(ModuleState, double)._load_from_state_dict(others, prefix, local_metadata, *rest)
        if failed:
            raise failed[0]
        if used is not None and given is not None:
            used.append((given, handle))

    def _placeholder(self) -> Tensor:
        return torch.empty(self._handle.num_rows, self.embedding_dim, dtype=self._handle.rows.dtype, device="meta")


def check_assigned(state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """Raise where ``assign=True`` would make the weight a parameter of a class that the table cannot keep."""
    given = state_dict.get(prefix + "weight")
    if local_metadata.get("assign_to_params_buffers") and isinstance(given, nn.Parameter):
        check_ordinary(given, prefix + "weight")


def receive(whole: nn.Parameter, load: Callable[[Tensor], None]) -> None:
    """Have torch.nn call `load` with what it would copy to `whole`, once it has checked names and shapes."""

    def copy(values: Tensor, *_: Any) -> Tensor:
        load(values)
        # With which torch swaps `whole`, if it is to (torch.__future__).
        return torch.empty(0, device="cpu")

    vars(whole)["copy_"] = copy


def ids_of(state_dict: Any, prefix: str) -> dict[str, Any]:
    """Return the part of a state dict that is the state of the vocabulary of a module, by its names there."""
    start = prefix + OF_VOCABULARY
    return {name[len(start) :]: value for name, value in state_dict.items() if name.startswith(start)}


def refuse_ids(state_dict: Any, prefix: str, handle: Handle) -> None:
    """Raise where rows come with ids, which this module has no place for."""
    if f"{prefix}{OF_VOCABULARY}ids" in state_dict:
        raise InvalidValueError(
            f"{handle} has no vocabulary, but what is to be loaded has ids ({prefix}{OF_VOCABULARY}ids), whose rows are in no "
            "order; make the module with vocabulary=st.Vocabulary(), or load rows that vocabulary.export() returned"
        )
