"""State per row: planes of the table that an optimizer sees, for the active rows, as its ordinary state."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.idle import Lag, Rule
from speedtransfer.optim.leaves import leaves, put
from speedtransfer.optim.placeholder import EncodedPlane
from speedtransfer.optim.probe import STEPS, PlaneSpec, probe_optimizer
from speedtransfer.rows import Rows
from speedtransfer.tables import row_chunks


class RowState:
    """The state that one optimizer keeps for the rows of one table.

    Between steps ``optimizer.state[param]`` holds the whole planes as views, so ``optimizer.state_dict()`` is that of a dense
    optimizer; during a step it holds the rows of the active ids. What is shared by all rows (`step`, ...) stays as it is.

    Parameters
    ----------
    rows : Rows
    param : nn.Parameter
        The parameter of the rows.
    optimizer : Optimizer
    specs : dict of str to PlaneSpec
        Its state per row.
    rule : Rule, optional
        What its steps do to idle rows, which lag behind then.
    sparse : bool
        Whether a step finds a sparse gradient over the active rows.
    from_sparse : bool
        Whether the module was made with ``sparse=True``.
    owner : object
        Whatever holds `rows` as long as the table is used by it.
    """

    def __init__(
        self,
        rows: Rows,
        param: nn.Parameter,
        optimizer: Optimizer,
        specs: dict[str, PlaneSpec],
        rule: Rule | None = None,
        sparse: bool = False,
        from_sparse: bool = False,
        owner: object = None,
    ) -> None:
        self.rows, self.sparse, self._from_sparse = rows, sparse, from_sparse
        # Neither may be kept alive by the state of the rows, which the parameter holds.
        self.optimizer, self._param = weakref.ref(optimizer), weakref.ref(param)
        self.in_step = False  # from load to store; still True at the next load: the step between failed
        self._step: tuple[FrameType, int] | None = None  # the frame that is in the step, and its thread
        self._assumed: dict[str, Any] | None = None  # hyperparameters with which idle rows stay as they are
        self._specs: dict[str, PlaneSpec] = {}
        self._planes: dict[str, str] = {}  # names of the planes, by those of the state
        self._views: dict[str, Any] = {}  # views of whole planes, or placeholders
        self._shared: set[str] = set()  # tensors of state that are known to follow no rows
        self._mapping: Any = None  # optimizer.state as of the last load; load_state_dict makes another
        self._first = True  # there was no state in it
        self._fresh = True  # no row has been stored yet
        self.add({name: spec for name, spec in specs.items() if not spec.late})
        if rule is not None:
            try:
                rows.let_lag(Lag(rule, rows.dtype), owner)
            except BaseException:
                self.drop()
                raise

    @property
    def param(self) -> nn.Parameter:
        """The parameter of the rows."""
        param = self._param()
        assert param is not None
        return param

    # --- planes -------------------------------------------------------------------------------------------------------

    def add(self, specs: dict[str, PlaneSpec]) -> None:
        """Add the planes of `specs` that there are not yet: all of them or, where there is no room, none."""
        added: list[str] = []
        try:
            for name, spec in specs.items():
                if name not in self._views:
                    plane = "state.weight" if name == "weight" else name
                    # Tables have no bool.
                    self.rows.add(
                        plane, spec.tail, torch.uint8 if spec.dtype == torch.bool else spec.dtype, spec.initial
                    )
                    self._specs[name], self._planes[name] = spec, plane
                    viewable = self.rows.is_viewable(plane)
                    self._views[name] = (
                        self._as_state(name, self.rows.whole(plane)) if viewable else EncodedPlane(self.rows, plane)
                    )
                    added.append(name)
        except BaseException:
            self._remove(added)
            raise

    def _as_state(self, name: str, values: Tensor) -> Tensor:
        """Return `values` of a plane as the state that they are, without a copy."""
        return values.view(torch.bool) if self._specs[name].dtype == torch.bool else values

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.rows.drop(self._planes.pop(name))
            del self._views[name]

    def drop(self) -> None:
        """Remove the planes and the views of them that the optimizer holds."""
        self._remove(list(self._views))
        self.rows.drop_lag()
        optimizer, param = self.optimizer(), self._param()
        if optimizer is not None and param is not None:
            optimizer.state.pop(param, None)
        self._mapping, self.in_step, self._step = None, False, None

    def stored(self, state: dict[str, Any]) -> dict[str, tuple[str, PlaneSpec]]:
        """Return which entries of the optimizer's `state` are planes of the table: what those are called there, and theirs."""
        names = [name for name, view in self._views.items() if state.get(name) is view]
        return {name: (self._planes[name], self._specs[name]) for name in names}

    def matches(self, specs: dict[str, PlaneSpec]) -> bool:
        """Tell whether the planes have the names, shapes and dtypes of `specs`."""
        own = self._specs
        return own.keys() == specs.keys() and all(
            (own[n].tail, own[n].dtype) == (spec.tail, spec.dtype) for n, spec in specs.items()
        )

    def adopt(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        """Take the planes of the state `names`, which have been filled from outside, as what the optimizer has."""
        put(optimizer.state[self.param], {name: self._views[name] for name in names})
        self._mapping, self.in_step, self._fresh = None, False, False

    # --- what idle rows take for granted ------------------------------------------------------------------------------

    def assume(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Count on it that, with the hyperparameters `group`, the optimizer leaves idle rows alone."""
        self._assumed = _switches(optimizer, group)

    def is_assumed_otherwise(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Tell whether `assume` has been called with hyperparameters of which one was switched on or off since."""
        return self._assumed is not None and self._assumed != _switches(optimizer, group)

    # --- a step -------------------------------------------------------------------------------------------------------

    def load(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        frame: FrameType | None,
        ids: Tensor | None,
        given: dict[str, Tensor],
    ) -> None:
        """Put the state of the active rows where the optimizer looks for it.

        Parameters
        ----------
        optimizer : Optimizer
        group : dict
            That of the parameter.
        frame : FrameType
            Of the function that runs the step.
        ids : Tensor or None
            ``(n,)``, the active rows; None: all, and the optimizer has the planes themselves.
        given : dict of str to Tensor
            Planes of the active rows that came with their weights.
        """
        state = optimizer.state.get(self.param)
        if self.rows.lag is not None:
            self.rows.lag.begin(group, state or {}, self.rows.catch_up)
        if not state:  # the optimizer makes its own first state, for all keys or none
            if not self._fresh:
                self.rows.catch_up()
                self._start_anew(list(self._views))
        else:
            found, views = leaves(state), self._views
            if found.keys() != views.keys() | self._shared or any(found[n] is not v for n, v in views.items()):
                given = self._adopt(found, optimizer, given)
            if views and ids is not None:
                planes = self._planes
                if not given.keys() >= set(planes.values()):
                    given = self.rows.read(ids, list(planes.values()))
                put(state, {name: self._as_state(name, given[plane]) for name, plane in planes.items()})
        self._mapping, self._first = optimizer.state, not state
        self._step = None if frame is None else (frame, threading.get_ident())
        self.in_step = True

    def store(self, optimizer: Optimizer, group: dict[str, Any], ids: Tensor | None) -> None:
        """Write the active rows `ids` (n,) and their state into the table; None: all, as `load`."""
        param, rows = self.param, self.rows
        state = optimizer.state.get(param, {})
        found = leaves(state)
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer)
        values = {"weight": param.data}
        count = len(values["weight"])
        for name, plane in self._planes.items():
            if name in found:
                values[plane] = self._of_plane(name, found[name], count)
        step = None if rows.lag is None else rows.lag.step_made(optimizer, group, state)
        if ids is not None:
            rows.write(ids, values, step)
        elif all(value.data_ptr() == rows.table.stored(plane).data_ptr() for plane, value in values.items()):
            rows.stepped_in_place(step)
        else:  # the optimizer has put another tensor in the place of some
            rows.write(torch.arange(count, device=param.device), values, step)
        if state:
            put(state, self._views)
        self.in_step = False
        self._mapping, self._step, self._fresh = None, None, False

    def _of_plane(self, name: str, values: Tensor, count: int) -> Tensor:
        """Return the state of `count` active rows as its plane holds it."""
        spec = self._specs[name]
        if values.shape != (count, *spec.tail) or values.dtype != spec.dtype:
            raise OptimizerError(
                f"state {name!r} became {tuple(values.shape)} {values.dtype} for {count} rows but its plane holds "
                f"{spec.tail} {spec.dtype} a row; use an optimizer whose state keeps its shape"
            )
        return values.view(torch.uint8) if spec.dtype == torch.bool else values

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

    def steps_in_place(self) -> bool:
        """Tell whether the optimizer has the planes themselves as its state, so that a step of all rows needs no copies."""
        optimizer = self.optimizer()
        state = None if optimizer is None else optimizer.state.get(self.param)
        if not state or self.sparse or self._fresh:
            return False
        found = leaves(state)
        return all(isinstance(view, Tensor) and found.get(name) is view for name, view in self._views.items())

    def recover(self, optimizer: Optimizer) -> None:
        """Undo what a step that failed has left in the optimizer; the table it has not reached."""
        self.in_step, self._step = False, None
        state, mapping = optimizer.state.get(self.param), self._mapping
        self._mapping = None  # it holds the parameter, and so the table
        if state and optimizer.state is mapping:  # nobody has loaded another state since
            if self._first:
                del optimizer.state[self.param]  # made by that step for the active rows only
            else:
                put(state, self._views)

    # --- state that comes from elsewhere ------------------------------------------------------------------------------

    def _start_anew(self, names: list[str]) -> None:
        """Fill planes with what untouched rows hold, as where somebody has emptied the optimizer's state."""
        self._remove(names)
        self.add({name: self._specs[name] for name in names})

    def _adopt(self, found: dict[str, Any], optimizer: Optimizer, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy planes that came from a loaded state dict into the table; return what of `given` is still true."""
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer)
        foreign = {name: found.get(name) for name, view in self._views.items() if found.get(name) is not view}
        loaded = {
            name: value
            for name, value in foreign.items()
            if value is not None and value.shape[0] and not (self._fresh and self._holds_initial(name, value))
        }
        for name, value in loaded.items():
            check_shape(name, value, self._views[name].shape)
        if loaded or (foreign and not self._fresh):
            self.rows.catch_up()  # by the state that is about to go
            given = {}
        if not self._fresh:
            self._start_anew([name for name in foreign if name not in loaded])
        if loaded:
            self.rows.table.wait()
        for name, value in loaded.items():
            self.rows.load(self._planes[name], value.decode() if isinstance(value, EncodedPlane) else value)
        return given

    def _holds_initial(self, name: str, value: Tensor) -> bool:
        """Tell whether a state is what untouched rows have, as constructors make it (Adagrad): planes hold that already."""
        start = self._specs[name].initial
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
        param = self.param
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        findings = probe_optimizer(optimizer, group, param, self._from_sparse)
        self.add({name: spec for name, spec in findings.items() if name in unknown})
        late = unknown - self._views.keys() - self._shared - findings.shared
        if late:
            raise OptimizerError(
                f"{type(optimizer).__name__} made state {min(late)!r} that it did not make in a trial of {STEPS} steps, so "
                "that what other rows start from is unknown; use an optimizer that makes its state in its first steps"
            )
        self._shared |= unknown - self._views.keys()


def _switches(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """Return which hyperparameters are on (not zero): decay, momentum."""
    return {key: bool(group[key]) for key in optimizer.defaults if isinstance(group.get(key), bool | int | float)}


def check_shape(name: str, value: Tensor, shape: Iterable[int]) -> None:
    """Raise where loaded state does not fit the table."""
    if value.shape != (shape := tuple(shape)):
        raise OptimizerError(
            f"loaded state {name!r} has shape {tuple(value.shape)} but the table needs {shape}; load the state that was saved "
            "with this table"
        )
