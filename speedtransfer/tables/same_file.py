"""Tables of one process that write to the same tensor of a file: each has a view of the rows of the others."""

from __future__ import annotations

import weakref
from typing import Any

from speedtransfer.once import fork_safe_lock

# By the file, and the name of a tensor in it.
_writers: dict[Any, weakref.WeakSet[Any]] = {}
_lock = fork_safe_lock()


def see_others(table: Any) -> None:
    """Let the steps of `table`, and of others over the same tensor of a file, read rows anew, and write what rows miss."""
    tensor = table._place.written_tensor
    if tensor is None:
        return
    with _lock:
        for key in [key for key, tables in _writers.items() if not tables]:
            del _writers[key]
        others = _writers.setdefault(tensor, weakref.WeakSet())
        for other in others:
            if other is not table:
                for one, two in ((table, other), (other, table)):
                    one.open_views.note_other("weight", one.stored("weight"), two.stored("weight"))
                    if one._cache is not None:
                        one._cache.shrink(0)
        others.add(table)
