"""Tables of one process that write to the same tensor of a file, or memory: each has a view of the rows of the others."""

from __future__ import annotations

import weakref
from typing import Any

from speedtransfer.once import fork_safe_lock
from speedtransfer.tables.row_values import overlap

# By the file, and the name of a tensor in it.
_writers: dict[Any, weakref.WeakSet[Any]] = {}
# Those in no file.
_in_memory: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = fork_safe_lock()


def see_others(table: Any) -> None:
    """Let the steps of `table`, and of others over the same tensor of a file, read rows anew, and write what rows miss."""
    tensor = table._place.written_tensor
    with _lock:
        if tensor is None:
            _in_memory.add(table)
            return
        for key in [key for key, tables in _writers.items() if not tables]:
            del _writers[key]
        others = _writers.setdefault(tensor, weakref.WeakSet())
        for other in others:
            if other is not table:
                _note(table, other)
        others.add(table)


def see_others_in_memory(table: Any) -> None:
    """Do so for a table over memory that somebody gave, which may be that of other tables."""
    with _lock:
        for other in list(_in_memory):
            if other is not table and have_same_rows(table, other):
                _note(table, other)


def have_same_rows(one: Any, two: Any) -> bool:
    """Tell whether rows of a table are rows of another one too."""
    if one._place.written_tensor is not None:
        return bool(one._place.written_tensor == two._place.written_tensor)
    return overlap(one.stored("weight"), two.stored("weight"))


def _note(table: Any, other: Any) -> None:
    for one, two in ((table, other), (other, table)):
        one.open_views.note_other(one.stored("weight"), two.stored("weight"))
        if one._cache is not None:
            one._cache.shrink(0)
