"""Hold optimizer state per row in planes of a table; load state into them, and add planes for state that appears later."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, KeysView
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.errors import OptimizerError
from speedtransfer.optim.leaves import leaves, put
from speedtransfer.optim.plane_view import PlaneView
from speedtransfer.optim.probe import STEPS, PlaneSpec, probe_optimizer
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.rows import LAST_STEPS
from speedtransfer.tables import row_chunks


class StatePlanes:
    """The part of :class:`RowState` that holds the planes."""

    def __init__(self, handle: Any, optimizer: Optimizer) -> None:
        self.rows, self._from_sparse = handle.rows, handle.sparse
        # Weak, as the handle, and with it the parameter, holds this object.
        self._handle: Callable[[], Any] = weakref.ref(handle)
        self.optimizer, self._param = weakref.ref(optimizer), weakref.ref(handle.param)
        # By name of the state: its spec, the name of its plane, and the view of the whole plane.
        self._specs: dict[str, PlaneSpec] = {}
        self._planes: dict[str, str] = {}
        self._views: dict[str, Any] = {}
        # Names of tensors of state that are not per row.
        self._shared: set[str] = set()
        # Whether no row has been stored yet, nor has a first step failed, after which the planes are made anew.
        self._fresh = True

    @property
    def stored_names(self) -> KeysView[str]:
        """The names of the state that planes hold."""
        return self._views.keys()

    def learned(self, found: dict[str, Any], optimizer: Optimizer) -> dict[str, Tensor]:
        """Return those of the tensors of new state that are of rows."""
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer)
        return {name: value for name, value in found.items() if name in self._views}

    def initial_rows(self, name: str, weights: Tensor) -> Tensor:
        """Return the initial state, ``(n, *tail)``, of rows with the weights `weights` (n, dim)."""
        spec = self._specs[name]
        if spec.initial is None:
            return weights.clone()
        return torch.full((len(weights), *spec.tail), spec.initial, dtype=spec.dtype, device=weights.device)

    def begin_rows(self, optimizer: Optimizer, group: dict[str, Any], rows: Tensor) -> None:
        """Give `rows` (n,), none of which has had a step, what state begins with by the hyperparameters of now."""
        if self._fresh:
            return
        found = probe_optimizer(optimizer, group, self.param, self._from_sparse)
        for name, spec in found.items():
            known = self._specs.get(name)
            if known is not None and spec.initial != known.initial and not spec.late:
                self._specs[name] = spec
                self._begin_anew(name, rows)

    @property
    def param(self) -> nn.Parameter:
        """The parameter of the rows."""
        param = self._param()
        assert param is not None
        return param

    def add(self, specs: dict[str, PlaneSpec], with_last_steps: bool = False) -> None:
        """Add the planes of `specs` that are missing, and that of the last steps: all or, if there is no room, none."""
        specs = {name: spec for name, spec in specs.items() if name not in self._views}
        planes = {name: "state.weight" if name == "weight" else name for name in specs}
        # Tables have no bool.
        dtypes = {name: torch.uint8 if spec.dtype == torch.bool else spec.dtype for name, spec in specs.items()}
        self._drop_left(planes)
        added = {planes[n]: (spec.tail, dtypes[n], spec.initial) for n, spec in specs.items()}
        try:
            self.rows.add_together(added | (LAST_STEPS if with_last_steps and added else {}))
            if added:
                # Others may be filling them still.
                self.rows.meet()
            self._specs.update(specs)
            self._planes.update(planes)
            for name in planes:
                self._views[name] = self._shown(name)
        except BaseException:
            self._drop_left(planes)
            raise

    def _shown(self, name: str) -> PlaneView:
        """Return a view of a plane, by the name of the state."""
        return PlaneView(self.rows, self._planes[name], torch.bool if self._specs[name].dtype == torch.bool else None)

    def follow_move(self) -> None:
        """Show the planes where they are now: those on a device move with the table."""
        optimizer, param = self.optimizer(), self._param()
        state = {} if optimizer is None or param is None else optimizer.state.get(param, {})
        before, self._views = self._views, {name: self._shown(name) for name in self._views}
        put(state, {name: self._views[name] for name, value in leaves(state).items() if value is before.get(name)})
        for view in before.values():
            view.drop()

    def _drop_left(self, planes: dict[str, str]) -> None:
        """Drop those of `planes`, by the name of the state, that were added, or dropped, in part only."""
        for name, plane in planes.items():
            self._planes.pop(name, None)
            view = self._views.pop(name, None)
            if view is not None:
                view.drop()
            if self.rows.has(plane):
                self.rows.drop(plane)

    def _remove(self, names: Iterable[str]) -> None:
        self._drop_left({name: self._planes[name] for name in names})

    def stored(self, state: dict[str, Any]) -> dict[str, tuple[str, PlaneSpec]]:
        """Return, for the entries of the optimizer's `state` that are planes of the table, name and spec of the plane."""
        names = [name for name, view in self._views.items() if state.get(name) is view]
        return {name: (self._planes[name], self._specs[name]) for name in names}

    def matches(self, specs: dict[str, PlaneSpec]) -> bool:
        """Tell whether the planes have the names, shapes, dtypes and initial values of `specs`."""
        own = self._specs
        return own.keys() == specs.keys() and all(
            (own[n].tail, own[n].dtype, own[n].initial) == (spec.tail, spec.dtype, spec.initial)
            for n, spec in specs.items()
        )

    # --- loaded state -------------------------------------------------------------------------------------------------

    def _reset(self, names: list[str]) -> None:
        """Fill planes with their initial values."""
        self._remove(names)
        self.add({name: self._specs[name] for name in names})

    def _begin_again(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Have the planes that an optimizer of such a `group` begins with: its hyperparameters may have changed."""
        specs = probe_optimizer(optimizer, group, self.param, self._from_sparse)
        self._remove(list(self._views))
        self._specs.clear()
        self.add({name: spec for name, spec in specs.items() if not spec.late})

    def _adopt(self, found: dict[str, Any], optimizer: Optimizer, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy loaded state into the planes; return `given`, or nothing if it is out of date."""
        # To take rows of a gradient that somebody has put there would make that of this step dense, under way.
        found = {name: value.dense() if isinstance(value, RowGradient) else value for name, value in found.items()}
        if found.keys() - self._views.keys() - self._shared:
            self._learn(found, optimizer, loaded=True)
        missing = [name for name in self._views if name not in found]
        if missing:
            # The optimizer makes them anew, or raises, as it does in training a dense parameter.
            self.rows.catch_up()
            self._remove(missing)
            for name in missing:
                del self._specs[name]
            given = {}
        foreign = {name: found[name] for name, view in self._views.items() if found[name] is not view}
        loaded = {
            name: value
            for name, value in foreign.items()
            if not value.shape or (value.shape[0] and not (self._fresh and self._holds_initial(name, value)))
        }
        placement, fresh = self.rows.placement, self._handle().id_space.fresh_rows()
        for name, value in loaded.items():
            tail = self._views[name].shape[1:]
            if value.shape and value.shape[0] in self.rows.grown_from and value.shape[1:] == tail:
                # Of before the table got more rows, which begin anew.
                loaded[name] = self._longer(name, value)
                continue
            check_shape(name, value, (self.rows.num_loadable, *tail))
        if loaded or (foreign and not self._fresh):
            # With the state that is about to be replaced.
            self.rows.catch_up()
            given = {}
        if not self._fresh:
            in_sight = {name for name, value in loaded.items() if self._is_in_sight(name, value)}
            self._reset([n for n in foreign if n not in loaded or placement is not None or n in in_sight])
            for name in loaded:
                # Who has one of before the load does not see what was loaded.
                if not self._views[name].has_memory and _is_held(self._views, name):
                    self._views[name].drop()
                    self._views[name] = self._shown(name)
        if loaded:
            self.rows.table.wait()
        for name, value in loaded.items():
            values, plane = value.decode() if isinstance(value, PlaneView) else value, self._planes[name]
            if placement is None:
                self.rows.load(plane, values)
            else:
                self.rows.place(plane, values, placement)
            if fresh is not None and len(fresh):
                self._begin_anew(name, fresh)
        if loaded:
            # Others may be copying them still.
            self.rows.meet()
        return given

    def _longer(self, name: str, value: Any) -> Tensor:
        """Return state of the first rows, and what the others begin with."""
        values: Tensor = value.decode() if isinstance(value, PlaneView) else value
        more = torch.arange(len(values), self.rows.num_loadable, device=self.rows.table.device)
        weights = self.rows.read(more)["weight"]
        return torch.cat([values, self.initial_rows(name, weights).to(values)])

    def _is_in_sight(self, name: str, value: Tensor) -> bool:
        """Tell whether somebody has a view of a plane, say a state dict, which is to keep the state before `value`."""
        table, plane = self.rows.table, self._planes[name]
        # Memory that processes share is made by all of them together.
        if not self.rows.is_viewable(plane) or table.memory == "shared" or not has_memory(value):
            return False
        # The state of before, which another parameter has by now perhaps.
        if self._views[name].has_memory and _is_held(self._views, name):
            return True
        stored = table.stored(plane)
        is_it = value.layout == torch.strided and value.data_ptr() == stored.data_ptr()
        return not is_it and table.open_views.exist([stored])

    def _begin_anew(self, name: str, ids: Tensor) -> None:
        """Give the rows `ids` (n,) their initial state."""
        spec = self._specs[name]
        ids = ids.to(self.rows.table.device)
        if spec.initial is None:
            values = self.rows.read(ids)["weight"]
        else:
            values = torch.full((len(ids), *spec.tail), spec.initial, dtype=spec.dtype, device=ids.device)
        self.rows.put(self._planes[name], ids, values)

    def _holds_initial(self, name: str, value: Tensor) -> bool:
        """Tell whether a state is its initial value everywhere (Adagrad's constructor makes it): planes hold that already."""
        initial = self._specs[name].initial
        if initial is None or not has_memory(value):
            return False
        # One value expanded.
        if 0 in value.stride():
            return bool((value[:1] == initial).all())
        row_bytes = value[:1].numel() * value.element_size()
        return all(bool((value[rows] == initial).all()) for rows in row_chunks(len(value), row_bytes))

    def _learn(self, found: dict[str, Tensor], optimizer: Optimizer, loaded: bool = False) -> None:
        """Add planes for new state: the optimizer makes it late, a hyperparameter has changed, or it was `loaded`."""
        unknown = {name for name in found if name not in self._views and name not in self._shared}
        self._shared |= {name for name in unknown if not found[name].shape}
        if unknown <= self._shared:
            return
        param = self.param
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        findings = probe_optimizer(optimizer, group, param, self._from_sparse)
        self.add({name: spec for name, spec in findings.items() if name in unknown})
        late = unknown - self._views.keys() - self._shared - findings.shared
        if loaded:
            # Of other hyperparameters (amsgrad was switched off) or another library: kept with the rows, as in torch.
            kept = [name for name in late if found[name].shape[0] == self.rows.num_loadable]
            self.add({name: PlaneSpec(tuple(found[name].shape[1:]), found[name].dtype, 0.0) for name in kept})
        elif late:
            raise OptimizerError(
                f"{type(optimizer).__name__} made state {min(late)!r} that it did not make in a trial of {STEPS} steps, so "
                "that what other rows start from is unknown; use an optimizer that makes its state in its first steps"
            )
        self._shared |= unknown - self._views.keys()


def has_memory(value: Tensor) -> bool:
    """Tell whether a tensor's memory has its values."""
    return value.has_memory if isinstance(value, PlaneView) else True


def _is_held(views: dict[str, Any], name: str) -> bool:
    """Tell whether anybody else has the view `name`: it counts once in `views`, and once as an argument."""
    return sys.getrefcount(views[name]) > 2


def check_shape(name: str, value: Tensor, shape: Iterable[int]) -> None:
    """Raise unless loaded state has the shape that the table needs."""
    if value.shape != (shape := tuple(shape)):
        raise OptimizerError(
            f"loaded state {name!r} has shape {tuple(value.shape)} but the table needs {shape}; load the state that was saved "
            "with this table"
        )
