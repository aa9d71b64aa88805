"""The state of an optimizer, in the terms of its `state_dict`, with the planes of tables streamed beside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from speedtransfer.checkpoint.plain_data import decode, encode
from speedtransfer.checkpoint.table_rows import Keeps, Readers, SavedRows, encode_rows
from speedtransfer.checkpoint.together import like
from speedtransfer.errors import InvalidValueError
from speedtransfer.idle import has_rule
from speedtransfer.optim import Handle, find_handle, probe_optimizer
from speedtransfer.optim.hooks import give_state, way_to_step
from speedtransfer.optim.leaves import leaves
from speedtransfer.optim.probe import Findings, PlaneSpec
from speedtransfer.optim.state_dicts import handles_of, has_other_hooks, load_plainly, without_rows


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    """Return the shape of each parameter by group: of a table that of all rows."""

    def shape(param: Tensor) -> list[int]:
        handle = find_handle(param)
        return list(param.shape if handle is None else (handle.num_saved, handle.table.dim))

    return [[shape(param) for param in group["params"]] for group in optimizer.param_groups]


def _owned(optimizer: Optimizer) -> dict[int, Handle]:
    """Return, by number in a state dict, the handles of tables whose planes hold state of this optimizer."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {
        number: handle
        for number, handle in enumerate(map(find_handle, params))
        if handle is not None and handle.state is not None and handle.state.optimizer() is optimizer
    }


@torch.no_grad()
def encode_optimizer(optimizer: Optimizer, name: str, keeps: Keeps) -> dict[str, Any]:
    """Return the optimizer as the manifest knows it, and have its tensors kept."""
    owned, states = _owned(optimizer), []
    for handle in owned.values():
        handle.step.abort(optimizer)
    with without_rows():
        content = dict(optimizer.state_dict())
    for number, entries in content.pop("state").items():
        path, rows, own = f"{name}.state[{number!r}]", {}, owned[number].state if number in owned else None
        planes = own.stored(entries) if own is not None and isinstance(entries, dict) else {}
        if planes:
            entries = {key: value for key, value in entries.items() if key not in planes}
        for key, (plane, spec) in planes.items():
            rows[key] = encode_rows(owned[number], plane, f"{path}[{key!r}]", keeps, spec.tail, spec.dtype)
            # What new rows begin with: that of the first step, whose learning rate may have been another one.
            rows[key] |= {} if spec.initial is None else {"initial": spec.initial}
        states.append([number, {"entries": encode(entries, path, keeps.whole), "rows": rows}])
    rest = encode(content, name, keeps.whole)
    return {"class": type(optimizer).__name__, "params": _shapes(optimizer), "state": states, "rest": rest}


