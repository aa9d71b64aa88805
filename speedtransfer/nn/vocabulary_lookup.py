"""Look ids up that have a vocabulary: find or admit them, and read the rows that they have."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing, to_device
from speedtransfer.engines import CHANGED_ID
from speedtransfer.errors import InvalidTypeError
from speedtransfer.nn.ticket import FoundRows, Ticket, find_ticket, refuse_unique_rows
from speedtransfer.optim import VocabularyIds
from speedtransfer.vocabulary import UNSEEN_ROW, NotedIds, as_ids


class UnseenValues(NamedTuple):
    """What some of the ids of a lookup read.

    Attributes
    ----------
    places : Tensor
        (k,) int64, which of the ids, flat.
    values : Tensor
        ``(k, dim)``; both on the compute device.
    """

    places: Tensor
    values: Tensor

    def into(self, out: Tensor) -> Tensor:
        """Return `out`, ``(*shape of the ids, dim)``, with the values in it."""
        out.view(out.shape[:-1].numel(), out.shape[-1]).index_copy_(0, self.places, self.values.to(out.dtype))
        return out

    def beside(self, rows: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows (n, dim) followed by the values, and `inverse`, the row of each id, with the places of these."""
        number = torch.arange(len(rows), len(rows) + len(self.places), device=rows.device)
        inverse = inverse.reshape(-1).index_copy(0, self.places, number).view(inverse.shape)
        return torch.cat([rows, self.values.to(rows.dtype)]), inverse


