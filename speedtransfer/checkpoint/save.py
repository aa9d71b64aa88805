"""Save a training run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.arguments import check_arguments
from speedtransfer.checkpoint.background import BackgroundSave, SnapshotRows, begin, finish_earlier
from speedtransfer.checkpoint.first_state import make_first_state, store_all
from speedtransfer.checkpoint.folder import Folder, NewFiles
from speedtransfer.checkpoint.model import encode_model
from speedtransfer.checkpoint.objects import encode_generators, rng_states, state_methods
from speedtransfer.checkpoint.optimizer import encode_optimizer
from speedtransfer.checkpoint.plain_data import encode, find_shards
from speedtransfer.checkpoint.store import Store
from speedtransfer.checkpoint.table_rows import Keeps, StoredRows
from speedtransfer.checkpoint.tensors import TensorPlan
from speedtransfer.checkpoint.together import Processes, processes_of
from speedtransfer.errors import is_url
from speedtransfer.optim import Handle, find_handle
from speedtransfer.ranks import Partition


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    progress: bool | None = None,
    background: bool = False,
    **objects: Any,
) -> BackgroundSave | None:
    """Save all that training needs to go on as if it had never stopped, in place of what `path` held before.

    With tables that several processes own (``process_group=``) all of them must call it, with the same path, on a file system
    that they share: each writes its rows, rank 0 all else (`extra` and `objects` are its own) and, last, the manifest. If one
    fails all raise. Generators, those among `objects` too, are saved of each process.

    Tables are streamed in chunks of 16 MB. The checkpoint at `path` is replaced in one go at the end: whatever happens
    before, the old one stays whole, so the disk must have room for both. No pickle: tensors go to safetensors files, the
    rest to `manifest.json`, with checksums. The states of the random number generators of Python, NumPy and torch are
    saved too.

    Parameters
    ----------
    path : path-like
        A folder: new, empty, or of an earlier checkpoint. A URL, as ``"s3://bucket/run"``, is a folder of an object store,
        which fsspec reaches with the package that it names; files that a killed save has finished stay there.
    model : nn.Module
        Every entry of its state dict, the rows of tables among them.
    optimizer : torch.optim.Optimizer, optional
        Its hyperparameters and state, as in its state dict.
    extra : object
        Plain data that `load_checkpoint` returns: numbers, strings, bytes, None, tensors, arrays, and lists, tuples, sets and
        dicts of these.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second, and not in the background.
    background : bool
        Return at once, and write while training goes on: what is saved is what there was when this was called, to the bit.
        Rows that a step is about to write are copied aside first: in memory, at most an eighth of the table or 1 GB, and then
        in a file beside the checkpoint. Where the disk has no room for that steps wait for the end of the save, as do growth
        and whatever changes all rows at once. The rest of the model and the state of other objects are copied at once. A later
        save to the same path waits for this one. Of several processes all write, and are done when all are; each must wait for
        its own before ``destroy_process_group()``. Not with ``memory="shared"``.
    **objects : object
        Anything with ``state_dict()`` and ``load_state_dict()`` (``scheduler=``, ``scaler=``, ``sampler=``, more optimizers),
        or a generator of torch or NumPy. None is as if it was not there.

    Returns
    -------
    BackgroundSave or None
        With `background`, what tells how far it is; its ``wait()`` raises what has gone wrong.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        Something has no state, or one that is no plain data; `path` is a file or a folder of something else; a table whose
        writes cannot be seen cannot be saved in the background. Nothing has been written.
    StorageError
        No room, or no permission. What was there before is as it was.
    ProcessGroupError
        Another process failed (its own message says why), or the processes do not save the same.
    """
    processes = processes_of("saves", [model, optimizer, *objects.values()])
    with processes.together():
        if background and isinstance(path, str | os.PathLike) and not is_url(path):
            # Whoever changes the current folder meanwhile does not mean this.
            path = os.path.abspath(path)
        place, optimizers, others = check_arguments(path, model, optimizer, objects)
        # Their order is that of the calls.
        finish_earlier(place)
        place.check_target()
        is_new = not place.exists()
    processes.prepare(background)
    processes.gather_ids()
    stack = contextlib.ExitStack
    with stack() as until_saved, stack() as until_read, stack() as planning:
        if processes.is_alone:
            _keep_from_others(model, until_read, planning)
        rows = until_saved.enter_context(SnapshotRows(place.scratch())) if background else StoredRows()
        with processes.together():
            plans, content, own = plan_files(processes, rows, model, optimizers, others, extra)
            planning.close()
            processes.release()
            need = bytes_of(plans, content)
        shards = find_shards([content["model"], content["optimizers"]])
        processes.check_same("in the background, " * background + f"rows of {shards}")
        need = int(processes.numbers(need).sum())
        writers = processes.for_thread() if background else processes
        plan = SavePlan(place, writers, plans, content, own, need, is_new)
        if not isinstance(rows, SnapshotRows):
            plan.write(progress)
            return None
        with processes.together():
            place.check_room(need)
            if rows.scratch is not None:
                rows.scratch.leaves = need
            for tensors in plans.values():
                tensors.copy()
        closing = until_saved.pop_all()

        def write(advance: Callable[[int], None]) -> None:
            with closing:
                rows.settle()
                plan.write(progress is True, advance, rows.check)

        try:
            with processes.together():
                return begin(place, need, write)
        except BaseException:
            # Without a thread nobody else lets the steps go on that wait.
            closing.close()
            raise


def _keep_from_others(
    model: nn.Module, until_read: contextlib.ExitStack, planning: contextlib.ExitStack
) -> None:  # fmt: skip
    """Let no other thread change ids until rows are read, or make a step of features apart while the files are planned."""
    for handle in map(find_handle, model.parameters()):
        # That of a head tied to a feature has no rows of its own.
        if not isinstance(handle, Handle):
            continue
        if handle.id_space.come_and_go:
            until_read.enter_context(handle.rows.lock)
        if handle.features is not None:
            planning.enter_context(handle.rows.lock)
            if handle.features.is_apart:
                # The optimizer has parameters of features in the place of that of the table.
                handle.step.check_steps_here("a checkpoint is saved")


def plan_files(
    processes: Processes,
    rows: StoredRows,
    model: nn.Module,
    optimizers: dict[str, Optimizer],
    others: dict[str, Any],
    extra: Any,
) -> tuple[dict[str, TensorPlan], dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what the files will hold, by role, what the manifest says, and what it says of the file of this process."""
    for optimizer in optimizers.values():
        # First: rows are written as they are then.
        make_first_state(optimizer)
        store_all(optimizer, constructed=False)
    plans, shards = {role: TensorPlan() for role in manifest.ROLES}, TensorPlan()
    keeps = {role: Keeps(plan.keep, shards.keep, rows) for role, plan in plans.items()}
    content: dict[str, Any] = {
        "versions": manifest.VERSIONS,
        "model": encode_model(model, keeps["model"]),
        "optimizers": {n: encode_optimizer(o, n, keeps["optimizer"]) for n, o in optimizers.items()},
    }
    own = {} if processes.is_alone else {f"rows-{processes.rank}": {"rows": _ranges(content, processes)}}
    if processes.is_first:
        keep = plans["objects"].keep
        content["rng"] = encode(rng_states(), "rng", keep)
        content["objects"] = {n: encode(state_methods(v)[0](), n, keep) for n, v in others.items()}
        content["extra"] = encode(extra, "extra", keep)
    else:
        # Rank 0 saves what all have alike.
        plans = {}
        own[f"rows-{processes.rank}"]["generators"] = encode_generators(others, shards.keep)
    return plans | dict.fromkeys(own, shards), content, own