def _tried(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `load_state_dict` would set, by letting a double of the optimizer load it: it may find fault.

    None where a double would not do: the class, or a hook, goes its own way.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict or has_other_hooks(optimizer):
        return None
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.param_groups = [dict(group) for group in optimizer.param_groups]
    double._optimizer_load_state_dict_pre_hooks = OrderedDict()
    double._optimizer_load_state_dict_post_hooks = OrderedDict()
    load_plainly(double, content)
    return {"state": double.state, "param_groups": double.param_groups}


class SavedOptimizer:
    """An optimizer in a checkpoint, checked against the one that it goes into. Making it changes nothing.

    InvalidValueError: the two differ in class, groups, shapes or state. OptimizerError: the optimizer cannot train the rows of
    a table. ValueError, TypeError or KeyError: `node` is malformed.
    """

    def __init__(self, node: dict[str, Any], optimizer: Optimizer, name: str, readers: Readers) -> None:
        self.optimizer = optimizer
        self._check_structure(node, name, readers.whole.rows_come_apart)
        reader = readers.whole
        self._content = decode(node["rest"], reader.read)
        groups = self._content["param_groups"]
        counts = [len(group["params"]) for group in groups]
        numbers = [number for group in groups for number in group["params"]]
        if counts != [len(shapes) for shapes in node["params"]] or not all(type(n) is int for n in numbers):
            raise ValueError(f"the groups of {name} are not as many as its parameters")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"{name} has a parameter twice")
        # Each parameter with its group as it will be.
        pairs = zip(optimizer.param_groups, groups, strict=True)
        owners = [(p, {**ours, **saved, "params": ours["params"]}) for ours, saved in pairs for p in ours["params"]]
        of_number = dict(zip(numbers, owners, strict=True))
        # Of a table whose rows belong to ids the checkpoint may have another number of rows.
        shapes = [shape for group in node["params"] for shape in group]
        lengths = {number: shape[0] if shape else 0 for number, shape in zip(numbers, shapes, strict=True)}
        self._content["state"] = state = {}
        self._planes: list[tuple[Handle, dict[str, Any], Findings, dict[str, SavedRows]]] = []
        for number, saved in node["state"]:
            if number in state or not isinstance(number, int | str):
                raise ValueError(f"the state of {name} is there twice")
            param, group = of_number.get(number, (None, {}))
            handle = None if param is None else find_handle(param)
            entries, rows, planes = saved["entries"], saved["rows"], dict[str, SavedRows]()
            if handle is not None and (rows or entries):
                # With the hyperparameters that come with it.
                specs = probe_optimizer(optimizer, group, handle.param, handle.sparse)
                planes = _planes_of(handle, lengths[number], specs, entries, rows, f"{name}.state[{number}]", readers)
                if planes:
                    way_to_step(handle, optimizer, group, specs)  # which may refuse
                    self._planes.append((handle, group, specs, planes))
            if isinstance(entries, dict) and "$" not in entries:
                entries = {key: value for key, value in entries.items() if key not in planes}
            state[number] = decode(entries, reader.read)
            if param is not None and type(state[number]) is not dict:
                raise TypeError(f"the state of {name} has a parameter without names of state")
            state[number].update({k: SavedRows(v, readers).values() for k, v in rows.items() if k not in planes})
            if param is not None:
                _check_state(optimizer, param, state[number], f"{name}.state[{number}]")
            state[number] = {k: like(v, param) if isinstance(v, Tensor) else v for k, v in state[number].items()}
        # Of the tables whose state it goes into.
        self.handles = [handle for handle, *_ in self._planes]
        self._ready = _tried(optimizer, self._content)

    def _check_structure(self, node: dict[str, Any], name: str, any_length: bool) -> None:
        kind, ours, theirs = type(self.optimizer).__name__, _shapes(self.optimizer), node["params"]
        if node["class"] != kind:
            raise InvalidValueError(
                f"{name} is {kind} but the checkpoint holds that of {str(node['class'])[:40]}; pass an optimizer of that class"
            )
        if len(theirs) != len(ours):
            raise InvalidValueError(
                f"{name} has {len(ours)} parameter groups but the checkpoint has {len(theirs)}; make the groups it was saved "
                "with"
            )
        for number, group in enumerate(self.optimizer.param_groups):
            for shape, saved, param in zip(ours[number], theirs[number], group["params"], strict=False):
                handle = find_handle(param)
                of_any = handle is not None and (handle.id_space.come_and_go or any_length)
                if of_any and len(saved) == len(shape):
                    # Its ids say which rows those are, or a delta how many.
                    shape[0] = saved[0]
            if theirs[number] != ours[number]:
                raise InvalidValueError(
                    f"group {number} of {name} has parameters of shapes {str(ours[number])[:200]} but the checkpoint has "
                    f"{str(theirs[number])[:200]}; pass the same parameters in the same order"
                )

    def allocate(self) -> None:
        """Make the planes that tables lack. May run out of memory, and is therefore called before anything is loaded."""
        for handle, group, specs, planes in self._planes:
            state = handle.state
            if state is None or state.optimizer() is not self.optimizer or not state.matches(specs):
                state = give_state(handle, self.optimizer, group, specs)
            state.add({name: specs[name] for name in planes})  # also those that an optimizer makes late

    def load(self, advance: Callable[[int], None]) -> None:
        """Load the state, the planes of tables in chunks."""
        optimizer = self.optimizer
        for owned in _owned(optimizer).values():
            owned.step.abort(optimizer)
        if self._ready is None:
            with without_rows():
                optimizer.load_state_dict(self._content)
        else:
            optimizer.__setstate__(self._ready)
        for handle, _ in handles_of(optimizer):
            handle.lost.pop(optimizer, None)  # the state is whole again
        for handle, _, _, planes in self._planes:
            assert handle.state is not None
            handle.state.adopt(optimizer, planes)
            for key, (plane, _) in handle.state.stored(optimizer.state[handle.param]).items():
                planes[key].copy_into(handle, plane, advance)


def _check_state(optimizer: Optimizer, param: Tensor, state: dict[str, Any], path: str) -> None:
    """Raise `InvalidValueError` where a tensor has another shape than the optimizer gives it: fused steps do not look.

    What the optimizer has of the parameter says which, and otherwise, for those of torch that update values one by one, that
    they have one of the shape of the parameter, and single numbers.
    """
    handle, current = find_handle(param), optimizer.state.get(param, {})
    shape = tuple(param.shape) if handle is None else (handle.num_saved, handle.table.dim)
    by_value = has_rule(optimizer) or type(optimizer) is SparseAdam
    for key, value in leaves(state).items():
        if not isinstance(value, Tensor):
            continue
        found, ours = tuple(value.shape), leaves(current).get(key)
        if handle is None and isinstance(ours, Tensor):
            wanted = [tuple(ours.shape)]
        elif by_value:
            # Of a table also what a constructor made of no rows.
            wanted = [(), shape, *([(0, *shape[1:])] if handle is not None else [])]
        else:
            continue
        if found not in wanted and not (value.numel() == 1 and isinstance(ours, Tensor) and ours.numel() == 1):
            raise InvalidValueError(
                f"{path}[{key!r}] in the checkpoint is {found} but must be {' or '.join(map(str, wanted))}; load what was "
                "saved with these parameters"
            )


def _planes_of(
    handle: Handle,
    num_rows: int,
    specs: Findings,
    entries: dict[str, Any],
    rows: dict[str, Any],
    path: str,
    readers: Readers,
) -> dict[str, SavedRows]:
    """Return the rows of each plane of state that is saved."""
    planes = {}
    for key in dict.fromkeys([*specs, *rows]):
        node = rows.get(key, entries.get(key))
        if node is None:
            continue
        saved = SavedRows(node, readers)
        # Not among them where it is left from other hyperparameters (amsgrad was switched off).
        spec = specs.setdefault(key, PlaneSpec(saved.shape[1:], saved.dtype, 0.0))
        if saved.shape[:1] == (0,) and handle.num_rows:
            continue  # made in a constructor, for no rows: there is nothing to copy
        shape = (num_rows, *spec.tail)
        if saved.shape != shape or saved.dtype.is_floating_point != spec.dtype.is_floating_point:
            raise InvalidValueError(
                f"{path}[{key!r}] in the checkpoint is {saved.shape} {saved.dtype} but the table needs {shape} "
                f"{spec.dtype}; load what was saved with this table"
            )
        if "initial" in node:
            specs[key] = replace(spec, initial=float(node["initial"]))
        planes[key] = saved
    return planes
