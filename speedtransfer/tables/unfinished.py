"""What an interrupt has left half done to the rows of a table: it is finished before they are used, or that raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from speedtransfer.engines import Engine
from speedtransfer.errors import OptimizerError


class Unfinished:
    """Take the place of the engine of a table, by which all uses of its rows go, until `finish` has returned.

    Parameters
    ----------
    table : object
        Has the engine as `_engine`.
    finish : callable
        Takes the engine. Called at the next use, and again at each one after it as long as it raises.
    load : str, optional
        What `loading` did, if it was that.
    """

    def __init__(self, table: Any, finish: Callable[[Engine], object], load: str | None = None) -> None:
        self._table, self._finish, self._load = table, finish, load
        before = table._engine
        self._engine: Engine = before._engine if isinstance(before, Unfinished) else before
        self._selects: bool = before._selects if isinstance(before, Unfinished) else table._selects
        # Without it lookups pass the engine by.
        table._selects = False
        table._engine = self

    def __getattr__(self, name: str) -> Any:
        self._finish(self._engine)
        self._leave()
        return getattr(self._engine, name)

    def _leave(self) -> None:
        self._table._engine, self._table._selects = self._engine, self._selects


@contextmanager
def loading(tables: Mapping[Any, str], load: str, others: tuple[str, ...] = ()) -> Iterator[list[bool]]:
    """Refuse the rows of tables if something comes into the block that loads them, until a block has loaded them whole.

    Parameters
    ----------
    tables : mapping of Table to str
        With what they are called.
    load : str
        The function to call again.
    others : tuple of str
        Others in whose place it does.

    Yields
    ------
    list of bool
        To be filled once something changes; if it is empty the tables are as before.
    """
    changes = list[bool]()
    refused = dict[Any, Unfinished]()
    for table in tables:
        engine = table._engine
        if isinstance(engine, Unfinished) and engine._load in (load, *others):
            refused[table] = engine
            engine._leave()
    try:
        yield changes
    except BaseException:
        for table, name in tables.items():
            if changes or table in refused:
                refuse(table, name, load)
        raise


def refuse(table: Any, name: str, load: str) -> None:
    """Have every use of the rows raise."""

    def finish(engine: Engine) -> None:
        raise OptimizerError(
            f"{name} has been loaded or written in part only, as something came into it, so that some rows or their state are "
            f"those of before; do it again ({load}), or make the model and its optimizer anew"
        )

    Unfinished(table, finish, load)
