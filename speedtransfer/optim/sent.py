"""What is sent to other processes by ``torch.multiprocessing``, which moves the memory of tensors to where both see it.

That of a table stays where it is. A table is sent as a copy, to be read: training of it raises, as the process that has the
table would not see that. Tensors over its memory are not sent at all.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from speedtransfer.errors import InvalidTypeError, OptimizerError
from speedtransfer.optim.handle import Handle, all_handles
from speedtransfer.vocabulary import Vocabulary


def refusing_rows(share: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of storages that moves their memory; that of tables it does not."""

    @functools.wraps(share)
    def called(storage: Any, *args: Any, **kwargs: Any) -> Any:
        for handle in all_handles():
            if handle.rows.table.is_in(storage):
                raise InvalidTypeError(
                    f"a tensor over the rows of {handle}, or over their state (state_dict(), weight.detach()), is moved to "
                    "memory that processes share, where the table would not follow; send or share a copy (.clone())"
                )
        return share(storage, *args, **kwargs)

    return called


class _Pickler(pickle.Pickler):
    """Leaves vocabularies out: others than the handle may have them, too."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.left_out = list[Vocabulary]()

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Vocabulary):
            return None
        self.left_out.append(value)
        return len(self.left_out) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, left_out: list[Vocabulary]) -> None:
        super().__init__(io.BytesIO(data))
        self._left_out = left_out

    def persistent_load(self, number: int) -> Vocabulary:
        return self._left_out[number]


def _reduce(handle: Handle) -> tuple[Any, ...]:
    # As bytes: tensors that are sent to a process that starts have to stay until it has started.
    pickler = _Pickler(file := io.BytesIO())
    pickler.dump(handle)
    return _arrived, (file.getvalue(), pickler.left_out)


def _arrived(data: bytes, left_out: list[Vocabulary]) -> Handle:
    handle: Handle = _Unpickler(data, left_out).load()
    handle.is_sent = True
    return handle


def register() -> None:
    """Have tables sent as copies."""
    ForkingPickler.register(Handle, _reduce)


def check_trained_here(handle: Handle) -> None:
    """Raise if a table that came from another process would be trained in this one alone."""
    if handle.is_sent and handle.owners.is_alone:
        raise OptimizerError(
            f"{handle} came to this process as a copy, and a step here would not show in the process that has it, as one of "
            "torch.nn would; make tables that processes train together (memory='shared', process_group=), or train a copy of "
            "your own: copy.deepcopy(model)"
        )
