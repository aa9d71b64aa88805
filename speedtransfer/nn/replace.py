"""Replace the embeddings of an existing model by tables; its modules and parameters stay the same objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from speedtransfer.dtypes import TABLE_DTYPES
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.nn.bag import EmbeddingBag
from speedtransfer.nn.collections_of_torchrec import Collection, is_collection
from speedtransfer.nn.containers import Container, about, is_container
from speedtransfer.nn.embedding import Embedding
from speedtransfer.nn.feature import Feature
from speedtransfer.nn.new_table import make_handle
from speedtransfer.nn.options import TableOptions, check_model, complete, takes_options
from speedtransfer.nn.shard_rounds import watch
from speedtransfer.nn.subclasses import empty_table_module, table_class
from speedtransfer.nn.table_module import TableModule
from speedtransfer.nn.weight import TableWeight, is_ordinary
from speedtransfer.once import once
from speedtransfer.optim import Handle, find_handle, replicas

# By this name pickles of earlier versions find it.
_bare = empty_table_module
Names = str | Sequence[str] | Callable[[str, nn.Module], bool]


class Replaced(list[str]):
    """The names of the modules that were given tables.

    Attributes
    ----------
    left : dict of str to str
        The embeddings left as they were, by name, and why.
    notes : dict of str to str
        For some of the modules replaced, what their use of the table costs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def __str__(self) -> str:
        lines = [
            f"{name or 'the model'}: a table{'; ' + self.notes[name] if name in self.notes else ''}" for name in self
        ]
        lines += [f"{name or 'the model'}: left as it is, {reason}" for name, reason in self.left.items()]
        return "\n".join(lines) or "the model has no nn.Embedding and no nn.EmbeddingBag"


@takes_options
def replace_embeddings(
    model: nn.Module,
    min_rows: int = 10_000,
    names: Names | None = None,
    strict: bool = False,
    min_bytes: int = 0,
    fuse: bool = False,
    **options: Unpack[TableOptions],
) -> Replaced:
    """Give the ``nn.Embedding`` and ``nn.EmbeddingBag`` modules inside `model` tables, with the weights that they have.

    The modules and their parameters stay the same objects: subclasses keep their own code, hooks stay, and heads that share a
    weight, optimizers and lists of parameters made before keep working.

    The tables of an unsharded ``EmbeddingBagCollection`` or ``EmbeddingCollection`` of TorchRec become one, a
    :class:`~speedtransfer.MultiEmbeddingBag` or :class:`~speedtransfer.MultiEmbedding`, with one parameter: make the
    optimizer afterwards. Where they are not alike each has a table of its own.

    Parameters
    ----------
    model : nn.Module
        Changed in place; it may be an embedding itself.
    min_rows : int
        Leave embeddings with fewer rows alone: where a batch touches most rows a dense one is faster.
    names : str, sequence of str, or callable, optional
        Which modules: patterns such as ``"encoder.*"`` for the names in ``model.named_modules()``, or a function of name and
        module that says whether to replace it. By default all. A pattern that no embedding's name matches is refused.
    strict : bool
        Raise where an embedding that was asked for cannot be replaced.
    min_bytes : int
        Leave embeddings with a smaller weight alone: ``min_bytes=1 << 30`` takes those that are worth the memory.
    fuse : bool
        Give each ``nn.ModuleList`` and ``nn.ModuleDict`` of embeddings alike one table for all of them, a
        :class:`~speedtransfer.MultiEmbedding` in its place, which has the same names and state dict and one parameter: make
        the optimizer afterwards. Those that are not alike have a table each.
    memory, path, idle, storage_dtype, state_dtype, scale_block, layout, cache_rows, cache_counts, process_group,
    comm_dtype
        As in :class:`~speedtransfer.Embedding`; a `path` is the file of one table, or a folder for any number.
    vocabulary : Vocabulary, optional
        Each table gets a copy of it (``module.vocabulary``), in which the ids from 0 on are known and have the rows that the
        module has: the model computes what it did, and takes any other id too. A weight that several modules share is left.

    Returns
    -------
    Replaced
        A list of the names of the modules replaced. A module used in several places appears under each name. Its `left` says
        which embeddings were not, and why; ``print`` shows both.

    Raises
    ------
    InvalidValueError
        A pattern of `names` matches no embedding; with `strict`, one cannot be replaced. The model is then as it was.
    HostMemoryError
        There is no room for a table. The model is then as it was.
    """
    check_size(min_rows, "min_rows")
    check_size(min_bytes, "min_bytes")
    options = complete(options)
    check_model(model)
    if options["process_group"] is None:
        replicas.check_not_wrapped(model)
    names = _checked_names(names)
    report, found, users = Replaced(), {}, _users(model)
    groups, apart = _groups(model, fuse, names, min_rows, min_bytes, options, users)
    inside = tuple(group.inside(name) for name, group in groups.items())
    for name, module in model.named_modules(remove_duplicate=False):
        is_theirs = isinstance(module, nn.Embedding | nn.EmbeddingBag) and not isinstance(module, TableModule | Feature)
        if name.startswith(inside) or not is_theirs:
            continue
        if not _wanted(name, module, names):
            report.left[name] = "not among the names asked for"
        elif module.num_embeddings < min_rows:
            report.left[name] = f"it has {module.num_embeddings} rows, fewer than min_rows={min_rows}"
        elif (num_bytes := _weight_bytes(module)) < min_bytes:
            report.left[name] = f"its weight has {num_bytes:,} bytes, fewer than min_bytes={min_bytes:,}"
        elif problem := _problem(module, options, users):
            if strict:
                raise InvalidValueError(f"embedding {name!r} {problem}")
            report.left[name] = f"it {problem}"
        else:
            found[name] = module
    _check_matched(names, model)
    distinct = dict.fromkeys(groups.values())
    count = len({id(it.weight) for it in found.values()}) + len(distinct)
    if options["path"] is not None and count > 1 and not os.path.isdir(options["path"]):
        raise InvalidValueError(
            f"path is {os.fspath(options['path'])!r}, the file of one table, but there are {count} to be made; choose one by "
            "names, or call this for each"
        )
    # All tables are made, one for each weight, before the first module is changed: an error leaves the model as it was.
    handles = _handles(found, options)
    for group in distinct:
        group.make(options)
    for name, module in found.items():
        others = sorted(users.get(id(module.weight), set()) - {n for n, m in found.items() if m is module})
        if others:
            shared = ", ".join(map(repr, others))
            report.notes[name] = (
                f"shared with {shared}, so that each use there reads every row, and a step touches every row"
            )
        # One that was seen under another name has its table already.
        if not isinstance(module, TableModule):
            _give_table(module, handles.get(id(module.weight)), options)
        report.append(name)
        reason = next((reason for prefix, reason in apart.items() if name.startswith(prefix)), None)
        if reason is not None:
            report.notes.setdefault(name, f"apart from the others beside it, as {reason}")
    for name, group in groups.items():
        group.replace(model, name)
        report.append(name)
        report.notes[name] = about(group.tables)
    if options["process_group"] is not None and report:
        watch(model)
    return report


