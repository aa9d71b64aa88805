"""What a vocabulary holds, read and changed by id: copies for serving, archives and other tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.changes import Changes
from speedtransfer.vocabulary.feature_keys import FeatureKeys
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.ids import as_ids
from speedtransfer.vocabulary.mixing import owners_of

if TYPE_CHECKING:
    # What the class that has this part brings.
    Base = Any
else:
    Base = object


class Contents(Base):
    """The part of a :class:`~speedtransfer.Vocabulary` that reads and changes rows by id."""

    def ids(self) -> Tensor:
        """Return the known ids, ``(n,)`` int64, in the order of their rows."""
        live, owner = self._bound()
        with owner.rows.lock:
            return torch.from_numpy(live.ids[live.occupied()])

    def __contains__(self, id: Any) -> bool:
        live, owner = self._bound()
        with owner.rows.lock:
            return bool(live.index.find(as_ids([id]).numpy())[0] >= 0)

    def rows(self, ids: Any) -> Tensor:
        """Return the rows of ids in ``embedding.table``, int64 in the shape of `ids`, -1 of an unknown one."""
        live, owner = self._bound()
        wanted = as_ids(ids).cpu()
        with owner.rows.lock:
            return torch.from_numpy(owner.owners.to_whole(live.index.find(wanted.reshape(-1).numpy()))).view(
                wanted.shape
            )

    def features_of(self, rows: Tensor) -> Tensor:
        """Return the number of the feature of each of `rows` (n,) of this process, on their device; 0: of none."""
        live, _ = self._bound()
        # Padding of rows on a device names none.
        ids = live.ids[np.minimum(rows.cpu().numpy(), len(live.ids) - 1)]
        return FeatureKeys(len(self.features)).split(torch.from_numpy(ids))[0].to(rows.device)

    def export(self) -> tuple[Tensor, Tensor]:
        """Return the known ids, ``(n,)`` int64, sorted, and their weights, ``(n, dim)`` on the CPU.

        For a plain ``nn.Embedding.from_pretrained(rows)``, whose row `i` is then that of ``ids[i]`` (``torch.searchsorted``).
        """
        live, owner = self._bound()
        with owner.rows.lock:
            rows = live.occupied()
            rows = rows[np.argsort(live.ids[rows], kind="stable")]
            return torch.from_numpy(live.ids[rows]), self._weights(rows)

    @torch.no_grad()
    def _weights(self, rows: np.ndarray) -> Tensor:
        """Return the weights of `rows` (n,), caught up, ``(n, dim)`` on the CPU."""
        _, owner = self._bound()
        table, dtype = owner.rows.table, owner.rows.dtype
        with torch.inference_mode(False):
            values = torch.empty(len(rows), table.dim, dtype=dtype, device="cpu")
            for part in row_chunks(len(rows), table.dim * dtype.itemsize):
                chunk = torch.from_numpy(rows[part]).to(table.device)
                values[part] = owner.rows.read(chunk)["weight"].to("cpu")
        return values

    @torch.no_grad()
    def adopt(self, weights: Tensor, rank: int = 0, ranks: int = 1) -> None:
        """Let the ids from 0 on be known, with `weights`, ``(n, dim)``, of a table with a row for each; none was before.

        Of several processes those that `rank` owns.
        """
        live, owner = self._bound()
        with owner.rows.lock:
            ids = np.arange(len(weights))
            ids = ids[owners_of(ids, ranks) == rank]
            if self._padding is not None and 0 <= self._padding[0] < len(weights):
                ids = ids[ids != self._padding[0]]
                owner.rows.load("weight", weights[self._padding[0]][None], self._padding[1])
            rows = live.take(len(ids))
            for part in row_chunks(len(ids), 4 * live.table.dim):
                owner.rows.load("weight", weights[torch.from_numpy(ids[part])], int(rows[part][0]))
            live.assign(ids, rows, self.clock)

    @torch.no_grad()
    def update(self, ids: Any, rows: Any = None) -> None:
        """Set the weights of ids to `rows`; new ids are admitted. The state of the optimizer stays, of new ids it is fresh.

        Parameters
        ----------
        ids : tensor, ndarray, list or Changes
            ``(n,)``, distinct; or what `changed_since` has returned: ids that were forgotten there are forgotten here too.
        rows : Tensor, optional
            ``(n, dim)``.

        Raises
        ------
        HostMemoryError
            There is no row for a new id. Nothing has changed.
        InvalidValueError, InvalidTypeError
            An id occurs twice; shapes that do not match; a gradient of an id to be forgotten is pending; changes before
            those given are missing.
        """
        self.settle()
        _, owner = self._bound()
        wanted, values, changes = owner.owners.together(lambda: self._checked(ids, rows))
        wanted, values = owner.owners.to_owners(wanted, values)
        owner.owners.together(lambda: self._update(wanted, values, changes))

    def _checked(self, ids: Any, rows: Any) -> tuple[np.ndarray, Tensor, Changes | None]:
        """Return ids (n,), their rows ``(n, dim)`` and the changes that these are of, if any; raise where it cannot be."""
        live, owner = self._bound()
        changes = ids if isinstance(ids, Changes) else None
        if changes is not None:
            self._check_alone("update() with changes")
            ids, rows = changes.ids, changes.rows
            self._check_changes(live, changes)
        wanted, values = as_ids(ids).cpu().numpy(), rows
        if not isinstance(values, Tensor) or wanted.ndim != 1 or tuple(values.shape) != (len(wanted), live.table.dim):
            what = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise InvalidValueError(
                f"{owner}: ids has shape {wanted.shape} and rows is {what} but must be a tensor "
                f"of shape ({len(wanted)}, {live.table.dim}); pass one with a row for each id"
            )
        return wanted, values, changes

    def _update(self, wanted: np.ndarray, values: Tensor, changes: Changes | None) -> None:
        live, owner = self._bound()
        if len(np.unique(wanted)) < len(wanted):
            raise InvalidValueError(f"{owner}: an id occurs twice among the {len(wanted)} given; pass each once")
        with owner.rows.lock:
            live.table.check_writable()
            gone = np.empty(0, dtype=np.int64)
            if changes is not None:
                known = live.ids[live.occupied()]
                gone = self._check_to_forget(
                    np.setdiff1d(known, wanted) if changes.complete else changes.evicted.cpu().numpy()
                )
            at = live.index.find(wanted)
            self._make_room(np.count_nonzero(at < 0) - len(gone), np.concatenate([at, gone]))
            try:
                self._write(wanted, values, gone, changes)
            except BaseException:
                # An interrupt: all is written again, so that none has what it had before.
                self._write(wanted, values, gone, changes)
                raise

    def _write(self, ids: np.ndarray, values: Tensor, gone: np.ndarray, changes: Changes | None) -> None:
        """Set the weights of ids (n,) to `values`, ``(n, dim)``; there is room, also in the rows `gone`, whose ids go."""
        live, _ = self._bound()
        if changes is not None:
            self._follow_clock(changes)
        self._take_from_ids(gone[live.last_use[gone] != FREE], archive=False)
        at = live.index.find(ids)
        new, old = np.flatnonzero(at < 0), np.flatnonzero(at >= 0)
        self._begin_chunks(ids, new, values)
        for part in row_chunks(len(old), live.table.dim * values.element_size()):
            self._put(at[old[part]], values[torch.from_numpy(old[part])])
        live.last_use[at[old]] = self.clock
        if changes is not None:
            self._put(np.arange(live.reserved), changes.reserved)
            # Last: if something comes in before, the next changes are refused.
            self._follow_changes(changes)

    def _begin_chunks(self, ids: np.ndarray, new: np.ndarray, values: Tensor) -> None:
        """Give those of `ids` (n,) that are at `new` (m,) rows with their `values`, ``(n, dim)``; there is room."""
        live, _ = self._bound()
        with live.changing():
            rows = live.take(len(new))
            for part in row_chunks(len(new), live.table.dim * values.element_size()):
                self._begin(ids[new[part]], rows[part], values[torch.from_numpy(new[part])])

    def _put(self, rows: np.ndarray, values: Tensor) -> None:
        """Set the weights of `rows` (n,), distinct, and keep their state."""
        owner = self._bound()[1]
        if len(rows):
            at = torch.from_numpy(rows).to(owner.rows.table.device)
            owner.rows.catch_up(at)
            owner.rows.put("weight", at, values)

    @torch.no_grad()
    def forget(self, ids: Any) -> int:
        """Let ids be unknown, and erase their weights and state; return how many were known.

        Raises
        ------
        InvalidValueError
            A gradient of one of them may still come, or no step has taken it yet.
        """
        _, owner = self._bound()
        wanted = owner.owners.together(lambda: as_ids(ids).cpu().reshape(-1).numpy())
        wanted = np.unique(owner.owners.to_owners(wanted)[0])
        with owner.rows.lock:
            self.settle()
            rows = owner.owners.together(lambda: self._check_to_forget(wanted))
            self._erase(rows)
        return owner.owners.sum(len(rows))

    def _check_to_forget(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of those of `ids` (n,) that are known; raise if one may not be forgotten now."""
        live, owner = self._bound()
        rows = live.index.find(ids)
        rows = rows[rows >= live.reserved]
        in_use = owner.rows_in_use()
        if len(rows) and (in_use is None or np.isin(rows, in_use).any()):
            raise InvalidValueError(
                f"{owner}: an id to be forgotten was looked up in training, and no step has followed, or its gradient "
                "is still there; call optimizer.step() and zero_grad() first"
            )
        return rows

    def _erase(self, rows: np.ndarray) -> None:
        """Take `rows` (n,) from their ids, and set their weights and state to zero."""
        try:
            self._take_from_ids(rows, archive=False)
            self._clear(rows)
        except BaseException:
            self._clear(rows[self._bound()[0].last_use[rows] == FREE])
            raise

    def _clear(self, rows: np.ndarray) -> None:
        live, owner = self._bound()
        at = torch.from_numpy(rows).to(live.table.device)
        owner.rows.reset(at, torch.zeros(len(rows), live.table.dim, dtype=owner.rows.dtype, device="cpu"))
