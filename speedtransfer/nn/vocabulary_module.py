"""The part of modules that look ids up in a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.nn.lookup import frozen_lookup, lookup
from speedtransfer.nn.ticket import FoundRows
from speedtransfer.nn.vocabulary_lookup import UnseenValues, find_rows
from speedtransfer.optim import Handle, UsedFeatures
from speedtransfer.vocabulary import Vocabulary, as_ids

Read = TypeVar("Read")


class VocabularyModule:
    """The part of :class:`TableModule` for ids of a vocabulary, and of features of one."""

    _handle: Any
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    training: bool

    @property
    def num_embeddings(self) -> int:
        """Rows of the weight, as many as it has by now; with a vocabulary those of no id too."""
        handle = self.__dict__.get("_handle")
        number: int = self.__dict__["num_embeddings"] if handle is None else handle.num_rows
        return number

    @num_embeddings.setter
    def num_embeddings(self, number: int) -> None:
        self.__dict__["num_embeddings"] = number

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What gives ids their rows; None: an id is the number of its row."""
        handle = self.__dict__.get("_handle")
        if handle is None:
            # On the meta device that of the options.
            return self.__dict__.get("_options", {}).get("vocabulary")
        return handle.id_space.vocabulary

    def _checked_padding(self, padding_idx: int | None, of: str = "") -> int | None:
        """Return the number of the row of padding, which may be counted from the end; raise unless there is such a row."""
        if padding_idx is None:
            return None
        padding_idx, rows = check_size(padding_idx, f"padding_idx{of}", -(2**63)), self.num_embeddings
        # The same exception as torch.nn raises, for code that catches it.
        assert -rows <= padding_idx < rows, (
            f"padding_idx{of} must be within num_embeddings: it is {padding_idx} but there are {rows} rows"
        )
        return padding_idx % rows

    def _read_by_id(self, ids: Any, training: bool, read: Callable[[FoundRows], Read]) -> Read:
        """Return `read` of the rows of ids, of which the vocabulary admits new ones if this module is in train mode.

        No other thread gives these rows to other ids while they are read.
        """
        handle = self._handle
        vocabulary = handle.id_space.vocabulary
        if training or self.max_norm is not None or not handle.owners.has_whole:
            # Until autograd has them. All processes must read as often.
            with handle.rows.lock:
                return read(self._found_rows(ids, training))
        while True:
            # Without the lock, for threads that evaluate: what they read they may have to read again.
            generation = vocabulary.generation
            found = self._found_rows(ids, training)
            result = read(found)
            if generation == vocabulary.generation:
                return result
            if not vocabulary.have_changed(found.rows.reshape(-1).cpu().numpy(), generation):
                return result

    def _activate_by_id(self, ids: Any, training: bool, features: UsedFeatures | None = None) -> ActiveRows:
        """Return the unique rows of ids, as `TableModule.activate`."""
        limits = self.max_norm, self.norm_type, self._handle.id_space.padding_row(self.padding_idx)

        def read(found: FoundRows) -> ActiveRows:
            # A gradient may be added by hand later.
            found = found if training else self._stamped(found)
            return activate(self._handle, found, training, *limits, by_hand=True, features=features)

        return self._read_by_id(ids, training, read)

    def _look_up_by_id(self, ids: Any, training: bool, features: UsedFeatures | None = None) -> Tensor:
        """Return the rows that ids of a vocabulary have; `features`: those that the ids are of, where that matters."""
        handle, by_freq = self._handle, self.scale_grad_by_freq
        padding = handle.id_space.padding_row(self.padding_idx)

        def read(found: FoundRows) -> Tensor:
            if not training and self.max_norm is None:
                return found.filled(frozen_lookup(handle, found, padding, by_freq))
            limits = self.max_norm, self.norm_type, padding
            active = activate(handle, found, training, *limits, padded=True, features=features)
            return found.filled(lookup(active, by_freq))

        return self._read_by_id(ids, training, read)

    def _found_rows(self, ids: Any, training: bool) -> FoundRows:
        id_space: Any = self._handle.id_space
        found = find_rows(id_space, ids, training and self.training, on_device=self.max_norm is None)
        if self.max_norm is not None and isinstance(found.fill, UnseenValues):
            # As the rows of known ids when they are read.
            values = found.fill.values
            torch.embedding_renorm_(
                values, torch.arange(len(values), device=values.device), self.max_norm, self.norm_type
            )
        return self._stamped(found) if training else found

    def _stamped(self, found: FoundRows) -> FoundRows:
        """Return the same with what a gradient must know of the lookup."""
        # Of those there is a warning, if rows are trained nevertheless.
        counted = self.training and torch.is_grad_enabled()
        return found._replace(stamp=self._handle.id_space.stamp(0 if counted else found.num_unseen, counted))

    def _check_same_ids(self, other: Handle | None) -> None:
        """Raise if, with the weight of another table, ids would no longer be those of a vocabulary, or padding no padding."""
        handle = self.__dict__.get("_handle")
        if other is None or other is handle:
            return
        own, theirs = self.vocabulary, other.id_space.vocabulary
        if own is None and theirs is None:
            return
        if theirs is None:
            raise InvalidTypeError(
                f"{handle or 'this module'} has a vocabulary and is given the weight of another table, whose ids are the "
                "numbers of its rows; make both with a vocabulary, or use the other module"
            )
        padding = None if self.padding_idx is None else int(as_ids([self.padding_idx]))
        if padding != theirs.padding_idx:
            raise InvalidValueError(
                f"padding_idx is {self.padding_idx} but {other} was made with "
                f"padding_idx={theirs.padding_idx}, which is an id that has a row of its own; make both modules with the same"
            )
