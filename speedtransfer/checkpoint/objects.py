"""Save and set the state of anything else: schedulers, scalers, samplers, loaders, and random number generators."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from speedtransfer.checkpoint.plain_data import Keep, encode
from speedtransfer.errors import InvalidValueError

_CUDA_BYTES = 16  # seed and offset of Philox
_MT19937_WORDS = 624


def state_methods(value: Any) -> tuple[Any, Any]:
    """Return what reads the state of an object, and what sets it."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        return lambda: value.bit_generator.state, functools.partial(setattr, value.bit_generator, "state")
    return getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)


@contextlib.contextmanager
def states_set(objects: dict[str, Any], states: dict[str, Any]) -> Iterator[None]:
    """Give every object its state. Where one does not take its own, or the block raises, put all back."""
    before: dict[str, tuple[Any, dict[str, Any]]] = {}
    try:
        for name, value in objects.items():
            get, set_to = state_methods(value)
            before[name] = copy.deepcopy(get()), dict(getattr(value, "__dict__", {}))
            try:
                if isinstance(value, np.random.Generator):
                    _check_numpy_state(states[name])
                set_to(states[name])
            except Exception as error:
                why = " ".join(str(error).split())[:200]
                raise InvalidValueError(
                    f"{name} does not take its state from the checkpoint ({why}); pass one made as that which was saved"
                ) from error
        yield
    except BaseException:
        for name, (state, attributes) in before.items():
            if attributes:  # a scheduler makes attributes of whatever it is given
                vars(objects[name]).clear()
                vars(objects[name]).update(attributes)
            state_methods(objects[name])[1](state)
        raise


def rng_states() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch; CUDA is not started for those that nobody has used."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


def encode_generators(objects: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """Return, as the manifest knows them, the states of `rng_states` and those of the generators among `objects`."""
    own = {n: state_methods(v)[0]() for n, v in objects.items() if isinstance(v, torch.Generator | np.random.Generator)}
    return {
        "rng": encode(rng_states(), "rng", keep),
        "objects": {n: encode(state, n, keep) for n, state in own.items()},
    }


def _check_numpy_state(state: Any) -> None:
    """Raise ValueError where a generator of NumPy would read outside of its numbers: it takes any place among them."""
    kind, inner = state["bit_generator"], state["state"]
    if kind == "MT19937":
        place, count = inner["pos"], _MT19937_WORDS
        if not isinstance(inner["key"], np.ndarray) or inner["key"].shape != (count,):
            raise ValueError("the state of a generator without its numbers")
    elif kind == "Philox":
        place, count = state["buffer_pos"], len(state["buffer"])
    else:
        return
    if type(place) is not int or not 0 <= place <= count:
        raise ValueError(f"the state of a generator at number {str(place)[:20]} of {count}")


def check_rng_states(states: Any) -> None:
    """Raise whatever comes where a generator does not take its state; those of the process stay as they are."""
    if type(states["python"][2]) not in (float, type(None)):
        raise TypeError("the state of Python's generator has no number where one belongs")
    random.Random().setstate(states["python"])
    _check_numpy_state(states["numpy"])
    np.random.RandomState().set_state(states["numpy"])
    torch.Generator().set_state(states["torch"])
    for state in states["cuda"]:
        if state.dtype != torch.uint8 or state.shape != (_CUDA_BYTES,):
            raise ValueError(f"the state of a CUDA generator has {state.numel()} bytes, not {_CUDA_BYTES}")


def set_rng_states(states: dict[str, Any]) -> None:
    """Set the states of `rng_states`; those of CUDA devices that this machine lacks are left out."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number, state in enumerate(states["cuda"][:devices]):
        torch.cuda.set_rng_state(state, number)
