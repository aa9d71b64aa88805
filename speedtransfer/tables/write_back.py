"""Rows that cross the bus to the host while their CUDA device goes on, and what those who need them before read instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speedtransfer.cuda import is_capturing, side_stream, to_device
from speedtransfer.dtypes import bits_of
from speedtransfer.tables.write_log import Write


def copied(rows: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return copies of `rows`, ``(n, width)`` by plane on a CUDA device, so that the caller may change the rows.

    None where they cannot be made: too little memory, or a CUDA graph, whose replays would not make them.
    """
    if is_capturing():
        return None
    try:
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in rows.items()}
    except torch.cuda.OutOfMemoryError:
        return None


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Queue on a stream of its own, after what the current stream of `device` was given so far."""
    stream = side_stream(device, "scatter")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def overlay(fetched: dict[str, Tensor], ids: Tensor, writes: Sequence[Write], num_rows: int) -> Tensor | None:
    """Put what was written over rows that were read before; return which rows have to be read again, (n,) bool, if any.

    Parameters
    ----------
    fetched : dict of str to Tensor
        The rows `ids` by plane, ``(n, width)``, changed in place.
    ids : Tensor
        ``(n,)`` int64 on the device of `fetched`, or on the host; maybe padded.
    writes : sequence of Write
        In their order.
    num_rows : int
        Of the table.
    """
    again = list[Tensor]()
    for write in writes:
        if write.rows is None:
            again.append(write.ids)
            continue
        places, found = _places(ids, write.ids, num_rows)
        if not ids.is_cuda:
            # The host knows which they are.
            at = found.nonzero().flatten()
            places, at = (to_device(one, fetched["weight"].device) for one in (places[at], at))
        for name, part in write.rows.items():
            if name not in fetched:
                continue
            target, part = bits_of(fetched[name]), bits_of(part)
            if ids.is_cuda:
                torch.where(found.unsqueeze(1), part[places], target, out=target)
            elif len(at):
                target[at] = part[places]
    return _places(ids, torch.cat([to_device(part, ids.device) for part in again]), num_rows)[1] if again else None


def _places(ids: Tensor, among: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return where each of `ids` (n,) is in `among` (m,), anywhere if it is not, and whether it is; padding is not."""
    if not len(among):
        return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    ordered, order = to_device(among, ids.device).sort()
    at = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return order[at], (ordered[at] == ids) & (ids < num_rows)