def bytes_of(plans: dict[str, TensorPlan], content: dict[str, Any]) -> int:
    """Return about how many bytes the files and the manifest will take."""
    more = len(manifest.to_bytes(content)) + sum(200 * len(plan.tensors) + 1000 for plan in plans.values())
    return more + sum(plan.num_bytes for plan in plans.values())


class SavePlan(NamedTuple):
    """All that a save will write."""

    place: Folder | Store
    processes: Processes
    plans: dict[str, TensorPlan]
    content: dict[str, Any]
    own: dict[str, dict[str, Any]]
    need: int
    is_new: bool

    def write(
        self,
        progress: bool | None,
        advance: Callable[[int], None] = lambda count: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the files, and the manifest last, if `check` does not raise."""
        place, processes, plans, content, own, need, is_new = self
        with contextlib.ExitStack() as stack:
            files = _new_files(place, processes, list(plans), need, is_new, stack)
            with processes.together(), processes.progress(f"saving {place.name}", need, progress) as bar:

                def both(count: int) -> None:
                    bar.advance(count)
                    advance(count)

                facts = {}
                for role, plan in plans.items():
                    written = plan.write(files[role], both)
                    facts[role] = {"name": Path(files[role].name).name, **written, **own.get(role, {})}
                    place.finish(files[role])
                check()
            files.reported = not processes.is_first
            told = processes.texts(json.dumps(facts))
            with processes.together():
                if processes.is_first:
                    content["files"] = {role: fact for text in told for role, fact in json.loads(text).items()}
                    place.commit(content)


def _new_files(
    place: Folder | Store, processes: Processes, roles: list[str], need: int, is_new: bool, stack: contextlib.ExitStack
) -> NewFiles:
    """Make files for `roles` until `stack` ends: first those of rank 0, which the others must see."""
    unique = processes.unique()
    names = {role: f"{role}-{unique}.safetensors" for role in roles}
    files = NewFiles()
    with processes.together():
        if processes.is_first:
            place.check_room(need)
            files = stack.enter_context(place.new_files(names, need, is_new))
    with processes.together():
        if not processes.is_first:
            place.check_sees(f"rows-0-{unique}.safetensors")
            files = stack.enter_context(place.new_files(names, need, is_new))
    return files


def _ranges(content: dict[str, Any], processes: Processes) -> dict[str, list[int]]:
    """Return the places that the rows in the file of this process have in their table, by tensor."""
    found = {}
    for name, num_rows, sizes in find_shards([content["model"], content["optimizers"]]):
        partition, rank = Partition(num_rows, processes.ranks), processes.rank
        ends = [partition.start(rank), partition.start(rank + 1)]
        found[name] = ends if sizes is None else [sum(sizes[:rank]), sum(sizes[: rank + 1])]
    return found
