"""Rows of ids in a checkpoint that is merged: deltas tell them apart by the ids, and here they get rows of the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from speedtransfer.checkpoint import manifest
from speedtransfer.checkpoint.delta_checks import content_after
from speedtransfer.checkpoint.delta_file import OF_PLACES, Delta
from speedtransfer.checkpoint.merged_rows import Base, MergedTable, written_at
from speedtransfer.checkpoint.plain_data import decode
from speedtransfer.checkpoint.row_hashes import Content, hashes_of, reserved_sum
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.nn.module_state import OF_VOCABULARY
from speedtransfer.progress import ByteProgress
from speedtransfer.tables import row_chunks
from speedtransfer.vocabulary.loaded_state import KnownIds, read_state


class MergedIds(MergedTable):
    """The rows of a table, told apart by their ids: as a copy has them that has loaded the base and applied the deltas.

    Ids keep the rows that they have in the base. New ones get those of ids that are gone, then more at the end. The memory
    that this takes grows with the ids.

    Attributes
    ----------
    state : dict of str to Tensor
        What the state dict has of the ids, by its keys, once they were checked.
    """

    def __init__(self, key: str, chain: Sequence[Delta], base: Base) -> None:
        super().__init__(key, chain, base)
        # They lie in the order of their numbers, in one file.
        self.order = None
        self.state = dict[str, Tensor]()

    def _begins(self) -> int:
        found = self.base.spec(self.names["weight"])
        return found[1][0] if found else 0

    def check(self, bar: ByteProgress) -> None:
        """Raise unless each delta begins with the rows that are there before it; give its ids rows."""
        place, start = self.base.place, self.key.removesuffix("weight") + OF_VOCABULARY
        with manifest.damage_told(place):
            entries = {n: entry for n, entry in self.base.content["model"]["entries"].items() if n.startswith(start)}
            state = {n: decode(entry, self.base.readers["model"].read) for n, entry in entries.items()}
            if not state:
                raise InvalidValueError(
                    f"{place!r} has no ids of {self.key!r} but {str(self.chain[0].path)!r} has; pass the checkpoint that it "
                    "follows"
                )
            saved = read_state({name.removeprefix(start): v for name, v in state.items()}, self.key)
            known = KnownIds(saved, sum(len(rows.ids) for _, _, rows in self._deltas()))
        if len(known) != self.begins:
            raise StorageError(f"{place!r} has ids of another number of rows of {self.key!r}; use another checkpoint")
        now = self._content(known, bar)
        for delta, facts, rows in self._deltas():
            now = content_after(delta, self.key, now, repr(place))
            about = facts.vocabulary
            assert about is not None
            if (list(known.features), known.padding) != (list(about["features"]), about["padding_idx"]):
                raise InvalidValueError(
                    f"{place!r} has ids of the features {list(known.features)} with padding_idx={known.padding} in "
                    f"{self.key!r} but {str(delta.path)!r} {list(about['features'])} with {about['padding_idx']}; pass the "
                    "checkpoint that it follows"
                )
            with manifest.damage_told(delta.path):
                numbers = known.follow(rows.ids.numpy(), rows.gone.numpy(), about)
                known.note_uses(numbers, *(rows.parts.get(OF_VOCABULARY + name) for name in ("last_use", "counts")))
            self.written += [written_at(numbers, rows.parts)]
            self.written += [written_at(np.arange(len(rows.reserved["weight"])), rows.reserved)]
        self.count = len(known)
        with manifest.damage_told(self.chain[-1].path):
            last = self._of_last(start)
            if last:
                # With state.
                known.go_on_with(last[f"{start}numbers"])
        self.state = state | last | {start + name: value for name, value in known.state().items()}
        # Rows are in none of its places in the processes that have saved the base.
        self.state.pop(start + "shares", None)

    def _of_last(self, start: str) -> dict[str, Tensor]:
        """Return what the last delta has of the vocabulary beside its rows, by the keys of the state dict."""
        last = self.chain[-1]
        entries = {n: entry for n, entry in last.content["model"]["entries"].items() if n.startswith(start)}
        return {
            name: decode(entry, lambda inner: last.tensors[f"model/{inner}"])
            for name, entry in entries.items()
            if name.removeprefix(start) not in OF_PLACES
        }

    def _content(self, known: KnownIds, bar: ByteProgress) -> Content:
        """Return the hashes of the rows of the base that have ids, in the order of these."""
        hashes, used = np.zeros(self.begins, np.uint64), known.used()
        for rows in row_chunks(self.begins, self.row_bytes):
            numbers = np.arange(rows.start, rows.stop)
            hashes[numbers] = hashes_of(known.ids[numbers], self.base_rows(numbers), self.fills)
            bar.advance(len(numbers) * self.row_bytes)
        order = used[np.argsort(known.ids[used])]
        reserved = reserved_sum(self._reserved(known), self.fills)
        return Content(hashes[order], known.ids[order], reserved)

    def _reserved(self, known: KnownIds) -> dict[str, Tensor]:
        rows = self.base_rows(np.arange(known.numbers["reserved"]))
        return {plane: part for plane, part in rows.items() if not plane.startswith(OF_VOCABULARY)}
