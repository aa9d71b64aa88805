"""Make a checkpoint of an earlier one and the deltas since, from their files alone, without a model or a whole table."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.arguments import place_of
from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.checkpoint.folder import Folder
from speedtransfer.checkpoint.load import open_checkpoint
from speedtransfer.checkpoint.merged_ids import MergedIds
from speedtransfer.checkpoint.merged_rows import Base, MergedTable
from speedtransfer.checkpoint.plain_data import encode, find_rows, set_num_rows
from speedtransfer.checkpoint.save import SavePlan, bytes_of
from speedtransfer.checkpoint.store import Store
from speedtransfer.checkpoint.table_rows import LAYOUT
from speedtransfer.checkpoint.tensors import TensorPlan
from speedtransfer.checkpoint.together import Processes
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.progress import ByteProgress
from speedtransfer.tables import PathLike
from speedtransfer.tables.saving import check_safetensors_path


def merge(
    base: str | os.PathLike[str],
    deltas: PathLike | Iterable[PathLike],
    out: str | os.PathLike[str],
    *,
    progress: bool | None = None,
) -> None:
    """Make the checkpoint that `save_checkpoint` would have made with the last of some deltas, to the bit.

    Everything is read and checked before anything is written: each byte of the base by its checksum, that the rows of each
    delta begin with what is there before it, and that they are those that were saved. Rows are streamed in chunks of 16 MB.
    The new checkpoint is put in place in one go at the end; the base and the deltas stay as they are.

    The checkpoint is that of the processes that have saved the last delta, and loads at any number of them. The rows of a
    vocabulary are told apart by their ids where deltas have no optimizer, or several processes share these out: they are
    those of the trainer, to the bit, in the places that a copy gives them which loads the base and applies the deltas.
    Without an optimizer their last use is when they were written last.

    Parameters
    ----------
    base : path-like
        A checkpoint, or its URL, of any number of processes, with what the deltas have: the model alone, or the optimizer and
        objects too. In an object store rows that several processes share out must lie there as in the result.
    deltas : path-like or sequence of path-like
        Files of `save_delta` in their order, or a folder: all its ``.safetensors`` in the order of their names. By which
        processes each was saved does not matter.
    out : path-like
        A folder as for `save_checkpoint`, or its URL; not the base.
    progress : bool, optional
        A bar on standard error. Default: on a terminal, if it takes more than a second.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        A delta is missing or there twice, or they are of another base; one has the state of other optimizers.
    StorageError
        A file is missing or damaged, or there is no room.
    """
    place, target, paths = place_of(base), place_of(out), _paths(deltas)
    if _resolved(target) == _resolved(place):
        raise InvalidValueError(f"out is the base, {str(base)!r}, which stays as it is; pass another folder")
    target.check_target()
    chain = [Delta(path) for path in paths]
    _check_chain(chain)
    with ExitStack() as stack:
        content, readers = open_checkpoint(place, stack)
        _check_base(str(place), content, chain[0])
        for reader in readers.values():
            reader.check_size()
        begin = Base(str(place), content, readers)
        tables: dict[str, MergedTable] = {
            key: (MergedTable if facts.vocabulary is None else MergedIds)(key, chain, begin)
            for key, facts in chain[-1].tables.items()
        }
        size = sum(reader.facts["bytes"] for reader in readers.values())
        size += sum(table.nbytes for table in tables.values())
        with ByteProgress(f"checking {place.name}", size, progress) as bar:
            for reader in readers.values():
                reader.check(bar.advance)
            for table in tables.values():
                table.check(bar)
        with manifest.damage_told(chain[-1].path):
            plans, content, own = _plans(chain[-1], tables)
        need = bytes_of(plans, content)
        SavePlan(target, Processes("merges", None), plans, content, own, need, not target.exists()).write(progress)


def _paths(deltas: Any) -> list[Path]:
    if isinstance(deltas, str | os.PathLike):
        folder = Path(deltas)
        deltas = sorted(folder.glob("*.safetensors")) if str(deltas) and os.path.isdir(folder) else [deltas]
    if not isinstance(deltas, Iterable):
        raise InvalidTypeError(
            f"deltas is a {type(deltas).__name__} but must be the paths of files of st.save_delta, or their folder; pass these"
        )
    paths = [check_safetensors_path(path) for path in deltas]
    if not paths:
        raise InvalidValueError(
            "deltas is empty, and the base is what it holds; pass the files that st.save_delta wrote"
        )
    return paths


def _resolved(place: Folder | Store) -> str:
    return os.path.realpath(place.path) if isinstance(place, Folder) else str(place)


def _check_chain(chain: list[Delta]) -> None:
    """Raise unless each delta begins where the one before ends, and all are of one kind."""
    for before, after in itertools.pairwise(chain):
        if _names(after.content) != _names(before.content) or after.tables.keys() != before.tables.keys():
            raise InvalidValueError(
                f"{str(after.path)!r} has {_names(after.content)} and tables {sorted(after.tables)[:3]} but "
                f"{str(before.path)!r} {_names(before.content)} and {sorted(before.tables)[:3]}; merge deltas of one kind"
            )
        for key, table in after.tables.items():
            if (table.vocabulary is None) is not (before.tables[key].vocabulary is None):
                raise InvalidValueError(
                    f"{str(after.path)!r} and {str(before.path)!r} tell rows of {key!r} apart by id and by place, so "
                    "that neither begins where the other ends; merge those of each trainer apart"
                )
        if not after.comes_after(before):
            raise InvalidValueError(
                f"{str(after.path)!r} (number {after.place.number}) does not begin where {str(before.path)!r} (number "
                f"{before.place.number}) ends: one in between is missing, one is there twice, or the order is another; pass "
                "all in their order"
            )


def _names(content: Mapping[str, Any]) -> list[str]:
    """Return what was saved beside the model."""
    return sorted([*content["optimizers"], *content["objects"]]) or ["the model alone"]


def _check_base(place: str, content: Mapping[str, Any], first: Delta) -> None:
    """Raise unless the base has what the deltas have."""
    if _names(content) != _names(first.content):
        raise InvalidValueError(
            f"{place!r} has {_names(content)} but {str(first.path)!r} {_names(first.content)}; pass to st.save_delta what was "
            "passed to st.save_checkpoint"
        )


def _plans(
    last: Delta, tables: Mapping[str, MergedTable]
) -> tuple[dict[str, TensorPlan], dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what the files of the checkpoint will hold, by role, what the manifest says, and of the file of each process."""
    content: dict[str, Any] = copy.deepcopy(last.content)
    plans = {role: TensorPlan() for role in (*manifest.ROLES, *(f"rows-{rank}" for rank in range(last.processes)))}
    by_row = {name: (table, plane) for table in tables.values() for plane, name in table.facts.planes.items()}
    own: dict[str, dict[str, Any]] = {f"rows-{rank}": {"rows": {}} for rank in range(last.processes)}
    done = {f"model/{name}" for name in _add_ids(content["model"], plans["model"], tables)}
    set_num_rows(content, {name: table.count for name, (table, _) in by_row.items() if isinstance(table, MergedIds)})
    for role, section in (("model", content["model"]), ("optimizer", content["optimizers"])):
        for node in find_rows(section):
            for part, path in node["parts"].items():
                table, plane = by_row[f"{role}/{path}"]
                if table.order is None:
                    continue
                done.add(f"{role}/{path}")
                node["layout"], tail = LAYOUT, last.tensors[f"{role}/{path}"].shape[1:]
                for rank in range(last.processes):
                    node["parts"][part] = name = plans[f"rows-{rank}"].keep(path, table.picked(plane, tail, rank))
                    own[f"rows-{rank}"]["rows"][name] = [table.order.start(rank), table.order.start(rank + 1)]
    for full_name in [name for name in last.tensors if name not in done]:
        (role, _, name), tensor = full_name.partition("/"), last.tensors[full_name]
        plans[role].tensors[name] = tensor
        if full_name in by_row:
            table, plane = by_row[full_name]
            plans[role].tensors[name] = table.picked(plane, tensor.shape[1:])
    for role, generators in zip(list(own)[1:], last.generators, strict=True):
        own[role]["generators"] = generators
    return plans, content, own


def _add_ids(model: dict[str, Any], plan: TensorPlan, tables: Mapping[str, MergedTable]) -> set[str]:
    """Have what the manifest says of a model, and a plan, hold which ids the rows of a table have; return their keys."""
    entries: dict[str, Any] = {}
    found: set[str] = set()
    for key, entry in model["entries"].items():
        entries.setdefault(key, entry)
        # A module in two places has them in both.
        first = entry["v"] if isinstance(entry, dict) and entry.get("$") == "same" else key
        table = tables.get(first)
        if isinstance(table, MergedIds):
            start, other = key.removesuffix("weight"), first.removesuffix("weight")
            state = {start + name.removeprefix(other): value for name, value in table.state.items()}
            entries |= {name: encode(value, name, plan.keep) for name, value in state.items()}
            found |= state.keys()
    model["entries"] = entries
    return found
