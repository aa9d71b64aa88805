"""The keyword arguments that modules with a table have besides those of ``torch.nn``, defined once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

import torch
from torch import nn

from speedtransfer.errors import InvalidTypeError, check_choice, suggest
from speedtransfer.optim import Handle
from speedtransfer.ranks import group_of
from speedtransfer.vocabulary import Vocabulary

Idle: TypeAlias = Literal["auto", "exact", "lazy"]
IDLE: tuple[Idle, ...] = get_args(Idle)

Function = TypeVar("Function", bound=Callable[..., Any])


class TableOptions(TypedDict, total=False):
    """Keyword arguments of :class:`speedtransfer.Embedding`, which documents them."""

    memory: Literal["auto", "pinned", "pageable", "mmap", "device", "shared"]
    path: str | os.PathLike[str] | None
    idle: Literal["auto", "exact", "lazy"]
    storage_dtype: torch.dtype | Literal["split24"] | None
    state_dtype: torch.dtype | None
    scale_block: int | None
    layout: Literal["planes", "rows"]
    cache_rows: int | Literal["auto"] | None
    cache_counts: Any
    process_group: Any
    comm_dtype: torch.dtype | None
    vocabulary: Vocabulary | None


DEFAULTS = TableOptions(
    memory="auto",
    path=None,
    idle="auto",
    storage_dtype=None,
    state_dtype=None,
    scale_block=None,
    layout="planes",
    cache_rows=None,
    cache_counts=None,
    process_group=None,
    comm_dtype=None,
    vocabulary=None,
)


def takes_options(function: Function) -> Function:
    """Show the options in the signature of a function with ``**options``; other keywords raise with a suggestion."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, kind in TableOptions.__annotations__.items():
        about = {"default": DEFAULTS[name], "annotation": kind.__forward_arg__}  # type: ignore[literal-required]
        shown.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **about))
    names = [parameter.name for parameter in shown if parameter.name not in ("self", "cls")]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                raise InvalidTypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}{suggest(name, names)}"
                )
        return function(*args, **kwargs)

    checked.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def complete(options: TableOptions) -> TableOptions:
    """Return `options` with defaults for those left out; raise unless `idle` is one of `IDLE` and `vocabulary` is one."""
    if "process_group" in options:
        # Given, and maybe None by mistake.
        options = {**options, "process_group": group_of(options["process_group"])}
    options = {**DEFAULTS, **options}
    check_choice(options["idle"], "idle", IDLE)
    if not isinstance(options["vocabulary"], Vocabulary | None):
        raise InvalidTypeError(
            f"vocabulary is a {type(options['vocabulary']).__name__} but must be a speedtransfer.Vocabulary; pass "
            "st.Vocabulary(...)"
        )
    return options


def table_arguments(options: TableOptions) -> dict[str, Any]:
    """Return those of complete options that say where and how a :class:`~speedtransfer.Table` lies, which it takes."""
    about: Any = options
    return {name: about[name] for name in ("memory", "path", "layout", "cache_rows", "cache_counts")}


def check_model(model: object) -> None:
    """Raise unless `model` is an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__} but must be an nn.Module; pass the model itself")


def refuse_vocabulary(options: TableOptions, where: str, remedy: str) -> None:
    """Raise if `options` have a vocabulary, for `where` there can be none."""
    if options.get("vocabulary") is not None:
        raise InvalidTypeError(f"vocabulary is given, but {where} cannot have one; {remedy}")


def options_of(handle: Handle) -> TableOptions:
    """Return complete options of another table like that of `handle`, in memory if that is a file with a name.

    Raises
    ------
    InvalidTypeError
        There can be none on the meta device: several processes have its rows, or its ids are no row numbers.
    """
    if not handle.owners.has_whole:
        raise InvalidTypeError(
            f"{handle} has rows in several processes, which a module on the meta device would not keep; leave the module "
            "where it is"
        )
    if not (handle.id_space.by_row or handle.id_space.come_and_go):
        raise InvalidTypeError(
            f"{handle} looks {handle.id_space.kind} up, which a module on the meta device would not know; leave the module "
            "where it is"
        )
    idle: Any = handle.idle
    table, rows, cache = handle.table, handle.rows, handle.table._cache_options
    folder = table.folder if table.path is None else None
    memory: Any = table.memory if table.memory in ("pinned", "pageable", "device") or folder is not None else "auto"
    return complete(
        TableOptions(
            memory=memory,
            path=folder,
            idle=idle,
            storage_dtype=rows.storage_dtype,
            state_dtype=rows.state_dtype,
            scale_block=rows.scale_block,
            layout=table.layout,
            cache_rows=None if cache is None else cache.rows,
            cache_counts=None if cache is None else cache.counts,
            vocabulary=handle.id_space.vocabulary.copy() if handle.id_space.come_and_go else None,
        )
    )
