"""State per row: planes of the table that an optimizer sees, for the active rows, as its ordinary state."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.idle import Rule
from speedtransfer.optim.handle import Handle
from speedtransfer.optim.lag import Lag
from speedtransfer.optim.leaves import leaves, put
from speedtransfer.optim.probe import PlaneSpec, probe
from speedtransfer.optim.probe.trajectories import STEPS
from speedtransfer.rows import RowStore
from speedtransfer.tables import row_chunks


class RowState:
    """The state that one optimizer keeps for one handle.

    Between steps ``optimizer.state[param]`` holds the whole planes as views, so ``optimizer.state_dict()`` is that of a dense
    optimizer; during a step it holds the rows of the active ids. What is shared by all rows (`step`, ...) stays as it is.

    With a `rule` for idle rows the table lags behind: a row is brought up to date when it is read. Whoever reads rows other
    than through `current` needs `settle` before, which the table itself calls for those who come from outside.
    """

    def __init__(
        self,
        handle: Handle,
        optimizer: Optimizer,
        specs: dict[str, PlaneSpec],
        rule: Rule | None = None,
        sparse: bool = False,
    ) -> None:
        self._lock = handle.lock
        self._handle = weakref.ref(handle)  # which holds this object: a cycle would keep the table until the next gc
        self.optimizer = weakref.ref(optimizer)
        self.in_step = False  # from load to store; still True at the next load: the step between failed
        self._step: tuple[FrameType, int] | None = None  # the frame that is in the step, and its thread
        self._sparse = sparse  # a step finds a sparse gradient over the active rows
        self._assumed: dict[str, Any] | None = None  # hyperparameters with which idle rows stay as they are
        self._specs: dict[str, PlaneSpec] = {}
        self._views: dict[str, Any] = {}  # views of whole planes, or what stands for those that have none
        self._shared: set[str] = set()  # tensors of state that are known to follow no rows
        self._mapping: Any = None  # optimizer.state as of the last load; load_state_dict makes another
        self._first = True  # there was no state in it
        self._fresh = True  # no row has been stored yet
        self._lag: Lag | None = None
        self._orphaned: RowStore | None = None  # the way to the rows once the handle is gone
        self._at_end: weakref.finalize | None = None
        self._add({name: spec for name, spec in specs.items() if not spec.late})
        if rule is not None:
            try:
                self._lag = Lag(rule, handle.rows)
            except BaseException:
                self.drop()
                raise
            handle.table.settle_with(self.settle)
            # The table may outlive the handle: whoever reads it then still wants the steps that rows have missed.
            self._at_end = weakref.finalize(handle, _outlive, weakref.ref(self), handle.rows)
            self._at_end.atexit = False

    @property
    def handle(self) -> Handle:
        """The handle whose rows these are."""
        handle = self._handle()
        assert handle is not None
        return handle

    def _add(self, specs: dict[str, PlaneSpec]) -> None:
        store = self.handle.rows
        added: list[str] = []
        try:
            for name, spec in specs.items():
                if name not in self._views:
                    store.add(_plane_name(name), spec.tail, _plane_dtype(spec.dtype), spec.start)
                    self._specs[name] = spec
                    self._views[name] = self._of_state(name, store.shown(_plane_name(name)))
                    added.append(name)
        except BaseException:  # no room for all of them: leave none, so that another try finds things as they were
            for name in added:
                self._remove(name)
            raise

    def _of_state(self, name: str, values: Tensor) -> Tensor:
        """Return `values` of a plane as the state that they are, without a copy."""
        return values.view(torch.bool) if self._specs[name].dtype == torch.bool else values

    def _remove(self, name: str) -> None:
        self.handle.rows.drop(_plane_name(name))
        del self._views[name]

    def drop(self) -> None:
        """Remove the planes and the views of them that the optimizer holds."""
        for name in list(self._views):
            self._remove(name)
        if self._lag is not None:
            self.handle.table.settle_with(None)
            self._lag.drop(self.handle.rows)
            self._lag = None
        if self._at_end is not None:
            self._at_end.detach()  # it holds the table
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer.state.pop(self.handle.param, None)
        self._mapping, self.in_step, self._step = None, False, None

    @property
    def lags(self) -> bool:
        """Whether there may be rows with steps to come."""
        return bool(self._lag)

    def current(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows `ids` (n,) as they are after all steps so far: weights, and where these lagged the state too."""
        store = self.handle.rows
        if not self._lag:
            return store.read(ids, ["weight"])
        with self._lock:
            return self._lag.read(store, ids, self._planes())

    @torch.no_grad()
    def settle(self, ids: Tensor | None = None) -> None:
        """Bring the rows `ids` (n,), none twice, of the table up to date; None: all of them."""
        if self._lag is not None:
            store = self.handle.rows if self._orphaned is None else self._orphaned
            with self._lock:
                self._lag.settle(store, ids, self._planes())

    def outlive(self, store: RowStore) -> None:
        """Go on without the handle, whose `store` this is: the table still brings its rows up to date."""
        self._orphaned = copy.copy(store)
        self._orphaned.table = weakref.proxy(store.table)  # which holds this object: see above

    def _settle_for_good(self) -> None:
        """Bring every row up to date by the state that is about to go."""
        self.settle()
        self.handle.state_rows = {}

    def _planes(self) -> list[str]:
        return [_plane_name(name) for name in self._views]

    def load(self, optimizer: Optimizer, group: dict[str, Any], frame: FrameType | None) -> None:
        """Put the active rows and their state where the optimizer looks for them.

        Parameters
        ----------
        optimizer : Optimizer
        group : dict
            That of the parameter.
        frame : FrameType
            Of the function that runs the step.
        """
        ids = self.handle.ids
        assert ids is not None
        state = optimizer.state.get(self.handle.param)
        if self._lag is not None:
            self._lag.begin(group, state or {}, self.handle.rows, self._planes())
        if not state:  # the optimizer makes its own first state, for all keys or none
            if not self._fresh:
                self._settle_for_good()
                self._start_anew(list(self._views))
        else:
            self._adopt(state, optimizer)
            if self._views and not self.handle.in_place:  # else it has the planes themselves
                put(state, self._rows_of_state(ids))
        self._mapping, self._first = optimizer.state, not state
        self._step = None if frame is None else (frame, threading.get_ident())
        self.in_step = True
        if self.handle.active is None:  # a probe has hidden the gradient meanwhile
            self.handle.refresh()
        self.handle.enter(self._sparse)

    def assume(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Count on it that, with the hyperparameters `group`, the optimizer leaves idle rows alone."""
        self._assumed = _switches(optimizer, group)

    def is_assumed_otherwise(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Tell whether `assume` has been called with hyperparameters of which one was switched on or off since."""
        return self._assumed is not None and self._assumed != _switches(optimizer, group)

    def steps_in_place(self) -> bool:
        """Tell whether the optimizer has the planes themselves as its state, so that a step of all rows needs no copies."""
        optimizer = self.optimizer()
        state = None if optimizer is None else optimizer.state.get(self.handle.param)
        if not state or self._sparse or self._fresh:
            return False
        found = leaves(state)
        return all(isinstance(view, Tensor) and found.get(name) is view for name, view in self._views.items())

    @property
    def follows_idle_rows(self) -> bool:
        """Whether idle rows receive the steps that they miss."""
        return self._lag is not None

    def stepping(self) -> bool:
        """Tell whether the step that `load` has begun still runs; it may have failed, of which nobody tells."""
        if self._step is None:
            return False
        begun, thread = self._step
        if thread != threading.get_ident():
            return thread in sys._current_frames()  # its own business, while it lives
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not begun:
            frame = frame.f_back
        return frame is begun

    def _rows_of_state(self, ids: Tensor) -> dict[str, Tensor]:
        rows = self.handle.state_rows  # maybe they came with the weights
        if not set(self._planes()) <= rows.keys():
            rows = self.current(ids) if self._lag else self.handle.rows.read(ids, self._planes())
        return {name: self._of_state(name, rows[_plane_name(name)]) for name in self._views}

    def recover(self, optimizer: Optimizer) -> None:
        """Undo what a step that failed has left in the optimizer; the table it has not reached."""
        if not self.in_step:
            return
        self.in_step, self._step = False, None
        self.handle.leave()
        state, mapping = optimizer.state.get(self.handle.param), self._mapping
        self._mapping = None  # it holds the parameter, and so the table
        if state and optimizer.state is mapping:  # nobody has loaded another state since
            if self._first:
                del optimizer.state[self.handle.param]  # made by that step for the active rows only
            else:
                put(state, self._views)

    def _start_anew(self, names: list[str]) -> None:
        """Fill planes with what untouched rows hold, as where somebody has emptied the optimizer's state."""
        for name in names:
            self._remove(name)
        self._add({name: self._specs[name] for name in names})

    def _adopt(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """Copy planes that came from a loaded state dict into the table."""
        found = leaves(state)
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer)
        foreign = {name: found.get(name) for name, view in self._views.items() if found.get(name) is not view}
        loaded = {
            name: value
            for name, value in foreign.items()
            if value is not None and value.shape[0] and not (self._fresh and self._holds_start(name, value))
        }
        for name, value in loaded.items():
            check_shape(name, value, self._views[name].shape)
        if loaded or (foreign and not self._fresh):
            self._settle_for_good()
        if not self._fresh:
            self._start_anew([name for name in foreign if name not in loaded])
        if loaded:
            self.handle.table.wait()
        for name, value in loaded.items():
            self.handle.rows.load(_plane_name(name), value)

    def _holds_start(self, name: str, value: Tensor) -> bool:
        """Tell whether a state is what untouched rows have, as constructors make it (Adagrad): planes hold that already."""
        start = self._specs[name].start
        if start is None:
            return False
        if 0 in value.stride():  # one number in the shape of all
            return bool((value[:1] == start).all())
        row_bytes = value[:1].numel() * value.element_size()
        return all(bool((value[rows] == start).all()) for rows in row_chunks(len(value), row_bytes))

    def _learn(self, found: dict[str, Tensor], optimizer: Optimizer) -> None:
        """Make planes for state that was not there before: the optimizer makes it late, or a hyperparameter has changed."""
        unknown = {name for name in found if name not in self._views and name not in self._shared}
        self._shared |= {name for name in unknown if found[name].dim() == 0}
        if unknown <= self._shared:
            return
        group = next(g for g in optimizer.param_groups if any(p is self.handle.param for p in g["params"]))
        findings = probe(optimizer, group, self.handle.param, self.handle.sparse)
        self._add({name: spec for name, spec in findings.items() if name in unknown})
        late = unknown - self._views.keys() - self._shared - findings.shared
        if late:
            raise OptimizerError(
                f"{type(optimizer).__name__} made state {min(late)!r} that it did not make in a trial of {STEPS} steps, so "
                "that what other rows start from is unknown; use an optimizer that makes its state in its first steps"
            )
        self._shared |= unknown - self._views.keys()

    def stored(self, state: dict[str, Any]) -> dict[str, tuple[str, PlaneSpec]]:
        """Return which entries of the optimizer's `state` are planes of the table: what those are called there, and theirs."""
        names = [name for name, view in self._views.items() if state.get(name) is view]
        return {name: (_plane_name(name), self._specs[name]) for name in names}

    def matches(self, specs: dict[str, PlaneSpec]) -> bool:
        """Tell whether the planes have the names, shapes and dtypes of `specs`."""
        own = self._specs
        return own.keys() == specs.keys() and all(
            (own[n].tail, own[n].dtype) == (spec.tail, spec.dtype) for n, spec in specs.items()
        )

    def make(self, specs: dict[str, PlaneSpec]) -> None:
        """Add the planes of `specs` that there are not yet."""
        self._add(specs)

    def adopt(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        """Take the planes of the state `names`, which have been filled from outside, as what the optimizer has."""
        put(optimizer.state[self.handle.param], {name: self._views[name] for name in names})
        self._mapping, self.in_step, self._fresh = None, False, False

    def store(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Write the active rows and their state into the table and make the parameter idle."""
        handle, state = self.handle, optimizer.state.get(self.handle.param, {})
        ids = handle.ids
        assert ids is not None
        found = leaves(state)
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer)
        rows = {"weight": handle.param.data}
        rows.update(
            {_plane_name(name): self._of_plane(name, found[name], len(ids)) for name in self._views & found.keys()}
        )
        if handle.in_place and _are_planes(handle.rows, rows):
            if self._lag is not None:
                self._lag.end_of_all(optimizer, group, state, handle.rows)
        elif self._lag is None:
            handle.rows.write(ids, rows)
        else:
            self._lag.end(optimizer, group, state, handle.rows, ids, rows)
        handle.mark_stepped()
        if state:
            put(state, self._views)
        self.in_step = False
        self._mapping, self._step, self._fresh = None, None, False
        handle.leave()
        if self._lag is not None and self._lag.is_long:
            self.settle()

    def _of_plane(self, name: str, values: Tensor, count: int) -> Tensor:
        """Return the state of `count` active rows as its plane holds it."""
        spec = self._specs[name]
        if values.shape != (count, *spec.tail) or values.dtype != spec.dtype:
            raise OptimizerError(
                f"state {name!r} became {tuple(values.shape)} {values.dtype} for {count} rows but its plane holds "
                f"{spec.tail} {spec.dtype} a row; use an optimizer whose state keeps its shape"
            )
        return values.view(torch.uint8) if spec.dtype == torch.bool else values


def _are_planes(store: RowStore, rows: dict[str, Tensor]) -> bool:
    """Tell whether an optimizer has left all rows where they were: some set another tensor in their place."""
    return all(values.data_ptr() == store.table.stored(name).data_ptr() for name, values in rows.items())


def _switches(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """Return which hyperparameters are on (not zero): decay, momentum."""
    return {key: bool(group[key]) for key in optimizer.defaults if isinstance(group.get(key), bool | int | float)}


def _outlive(state: weakref.ref[RowState], store: RowStore) -> None:
    alive = state()
    if alive is not None:
        alive.outlive(store)


def _plane_name(state_name: str) -> str:
    return "state.weight" if state_name == "weight" else state_name


def _plane_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a table that holds state of `dtype`: tables have no bool."""
    return torch.uint8 if dtype == torch.bool else dtype


def check_shape(name: str, value: Tensor, shape: Iterable[int]) -> None:
    """Raise where loaded state does not fit the table."""
    if value.shape != (shape := tuple(shape)):
        raise OptimizerError(
            f"loaded state {name!r} has shape {tuple(value.shape)} but the table needs {shape}; load the state that was saved "
            "with this table"
        )
