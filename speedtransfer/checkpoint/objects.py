"""Anything else with a state: schedulers, scalers, samplers, loaders, generators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from speedtransfer.errors import InvalidTypeError, InvalidValueError


def check_object(name: str, value: object) -> None:
    """Raise `InvalidTypeError` unless `value` has a state to save and load."""
    if isinstance(value, torch.Generator | np.random.Generator):
        return
    if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
        raise InvalidTypeError(
            f"{name} is a {type(value).__name__} without state_dict() and load_state_dict(); pass plain values in extra="
        )


def state_of(value: Any) -> Any:
    """Return the state of an object."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.state_dict()


def set_state(value: Any, state: Any) -> None:
    """Give an object the `state` of `state_of`."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.load_state_dict(state)


def set_states(objects: dict[str, Any], states: dict[str, Any], then: Callable[[], None]) -> None:
    """Give every object its state and call `then`. Where one does not take its own, or that fails, put all back and raise."""
    before: dict[str, tuple[Any, dict[str, Any]]] = {}
    try:
        for name, value in objects.items():
            before[name] = copy.deepcopy(state_of(value)), dict(getattr(value, "__dict__", {}))
            try:
                set_state(value, states[name])
            except Exception as error:
                why = " ".join(str(error).split())[:200]
                raise InvalidValueError(
                    f"{name} does not take its state from the checkpoint ({why}); pass one made as that which was saved"
                ) from error
        then()
    except BaseException:
        for name, (state, attributes) in before.items():
            if attributes:  # a scheduler makes attributes of whatever it is given
                vars(objects[name]).clear()
                vars(objects[name]).update(attributes)
            set_state(objects[name], state)
        raise