def _checked_names(names: Any) -> list[str] | Callable[[str, nn.Module], bool] | None:
    """Return a list of patterns, a function, or None."""
    if names is None or callable(names):
        return names
    if not isinstance(names, Iterable):
        raise InvalidTypeError(
            f"names is {names!r} but must be a pattern, several or a function; pass for instance 'user*'"
        )
    names = [names] if isinstance(names, str) else list(names)
    for pattern in names:
        if not isinstance(pattern, str):
            raise InvalidTypeError(
                f"names holds {pattern!r} ({type(pattern).__name__}), no pattern; pass strings, such as '*.embed'"
            )
    return names


def _check_matched(names: Any, model: nn.Module) -> None:
    """Raise for a pattern that no embedding's name matches."""
    asked = [
        name
        for name, it in model.named_modules(remove_duplicate=False)
        if isinstance(it, nn.Embedding | nn.EmbeddingBag) or is_collection(it)
    ]
    for pattern in names if isinstance(names, list) else ():
        if not any(fnmatchcase(name, pattern) for name in asked):
            raise InvalidValueError(
                f"names has {pattern!r}, but no embedding has such a name{suggest(pattern, asked) if asked else ''}"
            )


def _handles(modules: dict[str, Any], options: TableOptions) -> dict[int, Handle]:
    """Make a table for each weight of `modules` that has values, and return their handles by the id of the weight."""
    handles: dict[int, Handle] = {}
    for name, module in modules.items():
        weight = module.weight
        if id(weight) not in handles and not weight.is_meta:
            own = options
            if options["vocabulary"] is not None:
                own = TableOptions(**{**options, "vocabulary": options["vocabulary"].copy()})
            about = tuple(weight.shape), weight.device, weight.dtype, weight.requires_grad, own, module.padding_idx
            handle = find_handle(weight) or make_handle(weight.detach(), *about)
            handles[id(weight)], handle.name = handle, name
    return handles


