"""Loading: everything is read and checked first, then everything is changed."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.arguments import check_arguments
from speedtransfer.checkpoint.background import finish_earlier
from speedtransfer.checkpoint.folder import Folder
from speedtransfer.checkpoint.model import SavedModel
from speedtransfer.checkpoint.objects import check_rng_states, set_rng_states, states_set
from speedtransfer.checkpoint.optimizer import SavedOptimizer
from speedtransfer.checkpoint.plain_data import decode
from speedtransfer.checkpoint.store import Store
from speedtransfer.checkpoint.table_rows import Readers
from speedtransfer.checkpoint.tensors import TensorReader
from speedtransfer.checkpoint.together import Processes, ShardReader, files_to_check, processes_of
from speedtransfer.errors import InvalidValueError, StorageError, suggest
from speedtransfer.tables import loading

_TRIES = 20


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    progress: bool | None = None,
    **objects: Any,
) -> Any:
    """Load what `save_checkpoint` saved and return its `extra`. Training then goes on as if it had never stopped.

    All is checked before anything changes: every byte by its checksum, the model's keys, shapes and dtypes, the optimizer's
    class, groups and state. Rows are then streamed in chunks of 16 MB. Tables may live in another memory than when saved, or
    be ``torch.nn`` modules, and the reverse; with a vocabulary they may have another capacity. The states of the random
    number generators are set as well. What this process saves there in the background is waited for; if that failed, its
    error is raised.

    With tables that several processes own (``process_group=``) all of them must call it. The checkpoint may be of one process
    or of any number, and a model without such tables takes either. Processes beyond those that have saved get the generators
    of rank 0.

    Parameters
    ----------
    path : path-like
        The folder, or its URL. From a store all bytes are read twice, first to be checked.
    model : nn.Module
        Made as the one that was saved.
    optimizer : torch.optim.Optimizer, optional
        Of the class that was saved, with the same groups; may be fresh. None: its state is left out.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.
    **objects : object
        All that were saved, by the same names; a name with None is left out. With `model` alone, all are left out.

    Returns
    -------
    object
        What was saved as `extra`, its tensors on the CPU.

    Raises
    ------
    InvalidTypeError, InvalidValueError, OptimizerError
        The checkpoint does not fit what it is loaded into.
    StorageError
        There is none, or it is damaged or not to be trusted.
    ProcessGroupError
        Another process failed (its own message says why), or the processes do not load the same. Nothing has changed.
    """
    processes = processes_of("loads", [model, optimizer, *objects.values()])
    with ExitStack() as stack:
        with processes.together():
            place, optimizers, others = check_arguments(path, model, optimizer, objects)
        content, readers = _open_alike(place, processes, stack)
        with processes.together():
            check_names(content, {*optimizers, *others}, set(objects))
            for reader in readers.values():
                reader.check_size()
        checked = files_to_check(processes, place, readers)
        size = sum(reader.facts["bytes"] for reader in [*checked, *readers.values()])
        bar = stack.enter_context(processes.progress(f"loading {place.name}", size, progress))
        with processes.together():
            for reader in checked:
                reader.check(bar.advance)
        with processes.together(), manifest.damage_told(place.file(manifest.NAME)):
            files = content["files"]
            shards = ShardReader(files, readers) if manifest.rows_roles(files) else None
            saved_model = SavedModel(content["model"], model, Readers(readers["model"], shards))
            saved_optimizers = [
                SavedOptimizer(content["optimizers"][name], value, name, Readers(readers["optimizer"], shards))
                for name, value in optimizers.items()
            ]
            read = readers["objects"].read
            states = {name: decode(content["objects"][name], read) for name in others}
            extra, rng = decode(content["extra"], read), decode(content["rng"], read)
            own = files.get(f"rows-{processes.rank}", {}).get("generators")
            if own is not None:
                read = readers[f"rows-{processes.rank}"].read
                rng = decode(own["rng"], read)
                states |= {name: decode(state, read) for name, state in own["objects"].items() if name in others}
            check_rng_states(rng)

        handles = saved_model.handles + [handle for saved in saved_optimizers for handle in saved.handles]
        tables = {handle.table: str(handle) for handle in handles}
        with loading(tables, "st.load_checkpoint", ("load_state_dict",)) as changes:
            with ExitStack() as changed:
                with processes.together():
                    changed.enter_context(states_set(others, states))
                with processes.together():
                    saved_model.allocate()
                    for saved in saved_optimizers:
                        saved.allocate()
            changes.append(True)
            processes.tell_sizes()
            with processes.together():
                saved_model.load(bar.advance)
                for saved in saved_optimizers:
                    saved.load(bar.advance)
                set_rng_states(rng)
    return extra


def _open_alike(
    place: Folder | Store, processes: Processes, stack: ExitStack
) -> tuple[dict[str, Any], dict[str, TensorReader]]:
    """Open the same checkpoint in all processes, until `stack` ends."""
    for left in reversed(range(_TRIES)):
        with ExitStack() as opened:
            with processes.together():
                content, readers = open_checkpoint(place, opened)
            if len(processes.numbers(int(content["sha256"][:12], 16)).unique()) == 1:
                stack.push(opened.pop_all())
                break
        if not left:
            processes.check_same(f"the checkpoint {str(place)!r} of SHA-256 {content['sha256'][:12]}")
    return content, readers


def open_checkpoint(place: Folder | Store, stack: ExitStack) -> tuple[dict[str, Any], dict[str, TensorReader]]:
    """Open the manifest and its files, until `stack` ends. A saver may put new ones in their place meanwhile: then again.

    Waits for a save to the same place that goes on in the background; raises what has ended it, unless somebody knows by now.
    """
    finish_earlier(place)
    for left in reversed(range(_TRIES)):
        raw = place.read_manifest()
        content = manifest.parse(raw, place.file(manifest.NAME))
        readers: dict[str, TensorReader] = {}
        try:
            with ExitStack() as opened, manifest.damage_told(place.file(manifest.NAME)):
                for role, facts in content["files"].items():
                    readers[role] = TensorReader(place, facts)
                    opened.enter_context(readers[role].file)
                stack.push(opened.pop_all())
            break
        except StorageError:
            if not left or place.read_manifest() == raw:
                raise
    return content, readers


def check_names(content: dict[str, Any], given: set[str], named: set[str], what: str = "the checkpoint") -> None:
    """Raise `InvalidValueError` unless what is `given` was saved, and what was saved is given, or `named` with None."""
    saved = {*content["optimizers"], *content["objects"]}
    for name in sorted(given - saved):
        remedy = suggest(name, sorted(saved)) if saved else ", but the model alone; pass nothing else"
        raise InvalidValueError(f"{what} holds no {name!r}{remedy}")
    for name in sorted(saved - given - named - {"optimizer"} if given else ()):
        raise InvalidValueError(
            f"{what} holds {name[:40]!r}, which was not given; pass {name[:40]}=..., or =None to leave it out"
        )
