"""Save a training run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.folder import check_target, commit, free_bytes, new_files
from speedtransfer.checkpoint.model import encode_model
from speedtransfer.checkpoint.objects import rng_states, state_methods
from speedtransfer.checkpoint.optimizer import encode_optimizer
from speedtransfer.checkpoint.plain_data import encode
from speedtransfer.checkpoint.tensors import TensorPlan
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, format_bytes
from speedtransfer.progress import ByteProgress


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    progress: bool | None = None,
    **objects: Any,
) -> None:
    """Save all that training needs to go on as if it had never stopped, in place of what `path` held before.

    Tables are streamed in chunks of 16 MB. The checkpoint at `path` is replaced in one go at the end: whatever happens
    before, the old one stays whole, so the disk must have room for both. No pickle: tensors go to safetensors files, the
    rest to `manifest.json`, with SHA-256 checksums. The states of the random number generators of Python, NumPy and torch are
    saved too.

    Parameters
    ----------
    path : path-like
        A folder: new, empty, or of an earlier checkpoint.
    model : nn.Module
        Every entry of its state dict, the rows of tables among them.
    optimizer : torch.optim.Optimizer, optional
        Its hyperparameters and state, as in its state dict.
    extra : object
        Plain data that `load_checkpoint` returns: numbers, strings, bytes, None, tensors, arrays, and lists, tuples, sets and
        dicts of these.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.
    **objects : object
        Anything with ``state_dict()`` and ``load_state_dict()`` (``scheduler=``, ``scaler=``, ``sampler=``, more optimizers),
        or a generator of torch or NumPy. None is as if it was not there.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        Something has no state, or one that is no plain data; `path` is a file or a folder of something else. Nothing has
        been written.
    StorageError
        No room, or no permission. What was there before is as it was.
    """
    path, optimizers, others = check_arguments(path, model, optimizer, objects)
    check_target(path)
    plans = {role: TensorPlan() for role in manifest.ROLES}
    keep = plans["objects"].keep
    content = {
        "versions": manifest.VERSIONS,
        "model": encode_model(model, plans["model"].keep),
        "optimizers": {n: encode_optimizer(o, n, plans["optimizer"].keep) for n, o in optimizers.items()},
        "rng": encode(rng_states(), "rng", keep),
        "objects": {n: encode(state_methods(v)[0](), n, keep) for n, v in others.items()},
        "extra": encode(extra, "extra", keep),
    }
    need = sum(plan.num_bytes for plan in plans.values())
    need += len(manifest.to_bytes(content)) + sum(200 * len(plan.tensors) + 1000 for plan in plans.values())
    free = free_bytes(path)
    if need > free:
        raise StorageError(
            f"a checkpoint at {str(path)!r} needs {format_bytes(need)} but {format_bytes(free)} are free; free some space or "
            "choose another path (an older checkpoint stays until the new one is whole)"
        )
    with new_files(path, plans, need) as made, ByteProgress(f"saving {path.name}", need, progress) as bar:
        files = {r: {"name": Path(made[r].name).name, **plan.write(made[r], bar.advance)} for r, plan in plans.items()}
        commit(path, manifest.to_bytes({"files": files, **content}))


def check_arguments(
    path: str | os.PathLike[str], model: object, optimizer: object, objects: dict[str, Any]
) -> tuple[Path, dict[str, Optimizer], dict[str, Any]]:
    """Return the path, the optimizers and the other objects by name, all known to be of a kind that can be saved."""
    try:
        path = Path(path)
    except TypeError:
        raise InvalidTypeError(f"path is {path!r} but must be the path of a folder; pass a string or Path") from None
    if "\0" in str(path):
        raise InvalidValueError(f"path {str(path)!r} has a NUL, which no path has; remove it")
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"model is a {type(model).__name__} but must be a torch.nn.Module; pass the model itself"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(
            f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer; pass others by name: scaler=..."
        )
    given = {name: value for name, value in {"optimizer": optimizer, **objects}.items() if value is not None}
    optimizers = {name: value for name, value in given.items() if isinstance(value, Optimizer)}
    others = {name: value for name, value in given.items() if name not in optimizers}
    for name, value in others.items():
        if isinstance(value, type) or not all(map(callable, state_methods(value))):
            raise InvalidTypeError(
                f"{name} is a {type(value).__name__} without state_dict() and load_state_dict(); pass plain values in extra="
            )
    return path, optimizers, others
