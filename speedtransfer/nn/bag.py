"""The drop-in replacement for ``torch.nn.EmbeddingBag``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from speedtransfer.nn.active import activate, rows_for_lookup
from speedtransfer.nn.embedding import check_pretrained, device_and_dtype
from speedtransfer.nn.jagged import of_nested
from speedtransfer.nn.lookup import bag_lookup, check_bags
from speedtransfer.nn.lookup_ops import looks_up
from speedtransfer.nn.options import TableOptions, takes_options
from speedtransfer.nn.shard_rounds import ask
from speedtransfer.nn.table_module import TableModule
from speedtransfer.nn.ticket import FoundRows, Ticket
from speedtransfer.nn.tracing import in_transform
from speedtransfer.nn.vocabulary_lookup import refuse_without_rows
from speedtransfer.tables import Table

# This class may be put in its place.
_OF_TORCH = nn.EmbeddingBag


class EmbeddingBag(TableModule, nn.EmbeddingBag):
    """Replace ``torch.nn.EmbeddingBag``: the rows live in a :class:`~speedtransfer.Table`.

    Positional arguments and behaviour are those of ``torch.nn.EmbeddingBag``; the keywords after them are those of
    :class:`~speedtransfer.Embedding`.
    """

    @takes_options
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | Table | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super(_OF_TORCH, self).__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.mode, self.sparse = scale_grad_by_freq, mode, sparse
        self.include_last_offset = include_last_offset
        # That of a table may be only read; `from_pretrained` says whether it is trained.
        self._set_up(_weight, isinstance(_weight, Table), device, dtype, options)

    @looks_up
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the sum, mean or max of each bag's rows, ``(bags, embedding_dim)``.

        Parameters
        ----------
        input : Tensor
            Ids: ``(bags, n)``, nested ones too (``torch.jagged``), or 1-D with `offsets`.
        offsets : Tensor, optional
            ``(bags,)``, where each bag begins in a 1-D `input`.
        per_sample_weights : Tensor, optional
            A weight for each id, the shape of `input` (mode "sum" only).
        """
        if not self._has_rows() or in_transform() or (self._reads_weight and self._reads_another()):
            refuse_without_rows(self.__dict__.get("_handle"))
            ids = input.ids.view(input.shape) if isinstance(input, Ticket) else input
            return super().forward(ids, offsets, per_sample_weights)
        training = torch.is_grad_enabled() and self._handle.requires_grad
        freq, last = self.scale_grad_by_freq, self.include_last_offset
        if isinstance(input, Tensor) and input.is_nested:
            input, offsets, per_sample_weights = of_nested(input, per_sample_weights)
            last = True
        if not self._handle.owners.has_whole:
            input = ask(self, input)
        elif self.max_norm is not None or self._handle.id_space.come_and_go:
            padded = self.padding_idx is not None
            check_bags(self._handle, input, offsets, per_sample_weights, self.mode, freq, last, padded)

        def look_up(ids: Any, padding: int | None) -> Tensor:
            about = training, self.max_norm, self.norm_type, padding
            active = activate(self._handle, ids, *about, padded=True, spare=padding is not None)
            fill = ids.fill if isinstance(ids, FoundRows) else None
            return bag_lookup(active, offsets, per_sample_weights, self.mode, freq, last, self.sparse, fill)

        if self._handle.id_space.come_and_go:
            padding = self._handle.id_space.padding_row(self.padding_idx)
            return self._read_by_id(input, training, lambda found: look_up(found, padding))
        return look_up(*rows_for_lookup(self._handle, input, self.padding_idx, training))

    @classmethod
    @takes_options
    def from_pretrained(
        cls,
        embeddings: Tensor | Table,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> EmbeddingBag:
        """Make a bag of the rows of a 2-D tensor or of a table, used in place as in :meth:`Embedding.from_pretrained`."""
        rows, dim = check_pretrained(embeddings, dtype)
        given: Any = {"num_embeddings": rows, "embedding_dim": dim, "_weight": embeddings, "padding_idx": padding_idx}
        given |= {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq, "mode": mode}
        given |= {"sparse": sparse, "include_last_offset": include_last_offset, **device_and_dtype(embeddings, dtype)}
        bag = cls(**given, **options)
        trainable = bag.weight.requires_grad or (isinstance(embeddings, Table) and bag.weight.is_floating_point())
        bag.weight.requires_grad_(trainable and not freeze)
        return bag