class UnseenOnDevice(NamedTuple):
    """The same where only the device knows which ids those are.

    Attributes
    ----------
    id_space : VocabularyIds
    ids, rows : Tensor
        (n,) int64 on the device, the ids of the lookup and their rows.
    """

    id_space: VocabularyIds
    ids: Tensor
    rows: Tensor

    def into(self, out: Tensor) -> Tensor:
        """Return `out`, ``(*shape of the ids, dim)``, with the values in it."""
        # Autograd need not see it: the gradient of the row of unseen ids goes nowhere.
        self.id_space.vocabulary.fill_unseen(out.detach(), self.ids, self.rows)
        return out

    def beside(self, rows: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows (n, dim) followed by a value for each id, and `inverse`, with the places of those of unseen ids."""
        values = self.into(torch.zeros(len(self.ids), rows.shape[1], dtype=rows.dtype, device=rows.device))
        number = torch.arange(len(rows), len(rows) + len(self.ids), device=rows.device)
        unseen = self.rows == UNSEEN_ROW
        return torch.cat([rows, values]), torch.where(unseen, number, inverse.reshape(-1)).view(inverse.shape)


def find_rows(id_space: VocabularyIds, ids: Any, admit: bool, on_device: bool = True) -> FoundRows:
    """Return the rows of ids: any integers, or the ticket that `prefetch` returned for them.

    With `admit` new ids get rows, now or after the next step. `on_device` lets ids on a device be found there.
    """
    try:
        given, ticket = _given(id_space, ids), ids if isinstance(ids, Ticket) else None
        ticket = find_ticket(id_space.handle, given) if ticket is None and id_space.handle.reads_ahead else ticket
        admit = admit and not _runs_again()
        found = None if id_space.owners.processes > 1 else _find_without_wait(id_space, given, admit, on_device)
        if found is not None:
            return found._replace(ticket=ticket)
        flat = _on_host(id_space, ids, given, ticket)
    except Exception:
        id_space.owners.refuse_ids(admit)
        raise
    if admit and id_space.vocabulary.unseen != "initial" and torch._C._current_graph_task_id() >= 0:
        _check_known(id_space, flat)
    found = _found(id_space, given, flat, id_space.owners.find(flat, admit))
    return found._replace(ticket=ticket, asked=id_space.owners.asked)


def _given(id_space: VocabularyIds, ids: Any) -> Tensor:
    """Return the ids of a lookup, int64; raise for anything else."""
    handle = id_space.handle
    if isinstance(ids, Ticket):
        ids.check(handle)
        ids = ids.source
    refuse_unique_rows(handle, ids)
    if handle.table.device.type == "cuda":
        check_not_capturing(f"a lookup in {handle}, whose ids the host maps to rows,", "leave it out of the graph")
    return as_ids(ids)


def _on_host(id_space: VocabularyIds, ids: Any, given: Tensor, ticket: Any) -> np.ndarray:
    """Return `given` ids of a lookup, (n,), for the map on the host: it waits for those on a device.

    Those of a ticket, which `ids` may be, have been on their way since it was made.
    """
    if ticket is None or ticket.noted is None:
        return given.reshape(-1).cpu().numpy()
    if ticket is not ids:
        # Somebody may have written to their memory whom torch does not see. The host cannot look without waiting.
        id_space.handle.table.check(torch.where(given == ticket.source, 0, CHANGED_ID).reshape(-1))
    return ticket.noted.ids


def _find_without_wait(id_space: VocabularyIds, given: Tensor, admit: bool, on_device: bool) -> FoundRows | None:
    """Return the rows of ids that are found on their device, or admitted later; None for others."""
    vocabulary, flat = id_space.vocabulary, given.reshape(-1)
    on_device = on_device and given.is_cuda and id_space.handle.table.takes_padding
    rows, noted = None, None
    if admit and vocabulary.deferred:
        rows, noted = vocabulary.find_deferred(flat, on_device)
        if rows is None:
            return _found(id_space, given, noted.ids, vocabulary.noted_rows(noted))
    elif on_device and not admit:
        rows = vocabulary.find_on_device(flat)
    if rows is None:
        return None
    fill = UnseenOnDevice(id_space, flat, rows) if vocabulary.unseen == "initial" else None
    return FoundRows(rows.view(given.shape), fill=fill, noted=noted)


def _found(id_space: VocabularyIds, given: Tensor, ids: np.ndarray, found: np.ndarray) -> FoundRows:
    """Return the rows of `given` ids, on the host (n,), that the host has found, (n,) with -1 where there is none."""
    handle, vocabulary = id_space.handle, id_space.vocabulary
    device = handle.table.device
    noted = NotedIds(None, found) if device.type == "cuda" else None
    unseen = np.flatnonzero(found < 0)
    rows = torch.from_numpy(np.where(found < 0, id_space.unseen_row, found) if len(unseen) else found)
    # An engine that moves rows on the host takes them there.
    rows = rows if handle.table.moves_on_host else to_device(rows, given.device)
    rows = rows.view(given.shape)
    if not len(unseen) or vocabulary.unseen != "initial":
        return FoundRows(rows, len(unseen), noted=noted)
    values = to_device(vocabulary.initial_values(ids[unseen], handle.table.dim, handle.rows.dtype), device)
    return FoundRows(rows, len(unseen), UnseenValues(to_device(torch.from_numpy(unseen), device), values), noted)


def _runs_again() -> bool:
    """Tell whether ``torch.utils.checkpoint`` repeats a forward in backward: the first has admitted and counted its ids.

    With ``use_reentrant=True`` the first had no gradients, and admitted none.
    """
    frame: FrameType | None = sys._getframe() if torch._C._current_graph_task_id() >= 0 else None
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("unpack_hook", "backward") and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return name == "unpack_hook"
        frame = frame.f_back
    return False


def _check_known(id_space: VocabularyIds, ids: np.ndarray) -> None:
    """Raise if ids (n,) may be admitted in a backward: a forward that is repeated there has read other values for them."""
    if id_space.owners.any_unknown(ids):
        raise InvalidTypeError(
            f"{id_space}: new ids are looked up in a backward (torch.utils.checkpoint with use_reentrant=True), after a "
            f"forward without gradients where they were unseen={id_space.vocabulary.unseen!r}; pass use_reentrant=False, or "
            "Vocabulary(unseen='initial')"
        )


def refuse_without_rows(handle: Any) -> None:
    """Raise for a lookup in a weight that was swapped in, or within a transform, where ids are not row numbers."""
    if handle is not None and not handle.id_space.by_row:
        raise without_rows(handle)


def without_rows(about: Any) -> InvalidTypeError:
    """Return the error for such a lookup in what is called `about`."""
    return InvalidTypeError(
        f"{about} has ids that are not row numbers of a weight that is swapped in (functional_call, a parametrization, "
        "torch.func, torch.export); call the module as it is, outside of transforms"
    )
