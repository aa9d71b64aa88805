"""Give an optimizer the state of the active rows for its step, and write it to the planes of the table afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.idle import Lag, Rule
from speedtransfer.optim.leaves import cloned, leaves, put
from speedtransfer.optim.probe import OWN, PlaneSpec
from speedtransfer.optim.state_planes import StatePlanes
from speedtransfer.tables import NOTHING, Known

_NUMBERS = (int, float)


class _Step(NamedTuple):
    """A running step: the frame that runs it and its thread, `optimizer.state`, and whether that had no state of the rows.

    `before` are the numbers there that all rows share, as they were: counts of steps, which a step changes in place.
    """

    frame: FrameType | None
    thread: int
    mapping: Any
    first: bool
    before: dict[str, Any]


class MadeStep(NamedTuple):
    """A step that an optimizer has made, to be written: what `RowState.store` takes, any number of times.

    Attributes
    ----------
    ids, known : Tensor or None, Known
        ``(n,)``, the rows; None: all, which were updated where they are stored.
    values : dict of str to Tensor
        ``(n, *tail)``, by plane.
    step : object
        What it does to idle rows; None: nothing.
    mark : object
        What says whether that was recorded.
    writes : int
        How many writes of the rows there were before.
    state : dict
        The optimizer's state of the rows.
    """

    ids: Tensor | None
    values: dict[str, Tensor]
    step: Any
    mark: Any
    writes: int
    state: dict[str, Any]
    known: Known


class RowState(StatePlanes):
    """The state of one optimizer for the rows of one table.

    Between steps ``optimizer.state[param]`` holds the whole planes as views, so ``optimizer.state_dict()`` is that of a dense
    optimizer; in a step it holds the state of the active rows. What all rows share (`step`, ...) stays as it is.

    Parameters
    ----------
    handle : Handle
        Of the table; has the state for as long as it is that of the rows.
    optimizer : Optimizer
    specs : dict of str to PlaneSpec
        The state per row, by name.
    rule : Rule, optional
        What its steps do to idle rows, which catch up later.
    sparse : bool
        Whether steps get a sparse gradient.
    """

    def __init__(
        self, handle: Any, optimizer: Optimizer, specs: dict[str, PlaneSpec], rule: Rule | None, sparse: bool
    ) -> None:
        super().__init__(handle, optimizer)
        self.sparse, rows = sparse, self.rows
        # Set from `load` to `store`; still set afterwards if the step failed.
        self.running: _Step | None = None
        # Whether the optimizer has made that step.
        self.has_ended = False
        # Hyperparameters with which the optimizer leaves idle rows alone.
        self._assumed: dict[str, Any] | None = None
        self.add(
            {name: spec for name, spec in specs.items() if not spec.late},
            # In the records of the state, rather than on pages of its own, where every step moves idle rows.
            with_last_steps=rule is not None and bool(rule.factors) and rows.table.layout == "rows",
        )
        if rule is not None:
            rows.enable_catch_up(Lag(rule), handle)

    def drop(self) -> None:
        """Remove the planes and the views of them that the optimizer holds."""
        self._remove(list(self._planes))
        self.rows.disable_catch_up()
        optimizer, param = self.optimizer(), self._param()
        if optimizer is not None and param is not None:
            optimizer.state.pop(param, None)
        self.running = None

    def forget(self) -> None:
        """Remove the planes of an optimizer that has no state of the rows any more; its next step makes them anew."""
        if self._views:
            self.rows.catch_up()
            self._remove(list(self._views))
            self._specs.clear()
        self._fresh = True

    def adopt(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        """Make planes that a checkpoint has filled the state `names` of the optimizer."""
        put(optimizer.state[self.param], {name: self._views[name] for name in names})
        self.running, self._fresh = None, False

    def between_steps(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the optimizer's `state` of the rows, with whole planes also while another thread steps."""
        with self.rows.lock:
            running = self.running
            if running is not None and running.first:
                return {}
            copied: dict[str, Any] = cloned(state, tensors=False)
            if running is not None:
                put(copied, self._views)
            return copied

    def take_loaded(self, optimizer: Optimizer) -> None:
        """Copy loaded state in the optimizer into the planes."""
        state = optimizer.state.get(self.param)
        if state:
            found = leaves(state)
            if any(name in found and found[name] is not view for name, view in self._views.items()):
                self._adopt(found, optimizer, {})
                put(state, self._views)
                self._fresh = False

    def has_taken(self, state: dict[str, Any]) -> bool:
        """Tell whether the planes have what the optimizer's `state` of the rows says."""
        return self._has_views(leaves(state))

    # --- hyperparameters that idle rows depend on ---------------------------------------------------------------------

    def assume(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Note that the optimizer leaves idle rows alone with the hyperparameters `group`."""
        self._assumed = _switches(optimizer, group)

    def is_assumed_otherwise(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """Tell whether a hyperparameter was switched on or off since `assume`."""
        return self._assumed is not None and self._assumed != _switches(optimizer, group)

    def has_stepped(self) -> bool:
        """Tell whether there was a step."""
        return not self._fresh

    # --- a step -------------------------------------------------------------------------------------------------------

    def load(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        frame: FrameType | None,
        ids: Tensor | None,
        given: dict[str, Tensor],
        known: Known,
    ) -> None:
        """Put the state of the active rows into `optimizer.state`.

        Parameters
        ----------
        optimizer : Optimizer
        group : dict
            The group of the parameter.
        frame : FrameType
            The frame of the function that runs the step.
        ids, known : Tensor or None, Known
            ``(n,)``, the active rows; None: all, and the state is the planes themselves.
        given : dict of str to Tensor
            State of the active rows by plane, each ``(n, *tail)``, that was read with their weights.
        """
        state, active, before = optimizer.state.get(self.param), dict[str, Tensor](), dict[str, Any]()
        if self.rows.lag is not None:
            self.rows.lag.begin(group, state or {}, self.rows.catch_up)
        if not state:
            # The optimizer will make its first state. If there were steps before, its state was cleared, or the first failed.
            if self._views and not self._fresh:
                self.rows.catch_up()
                self._begin_again(optimizer, group)
        else:
            if not self._is_own(state):
                found = leaves(state)
                if found.keys() != self._views.keys() | self._shared or not self._has_views(found):
                    given = self._adopt(found, optimizer, given)
            views = self._views
            if views and ids is not None:
                planes = self._planes
                if not given.keys() >= set(planes.values()):
                    given = self.rows.read(ids, list(planes.values()), known=known)
                active = {name: given[plane] for name, plane in planes.items()}
                bools = [name for name in active if self._specs[name].dtype == torch.bool]
                active |= {name: active[name].view(torch.bool) for name in bools}
            elif views:
                active = {name: view.decode() for name, view in views.items()}
            before = self._numbers_of(state)
        # From here on what interrupts the step is undone.
        self.has_ended = False
        self.running = _Step(frame, threading.get_ident(), optimizer.state, not state, before)
        if state and active:
            put(state, active)

    def made(self, optimizer: Optimizer, group: dict[str, Any], ids: Tensor | None, known: Known) -> MadeStep:
        """Return the step that the optimizer has made of the active rows `ids` (n,); None: of all, as in `load`."""
        param, rows = self.param, self.rows
        state = optimizer.state.get(param, {})
        found = leaves(state)
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer)
        values = {"weight": param.data}
        count = values["weight"].shape[0]
        for name, plane in self._planes.items():
            if name in found:
                part, spec = found[name], self._specs[name]
                fits = part.shape == (count, *spec.tail) and part.dtype == spec.dtype != torch.bool
                values[plane] = part if fits else self._of_plane(name, part, count)
        lag = rows.lag
        step = None if lag is None else lag.step_made(optimizer, group, state)
        if ids is None and not all(v.data_ptr() == rows.table.stored(n).data_ptr() for n, v in values.items()):
            # The optimizer has replaced a tensor.
            ids, known = torch.arange(count, device=param.device), NOTHING
        return MadeStep(ids, values, step, None if lag is None else lag.mark, rows._count, state, known)

    def store(self, made: MadeStep) -> None:
        """Write the rows of a step and their state to the table."""
        if made.ids is not None:
            self.rows.write(made.ids, made.values, made.step, made.mark, made.writes, made.known)
        else:
            self.rows.stepped_in_place(made.step, made.mark)
        if made.state:
            put(made.state, self._views)
        self._fresh = False

    def _has_views(self, found: dict[str, Any]) -> bool:
        return all(found.get(name) is view for name, view in self._views.items())

    def _is_own(self, state: dict[str, Any]) -> bool:
        """Tell whether the optimizer's `state` is as the last step has left it, where that takes no more than a look."""
        views, shared, count = self._views, self._shared, 0
        for name, value in state.items():
            if name in views:
                if value is not views[name]:
                    return False
                count += 1
            elif name in shared and isinstance(value, Tensor):
                count += 1
            elif value is not None and not isinstance(value, _NUMBERS):
                return False
        return count == len(views) + len(shared)

    def _numbers_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers in `state` that all rows share, but for those on a device."""
        found = dict[str, Any]()
        for name, value in state.items():
            if isinstance(value, _NUMBERS):
                found[name] = value
            elif name not in self._views and isinstance(value, Tensor) and value.dim() == 0 and value.is_cpu:
                found[name] = value.item()
        return found

    def begin_elsewhere(self, optimizer: Optimizer, group: dict[str, Any], frame: FrameType | None) -> None:
        """Begin a step that neither needs the state in `optimizer` nor `store`."""
        state = optimizer.state.get(self.param, {})
        if self.rows.lag is not None:
            self.rows.lag.begin(group, state, self.rows.catch_up)
        self.has_ended = False
        self.running = _Step(frame, threading.get_ident(), optimizer.state, False, self._numbers_of(state))

    def end_elsewhere(self) -> None:
        """End such a step, which has been made."""
        self.running = None

    def _of_plane(self, name: str, values: Tensor, count: int) -> Tensor:
        """Return the state of `count` active rows, ``(count, *tail)``, in the dtype of its plane; raise if it does not fit."""
        spec = self._specs[name]
        if values.shape != (count, *spec.tail) or values.dtype != spec.dtype:
            raise OptimizerError(
                f"state {name!r} became {tuple(values.shape)} {values.dtype} for {count} rows but its plane holds "
                f"{spec.tail} {spec.dtype} a row; use an optimizer whose state keeps its shape"
            )
        return values.view(torch.uint8) if spec.dtype == torch.bool else values

    def stepping(self) -> bool:
        """Tell whether the step that `load` has begun still runs: a step that fails may call no hook."""
        running = self.running
        if running is None or running.frame is None:
            return False
        if running.thread != threading.get_ident():
            return self.stepping_elsewhere()
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not running.frame:
            frame = frame.f_back
        return frame is not None

    def stepping_elsewhere(self) -> bool:
        """Tell whether another thread has begun a step that may still run: as long as that thread lives."""
        running = self.running
        if running is None or running.frame is None or running.thread == threading.get_ident():
            return False
        return running.thread in sys._current_frames()

    def steps_in_place(self) -> bool:
        """Tell whether the planes themselves are the optimizer's state, so that a step of all rows needs no copies."""
        optimizer = self.optimizer()
        state = None if optimizer is None else optimizer.state.get(self.param)
        if not state or self.sparse or self._fresh:
            return False
        found, specs = leaves(state), self._specs
        # Contiguous: fused optimizers of torch on the CPU do not look at strides. In the dtype that the optimizer computes in.
        return all(
            view.has_memory and view.is_contiguous() and view.dtype == specs[name].dtype and found.get(name) is view
            for name, view in self._views.items()
        )

    def planes_in_use(self, state: dict[str, Any]) -> dict[str, str] | None:
        """Return the plane of each entry by name if the optimizer's `state` is that of these planes; None before a step."""
        stored = self.stored(state)
        if self._fresh or stored.keys() != self._views.keys():
            return None
        return {name: plane for name, (plane, _) in stored.items()}

    def recover(self, optimizer: Optimizer, interrupted: bool) -> None:
        """Restore the optimizer's state after a step that failed.

        A step in which the optimizer itself raised stays counted, as in torch; one that was `interrupted` does not.
        """
        running, state = self.running, optimizer.state.get(self.param)
        if running and running.first:
            # What the next step begins with may be something else.
            self._fresh = False
        # load_state_dict makes another `optimizer.state`.
        if running and state and optimizer.state is running.mapping:
            if running.first:
                # The step made it for the active rows only.
                del optimizer.state[self.param]
            else:
                for name in leaves(state).keys() - self._views.keys() - self._shared:
                    # Made by the step, for the active rows only.
                    state.pop(name, None)
                put(state, self._views)
                before = running.before if interrupted or self.has_ended else {}
                for name, value in before.items():
                    if isinstance(state[name], Tensor):
                        state[name].fill_(value)
                    else:
                        state[name] = value
        self.running = None


def _switches(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return which hyperparameters and attributes are not zero (weight decay, momentum), and those of the group in words."""
    attributes = {key: bool(value) for key, value in vars(optimizer).items() if isinstance(value, bool | int | float)}
    return attributes | {key: _switch(value) for key, value in group.items() if key not in OWN}


def _switch(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_switch, value))
    return bool(value) if isinstance(value, bool | int | float) else value if isinstance(value, str) else None
