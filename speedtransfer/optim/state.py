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

    def __init__(self, handle: Handle, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.handle = handle
        self.optimizer = weakref.ref(optimizer)
        self._views: dict[str, Tensor] = {}
        self._active: dict[str, Tensor] = {}
        self._add(probe(optimizer, group, handle.param))

    def _add(self, specs: dict[str, PlaneSpec]) -> None:
        table = self.handle.table
        for name, spec in specs.items():
            if name in self._views:
                continue
            width = 1
            for size in spec.tail:
                width *= size
            start = table.plane("weight") if spec.start is None else spec.start
            plane = table.add_plane(_plane_name(name), width, spec.dtype, fill=start)
            self._views[name] = plane.view(table.num_rows, *spec.tail)

    def drop(self) -> None:
        """Remove the planes and the views of them that the optimizer holds."""
        for name in self._views:
            self.handle.table.drop_plane(_plane_name(name))
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer.state.pop(self.handle.param, None)
        self._views, self._active = {}, {}

    def load(self, optimizer: Optimizer) -> None:
        """Put the active rows' state where the optimizer looks for it."""
        state = optimizer.state.get(self.handle.param)
        if not state:  # the optimizer makes its own first state, for all keys or none
            return
        self._adopt(state)
        ids = self.handle.ids
        assert ids is not None
        if self._views:
            rows = self.handle.table.gather(ids, [_plane_name(name) for name in self._views], check=False)
            self._active = {
                name: rows[_plane_name(name)].view(len(ids), *view.shape[1:]) for name, view in self._views.items()
            }
            state.update(self._active)

    def _adopt(self, state: dict[str, Any]) -> None:
        """Copy planes that came from a loaded state dict into the table."""
        for name, view in self._views.items():
            value = state.get(name)
            if value is None or value is view or value is self._active.get(name) or value.shape[0] == 0:
                continue  # ours; left by a step that failed; or made in a constructor for no rows
            if value.shape != view.shape:
                raise OptimizerError(
                    f"loaded state {name!r} has shape {tuple(value.shape)} but the table needs {tuple(view.shape)}; "
                    "load the state that was saved with this table"
                )
            view.copy_(value)

    def store(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Write the active rows and their state into the table and make the parameter idle."""
        handle, state = self.handle, optimizer.state.get(self.handle.param, {})
        ids = handle.ids
        assert ids is not None
        if any(_is_rows(value, len(ids)) and name not in self._views for name, value in state.items()):
            self._add(probe(optimizer, group, handle.param))  # a hyperparameter changed and brought new state
        rows = {"weight": handle.param.data}
        for name in self._views:
            value = state.get(name)
            if isinstance(value, Tensor):
                rows[_plane_name(name)] = value.view(len(ids), -1)
        handle.table.scatter(ids, rows, check=False)
        state.update(self._views)
        self._active = {}
        handle.clear()


def _plane_name(state_name: str) -> str:
    return "state.weight" if state_name == "weight" else state_name


def _is_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count