def _groups(
    model: nn.Module, fuse: bool, names: Names | None, min_rows: int, min_bytes: int, options: TableOptions, users: Any
) -> tuple[dict[str, Collection | Container], dict[str, str]]:
    """Return the modules whose tables become one, and, by what names of others' begin with, why they do not."""
    found: dict[str, Collection | Container] = {}
    known: dict[int, Collection | Container] = {}
    apart = {}
    for name, module in model.named_modules(remove_duplicate=False):
        each: Collection | Container
        if is_collection(module):
            each, wanted = known.get(id(module)) or Collection(module), _wanted(name, module, names)
        elif fuse and is_container(module):
            if not name:
                apart[""] = (
                    "the model is the list itself, in whose place no other can be put; pass the module that has it"
                )
                continue
            each = known.get(id(module)) or Container(module)
            wanted = all(_wanted(f"{name}.{key}", table, names) for key, table in each.tables.items())
        else:
            continue
        known[id(module)] = each
        tables = each.tables.values()
        few = sum(it.num_embeddings for it in tables) < min_rows or sum(map(_weight_bytes, tables)) < min_bytes
        if few or not wanted:
            continue
        problem = each.problem(options, users)
        if problem is None:
            found[name] = each
        else:
            apart[each.inside(name)] = problem
    return found, apart


def _wanted(name: str, module: nn.Module, names: Names | None) -> bool:
    if names is None:
        return True
    if callable(names):
        return names(name, module)
    return any(fnmatchcase(name, pattern) for pattern in names)


def _weight_bytes(module: nn.Embedding | nn.EmbeddingBag) -> int:
    """Return the bytes of the weight of a module, from its shape: it may be on the meta device, or computed."""
    weight = module._parameters.get("weight")
    itemsize = (torch.get_default_dtype() if weight is None else weight.dtype).itemsize
    return module.num_embeddings * module.embedding_dim * itemsize


def _problem(module: nn.Embedding | nn.EmbeddingBag, options: TableOptions, users: dict[int, set[str]]) -> str | None:
    """Return why a module cannot have a table, if it cannot; `users`: the modules that have each parameter."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "has a weight that something computes (a parametrization); remove that, and register it again afterwards"
    if not is_ordinary(weight):
        return f"has a weight of type {type(weight).__name__}, with rules that no table keeps; replace it before sharding it"
    if weight.dtype not in TABLE_DTYPES:
        return f"has a weight of {weight.dtype}, which a table cannot hold"
    coded = None if options["storage_dtype"] is None else weight.is_floating_point()
    if coded is False or (coded is None and options["state_dtype"] is not None and weight.dtype != torch.float32):
        return f"has a weight of {weight.dtype}, which storage_dtype and state_dtype are not for"
    if weight.layout != torch.strided or weight.dim() != 2:
        return f"has a weight of layout {weight.layout} and shape {tuple(weight.shape)}; a table is dense and 2-D"
    if type(module).__module__.startswith("torch.ao.") or isinstance(module, torch.jit.ScriptModule):
        return f"is a {type(module).__name__}, whose rows are not trained by an optimizer"
    if taken := sorted(_names_of(isinstance(module, nn.EmbeddingBag)).intersection(dir(module))):
        return f"has {', '.join(taken)} of its own, as a module with a table has; give these other names"
    return None if options["vocabulary"] is None else _shared(module, users)


@once
def _names_of(bag: bool) -> frozenset[str]:
    """Return the names that a module with a table has and one of torch has not."""
    ours, theirs = (EmbeddingBag, nn.EmbeddingBag) if bag else (Embedding, nn.Embedding)
    names = {*dir(ours), "idle", "_handle"} - {*dir(theirs(1, 1, device="meta"))}
    return frozenset(name for name in names if not name.startswith("__"))


def _shared(module: nn.Module, users: dict[int, set[str]]) -> str | None:
    """Return why a module cannot have a vocabulary, if it cannot: others use its rows by their numbers."""
    names = users[id(module.weight)]
    if module.weight.grad is not None:
        return "has a gradient, whose rows would no longer be numbered by id; take the step first, or zero_grad()"
    if len(names) == 1:
        return None
    return f"shares its weight ({', '.join(map(repr, sorted(names)))}), whose rows would no longer be numbered by id"


def _users(model: nn.Module) -> dict[int, set[str]]:
    """Return the names of the modules that have each parameter."""
    users: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(id(param), set()).add(name)
    return users


def _give_table(module: Any, handle: Handle | None, options: TableOptions) -> None:
    weight = module.weight
    cls: Any = type(module)
    module.__class__ = table_class(cls)
    module.idle = options["idle"]
    if handle is None:
        module._wait(weight, options)
        return
    module._use(handle)
    if find_handle(weight) is None:
        handle.bind(weight, TableWeight)
