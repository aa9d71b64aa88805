"""Run a function in a child of `os.fork` of this process, and return what it returns there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_child(function: Callable[[], Any]) -> Any:
    """Return what `function` returns in a child of fork; raise what it raises there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # torch's own threads do not survive a fork.
        torch.set_num_threads(1)
        try:
            try:
                result = function(), None
            except BaseException as error:
                result = None, error
            with os.fdopen(writing, "wb") as file:
                pickle.dump(result, file)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        result, error = pickle.load(file)
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return result


def plain(value: Any) -> Any:
    """Return arrays for tensors, which a process cannot pass on as they are."""
    if isinstance(value, Tensor):
        return value.detach().float().numpy().copy()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key != "step"}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value
