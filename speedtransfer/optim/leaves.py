"""Flatten nested optimizer state to {name: tensor}, and write tensors back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (dict, *_SEQUENCES)


# The key in a state of what each feature has of its own (`features`).
APART = "features"


def leaves(state: dict[Any, Any]) -> dict[str, Any]:
    """Return every tensor of `state` by name: "exp_avg", or "buffers.0" for the first of a list.

    Those that features have of their own are left out.
    """
    found: dict[str, Any] = {}
    _collect([item for item in state.items() if item[0] != APART], "", found)
    return found


def _collect(items: Iterable[tuple[Any, Any]], prefix: str, found: dict[str, Any]) -> None:
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if name in found:
                raise ValueError(f"two entries of its state are called {name!r}")
            found[name] = value
        elif isinstance(value, _CONTAINERS):
            _collect(value.items() if isinstance(value, dict) else enumerate(value), f"{name}.", found)


def put(state: dict[Any, Any], values: dict[str, Any]) -> None:
    """Set the tensors of `state` that are named in `values`; containers stay the objects they are, but for tuples.

    A name without a dot that `state` lacks is added; there is no telling the container of any other.
    """
    for name in values:
        if not isinstance(state.get(name), Tensor):
            break
    else:
        # Nothing lies deeper.
        state.update(values)
        return
    names = {str(key) for key in state}
    _fill(state, "", values)
    state.update({name: v for name, v in values.items() if name not in names and "." not in name})


def _fill(container: Any, prefix: str, values: dict[str, Any]) -> Any:
    """Set the tensors within `container`; return what to keep in its place."""
    items = list(container.items() if isinstance(container, dict) else enumerate(container))
    changed = {}
    for key, value in items:
        name = f"{prefix}{key}"
        nested = isinstance(value, _CONTAINERS)
        new = _fill(value, f"{name}.", values) if nested else values.get(name, value)
        if new is not value:
            changed[key] = new
    if isinstance(container, tuple):
        if not changed:
            return container
        entries = [changed.get(key, value) for key, value in items]
        return container._make(entries) if hasattr(container, "_make") else type(container)(entries)
    for key, new in changed.items():
        container[key] = new
    return container


def cloned(value: Any, tensors: bool = True) -> Any:
    """Return a copy of `value` whose containers are its own, and its `tensors` too."""
    if isinstance(value, Tensor):
        return value.detach().clone() if tensors else value
    if isinstance(value, dict):
        return {key: cloned(item, tensors) for key, item in value.items()}
    if isinstance(value, _SEQUENCES):
        entries = [cloned(item, tensors) for item in value]
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    return value
