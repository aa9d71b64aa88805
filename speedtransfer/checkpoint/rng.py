"""The states of the random number generators of a process: Python's, NumPy's, torch's on the CPU and every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_CUDA_BYTES = 16  # seed and offset of Philox


def rng_states() -> dict[str, Any]:
    """Return the states as plain data. CUDA is not started for it: generators that nobody has used have none."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


def check_rng_states(states: Any) -> None:
    """Raise whatever comes where a generator does not take its state; those of the process stay as they are."""
    random.Random().setstate(states["python"])
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
