"""State per row: planes of the table that an optimizer sees, for the active rows, as its ordinary state."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.handle import Handle
from speedtransfer.optim.probe import PlaneSpec, probe


class RowState:
    """The state that one optimizer keeps for one handle.

    Between steps ``optimizer.state[param]`` holds the whole planes as views, so ``optimizer.state_dict()`` is that of a dense
    optimizer; during a step it holds the rows of the active ids. What is shared by all rows (`step`, ...) stays as it is.
    """

    def __init__(self, handle: Handle, optimizer: Optimizer, specs: dict[str, PlaneSpec]) -> None:
        self._handle = weakref.ref(handle)  # which holds this object: a cycle would keep the table until the next gc
        self.optimizer = weakref.ref(optimizer)
        self.in_step = False  # from load to store; still True at the next load: the step between failed
        self._specs: dict[str, PlaneSpec] = {}
        self._views: dict[str, Any] = {}  # views of whole planes, or what stands for those that have none
        self._active: dict[str, Tensor] = {}
        self._mapping: Any = None  # optimizer.state as of the last load; load_state_dict makes another
        self._first = True  # there was no state in it
        self._fresh = True  # no row has been stored yet
        self._add(specs)

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
                    store.add(_plane_name(name), spec.tail, spec.dtype, spec.start)
                    self._specs[name] = spec
                    self._views[name] = store.shown(_plane_name(name))
                    added.append(name)
        except BaseException:  # no room for all of them: leave none, so that another try finds things as they were
            for name in added:
                self._remove(name)
            raise

    def _remove(self, name: str) -> None:
        self.handle.rows.drop(_plane_name(name))
        del self._views[name]

    def drop(self) -> None:
        """Remove the planes and the views of them that the optimizer holds."""
        for name in list(self._views):
            self._remove(name)
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer.state.pop(self.handle.param, None)
        self._active, self._mapping, self.in_step = {}, None, False

    def load(self, optimizer: Optimizer) -> None:
        """Put the active rows' state where the optimizer looks for it."""
        self.recover(optimizer)
        ids = self.handle.ids
        assert ids is not None
        state = optimizer.state.get(self.handle.param)
        if not state:  # the optimizer makes its own first state, for all keys or none
            if not self._fresh:
                self._start_anew(list(self._views))
        else:
            self._adopt(state)
            if self._views:
                rows = self.handle.rows.read(ids, [_plane_name(name) for name in self._views])
                self._active = {name: rows[_plane_name(name)] for name in self._views}
                state.update(self._active)
        self._mapping, self._first, self.in_step = optimizer.state, not state, True

    def recover(self, optimizer: Optimizer) -> None:
        """Undo what a step that failed has left in the optimizer; the table it has not reached."""
        if not self.in_step:
            return
        self.in_step, self._active = False, {}
        state = optimizer.state.get(self.handle.param)
        if state and optimizer.state is self._mapping:  # nobody has loaded another state since
            if self._first:
                del optimizer.state[self.handle.param]  # made by that step for the active rows only
            else:
                state.update(self._views)

    def _start_anew(self, names: list[str]) -> None:
        """Fill planes with what untouched rows hold, as where somebody has emptied the optimizer's state."""
        for name in names:
            self._remove(name)
        self._add({name: self._specs[name] for name in names})

    def _adopt(self, state: dict[str, Any]) -> None:
        """Copy planes that came from a loaded state dict into the table."""
        foreign = {name: state.get(name) for name, view in self._views.items() if state.get(name) is not view}
        # None, or made in a constructor for no rows: there is nothing to copy.
        loaded = {name: value for name, value in foreign.items() if value is not None and value.shape[0]}
        for name, value in loaded.items():
            if value.shape != self._views[name].shape:
                raise OptimizerError(
                    f"loaded state {name!r} has shape {tuple(value.shape)} but the table needs "
                    f"{tuple(self._views[name].shape)}; load the state that was saved with this table"
                )
        if not self._fresh:
            self._start_anew([name for name in foreign if name not in loaded])
        if loaded:
            self.handle.table.wait()
        for name, value in loaded.items():
            self.handle.rows.load(_plane_name(name), value)

    def store(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Write the active rows and their state into the table and make the parameter idle."""
        handle, state = self.handle, optimizer.state.get(self.handle.param, {})
        ids = handle.ids
        assert ids is not None
        if any(_is_rows(value, len(ids)) and name not in self._views for name, value in state.items()):
            self._add(probe(optimizer, group, handle.param))  # a hyperparameter changed and brought new state
        rows = {"weight": handle.param.data}
        rows.update({_plane_name(n): state[n] for n in self._views if isinstance(state.get(n), Tensor)})
        handle.rows.write(ids, rows)
        handle.mark_stepped()
        if state:
            state.update(self._views)
        self._active, self._mapping, self.in_step, self._fresh = {}, None, False, False
        handle.clear()


def _plane_name(state_name: str) -> str:
    return "state.weight" if state_name == "weight" else state_name


def _is_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count
